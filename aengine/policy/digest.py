"""The digest of a set of weights: SHA-256 over names, types, shapes and bytes.

Each tensor is hashed on its own (over name, dtype, shape and its bytes in row-major order), and the digest is the
SHA-256 over the tensors' digests in order of their names. So tensors can be hashed in parallel, and those that did not
change need not be hashed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["HashedTensor", "combine_digests", "digest_each", "digest_tensor", "digest_tensors"]

NUM_THREADS = 2


@frozen(eq=False)
class HashedTensor:
    """A tensor that has not been written to since its digest was taken."""

    tensor: Tensor
    digest: bytes

    def has_bits_of(self, tensor: Tensor) -> bool:
        """Whether the bytes are equal, which zero and minus zero are not; a fraction of the cost of hashing."""
        mine, other = self.tensor, tensor.detach()
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(_as_bytes(mine), _as_bytes(other))


def digest_tensor(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of one tensor; releases the interpreter lock while it hashes."""
    header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{','.join(map(str, tensor.shape))}\0"
    digest = hashlib.sha256(header.encode())
    digest.update(_as_bytes(tensor).numpy().data)
    return digest.digest()


def digest_each(
    tensors: Iterable[tuple[str, Tensor]], known: Mapping[str, HashedTensor] | None = None
) -> dict[str, bytes]:
    """Digest of every tensor by name, two at a time. Those with the bits of their `known` counterpart take its digest.

    135 M float32 parameters take about 0.2 s on two cores with SHA extensions.
    """
    known = known or {}

    def digest(pair: tuple[str, Tensor]) -> bytes:
        name, tensor = pair
        hashed = known.get(name)
        return hashed.digest if hashed is not None and hashed.has_bits_of(tensor) else digest_tensor(name, tensor)

    named = list(tensors)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return dict(zip((name for name, _ in named), pool.map(digest, named), strict=True))


def combine_digests(parts: Mapping[str, bytes]) -> str:
    """The digest of the whole, in hexadecimal."""
    return hashlib.sha256(b"".join(parts[name] for name in sorted(parts))).hexdigest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of all tensors, every one hashed."""
    return combine_digests(digest_each(tensors))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
