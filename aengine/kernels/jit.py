"""Compilation of kernels with Numba, behind decorators that keep their types."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

from attrs import frozen
from numba import njit, prange
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator, UserWideCacheLocator

__all__ = ["RowKernel", "compiled", "prange", "row_kernel"]

P = ParamSpec("P")
R = TypeVar("R")

# No fastmath: LLVM may neither reorder a sum nor fuse a product into it, so the source fixes every bit.
_njit: Any = functools.partial(njit, nogil=True, error_model="numpy", boundscheck=False)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A function that compiled code calls; it becomes part of its caller and of its caller's cache entry."""
    return cast(Callable[P, R], _njit(function))


@frozen(eq=False)
class RowKernel(Generic[P]):
    """One loop over independent rows (`prange`), compiled once for the calling thread and once for all threads.

    Both give the same bits: no row reads what another row writes. A launch of all threads costs microseconds, so
    small inputs are faster without.
    """

    serial: Callable[P, None]
    parallel: Callable[P, None]


def row_kernel(function: Callable[P, None]) -> RowKernel[P]:
    """Compile at the first call with given types, or load from the cache on disk."""
    return RowKernel(_cached(function, parallel=False), _cached(function, parallel=True))


def _cached(function: Callable[P, None], *, parallel: bool) -> Callable[P, None]:
    # Numba's cache files are told apart by qualified name, not by options.
    source = cast(types.FunctionType, function)
    suffix = "parallel" if parallel else "serial"
    named = types.FunctionType(source.__code__, source.__globals__, f"{source.__name__}_{suffix}")
    named.__qualname__, named.__module__, named.__doc__ = named.__name__, source.__module__, source.__doc__
    dispatcher: Any = _njit(parallel=parallel)(named)
    # What `cache=True` does, with our own stamp. If no directory can be written, every process compiles for itself.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _KernelCache(named)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return cast(Callable[P, None], dispatcher)


@functools.cache
def _sources_stamp(caller: str) -> bytes:
    """Digest of a kernel's file and of this package, whose functions are compiled into it.

    Numba looks at the kernel's own file only, and would go on using code made from an older `simd.py`.
    """
    digest = hashlib.sha256(Path(caller).read_bytes())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


class _StampedInTree(InTreeCacheLocator):
    def get_source_stamp(self) -> bytes:
        return _sources_stamp(self._py_file)


class _StampedUserWide(UserWideCacheLocator):
    def get_source_stamp(self) -> bytes:
        return _sources_stamp(self._py_file)


class _KernelCacheImpl(CompileResultCacheImpl):
    _locator_classes = [_StampedInTree, _StampedUserWide]  # noqa: RUF012


class _KernelCache(FunctionCache):
    _impl_class = _KernelCacheImpl
