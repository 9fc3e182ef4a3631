"""Kernels use torch's threads, never `workqueue`, and leave the process as it was."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numba
import pytest
import torch
from kernel_support import make_batch

from aengine.kernels import cpu, threads
from aengine.kernels.interface import HeadShape
from aengine.kernels.threads import threading_layer, use_threads
from aengine.kernels.trial import torch_threads

needs_threads = pytest.mark.skipif(
    threading_layer() == "serial" or numba.config.NUMBA_NUM_THREADS < 2, reason="one thread here"
)


def run_fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_layer_is_one_that_may_be_launched_from_several_threads() -> None:
    assert threading_layer() in ("omp", "tbb", "serial")


def test_small_work_stays_in_the_calling_thread() -> None:
    with torch_threads(2):
        assert not use_threads(threads.PARALLEL_FROM - 1)


def test_one_torch_thread_means_one_kernel_thread() -> None:
    with torch_threads(1):
        assert not use_threads(10**9)


@needs_threads
def test_kernels_follow_torchs_number_of_threads() -> None:
    with torch_threads(2):
        assert use_threads(10**9)
        assert numba.get_num_threads() == 2


@needs_threads
def test_engines_in_several_threads_run_kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PARALLEL_FROM", 0)
    batch = make_batch(HeadShape(4, 2, 16, 4), [30, 30])
    expected = batch.run(cpu, batch.empty_kv())
    together, wrong = threading.Barrier(2), []

    def work() -> None:
        torch.set_num_threads(2)
        together.wait()
        wrong.extend(i for i in range(4) if not torch.equal(batch.run(cpu, batch.empty_kv()), expected))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_importing_launches_nothing_and_launching_leaves_the_process_as_it_was() -> None:
    program = """
        import os, numba, torch
        environment, layer = dict(os.environ), numba.config.THREADING_LAYER
        torch.set_num_threads(1)
        from aengine.kernels import cpu, threads
        try:
            print(numba.threading_layer())
        except ValueError:
            print("not launched")
        threads.threading_layer()
        print(dict(os.environ) == environment, numba.config.THREADING_LAYER == layer, torch.get_num_threads())
    """
    assert run_fresh(program).splitlines() == ["not launched", "True True 1"]


def test_kernels_stay_serial_where_workqueue_was_launched_before() -> None:
    program = """
        import numba
        numba.config.THREADING_LAYER = "workqueue"
        numba.get_num_threads()
        from aengine.kernels.threads import threading_layer, use_threads
        print(threading_layer(), use_threads(10**9))
    """
    assert run_fresh(program) == "serial False"
