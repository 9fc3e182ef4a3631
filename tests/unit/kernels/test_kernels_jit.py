"""Compiled kernels are kept on disk, and made again when any source they contain has changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aengine.kernels import jit
from aengine.kernels.jit import row_kernel
from aengine.kernels.rows import norm_rows


def double_rows(x: np.ndarray) -> None:
    for i in jit.prange(x.shape[0]):
        x[i] *= 2


def test_both_forms_of_a_kernel_do_the_same_and_have_caches_of_their_own() -> None:
    kernel = row_kernel(double_rows)
    x = np.arange(5.0)
    kernel.serial(x)
    kernel.parallel(x)
    np.testing.assert_array_equal(x, 4 * np.arange(5.0))
    paths = {form._cache._cache_file._index_name for form in (norm_rows.serial, norm_rows.parallel)}
    assert len(paths) == 2


def test_the_stamp_of_a_kernel_covers_its_file_and_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, caller = tmp_path / "package", tmp_path / "caller.py"
    package.mkdir()
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    stamps = set()
    for path, text in [(caller, "1"), (package / "simd.py", "1"), (package / "simd.py", "2"), (caller, "2")]:
        path.write_text(text)
        jit._sources_stamp.cache_clear()
        stamps.add(jit._sources_stamp(str(caller)))
    jit._sources_stamp.cache_clear()
    assert len(stamps) == 4


def test_a_kernel_works_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit._KernelCacheImpl, "_locator_classes", [])
    x = np.ones(3)
    row_kernel(double_rows).serial(x)
    np.testing.assert_array_equal(x, [2, 2, 2])
