"""How fast: the operators of a decoder, as a torch oracle (`reference`) and as compiled row kernels (`cpu`)."""
