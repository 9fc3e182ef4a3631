"""First calls of torch's elementary functions, made where no race can spoil them.

On x86 these functions choose their code at the first call. Where that call is spread over threads, some of them may
compute with a less accurate variant (pytorch#188792: up to 1.5e-4 off in one thread's share). No forward pass of ours
uses them, but oracles and losses do, and so does a trainer's model in the same process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["warm_up_torch"]

FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.cosh,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.expm1,
    torch.lgamma,
    torch.log,
    torch.log10,
    torch.log1p,
    torch.log2,
    torch.rsqrt,
    torch.sin,
    torch.sinh,
    torch.sqrt,
    torch.tan,
    torch.tanh,
)


@functools.cache
def warm_up_torch() -> None:
    """Call each function on one number, which one thread does alone; once in a process, in less than a millisecond.

    Protects what comes after it: an engine does it when it opens, so before a trainer's first forward pass if the
    engine is opened first.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(one)
