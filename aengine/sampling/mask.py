"""The hook for structured output: which tokens may come next, decided by the caller from the output so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aengine.errors import TokenMaskError

__all__ = ["TokenMask", "TokenMaskSource", "allowed_by"]


class TokenMask(Protocol):
    """The rule of one sample. It is called in the engine's worker thread, once for each token."""

    def next_mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_] | None:
        """True for every token that may follow `output_ids`, [vocabulary]; None where all may. A mask may be shorter:
        a model's vocabulary can be padded beyond its tokenizer's, and tokens without a place in the mask may not come.

        The output is one token longer each time; the first one is not empty where a sample is resumed. An exception
        fails this sample's request and no other.
        """


class TokenMaskSource(Protocol):
    """Makes the rule of each sample of a request."""

    def start(self) -> TokenMask: ...


def allowed_by(mask: TokenMask, output_ids: Sequence[int], size: int) -> NDArray[np.bool_] | None:
    """Ask the hook; [size]. Raises `TokenMaskError` for whatever it raises, and for what is not a mask."""
    try:
        allowed: object = mask.next_mask(output_ids)
    except Exception as error:
        raise TokenMaskError(f"the token mask failed at output position {len(output_ids)}: {error!r}") from error
    if allowed is None:
        return None
    if not isinstance(allowed, np.ndarray) or allowed.dtype != np.bool_ or allowed.ndim != 1 or len(allowed) > size:
        what = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, np.ndarray) else type(allowed).__name__
        raise TokenMaskError(f"the token mask gave {what} at output position {len(output_ids)}, not bool [{size}]")
    return np.pad(allowed, (0, size - len(allowed)))
