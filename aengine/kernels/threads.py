"""On which threads compiled kernels run: torch's own, where that can be had.

Numba offers three thread pools. `workqueue` aborts the process when two threads launch at once, so it is never used.
`omp` binds to the OpenMP library that torch has loaded (torch's `libgomp` comes first in the loader's global scope), so
both work with one pool, which launches from several threads are safe with. It needs a `libgomp.so.1.0.0` on the system,
or nothing of it loads; then `tbb`, and without that kernels run in the calling thread alone.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numba
import torch
from numba.np.ufunc import parallel

__all__ = ["threading_layer", "use_threads"]

config: Any = numba.config

PARALLEL_FROM = 32768  # numbers touched; below, launching costs more than it gains


def use_threads(work: int) -> bool:
    """Whether a kernel that touches about `work` numbers should run in parallel.

    If so, Numba's thread count for the calling thread has been set to torch's. The answer never changes a bit.
    """
    if work < PARALLEL_FROM:
        return False
    num_threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)
    if num_threads < 2 or threading_layer() == "serial":
        return False
    numba.set_num_threads(num_threads)
    return True


@functools.cache
def threading_layer() -> str:
    """`"omp"`, `"tbb"` or `"serial"`; launches Numba's pool if the process has none yet.

    A pool is chosen once per process, at its first launch, from `numba.config`, which is set for that moment only.
    """
    configured, num_threads = config.THREADING_LAYER, torch.get_num_threads()
    for layer in ("omp", "tbb"):
        config.THREADING_LAYER = layer
        with contextlib.suppress(ValueError):  # that layer cannot be loaded
            numba.get_num_threads()
            break
    config.THREADING_LAYER = configured
    torch.set_num_threads(num_threads)  # launching sets OpenMP's count to that of all processors
    return _launched()


def _launched() -> str:
    try:
        layer: str = parallel.threading_layer()  # type: ignore[no-untyped-call]
    except ValueError:
        return "serial"
    return layer if layer in ("omp", "tbb") else "serial"
