"""What a page is found by: its tokens as bytes, and what it follows."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

from aengine.errors import PromptError

__all__ = ["IDENTITY", "TOKEN_BYTES", "Salt", "TokenIds", "root_identity", "token_bytes"]

TOKEN_BYTES = 4
IS_LITTLE_ENDIAN = sys.byteorder == "little"
ORDER = "@" if IS_LITTLE_ENDIAN else "<"  # the same bytes; the native order packs in half the time
IDENTITY = struct.Struct("<q")


class _Array(Protocol):
    """Arrays of `array`, numpy and torch."""

    def tolist(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> _Array: ...


TokenIds = Sequence[int] | _Array
Salt = str | tuple[str, ...] | None
"""What besides the tokens decides whether KV may be shared: the user's `cache_salt`, or it and the identity of an
adapter. None, "" and () are three different salts."""


def token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as little-endian int32; the same for list, tuple, array, numpy and torch.

    Raises `PromptError` for what is not an integer or does not fit.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i" and IS_LITTLE_ENDIAN:
        return token_ids.tobytes()
    values = token_ids if isinstance(token_ids, list | tuple) else _as_list(token_ids)
    try:
        return struct.pack(f"{ORDER}{len(values)}i", *values)
    except struct.error as error:
        raise PromptError(f"token ids must be a flat sequence of integers of at most 32 bits: {error}") from None


def _as_list(token_ids: TokenIds) -> Sequence[int]:
    if isinstance(token_ids, Sequence):
        return list(token_ids)
    return token_ids.tolist()


def root_identity(epoch: int, salt: Salt) -> bytes:
    """Parent identity of first pages: at least nine bytes, different for every (epoch, salt)."""
    if salt is None:
        return IDENTITY.pack(epoch) + b"\0"
    if isinstance(salt, str):
        return IDENTITY.pack(epoch) + b"\1" + salt.encode("utf-8", "surrogatepass")
    parts = [part.encode("utf-8", "surrogatepass") for part in salt]
    return IDENTITY.pack(epoch) + b"\2" + b"".join(IDENTITY.pack(len(part)) + part for part in parts)
