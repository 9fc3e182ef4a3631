"""What computes: specs, checkpoints, tokenizers and the decoder."""
