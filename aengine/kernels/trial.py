"""Trying an operator on this machine: are its values right, and are a row's bits its own?

A row's bits are its own if they depend neither on the number of rows, nor on which rows those are and where this one
stands among them, nor on the number of threads, and so not on whether a kernel ran in its serial or its parallel form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

__all__ = [
    "Compute",
    "Operator",
    "OperatorFinding",
    "Pick",
    "Trial",
    "examine",
    "relative_error",
    "thread_counts",
    "torch_threads",
]

ROW_COUNTS = (1, 1, 2, 3, 5, 8, 17, 64)
FEW_ROW_COUNTS = (2, 64)
"""With several threads: fewer rows than these are computed in one thread anyway, and on a busy machine every turn of
several threads takes long. Beside them all rows at once, of which a trial has enough to be spread over threads."""

Pick = Tensor
"""Which rows, [n] int64; their order is the order of the rows in the call."""
Operator = Callable[..., Any]
Compute = Callable[[Operator, Pick], Tensor]
"""Results [n, width] of an operator that is called with these rows and no others."""


@frozen
class OperatorFinding:
    """What was found for one operator.

    `worst_error` is the largest distance from a float64 computation, as a share of the largest number in the row (of
    the sampler: the distance of a log-probability, or of the random number from what the token covers). `complaint`
    says what does not hold, and is empty where all does.
    """

    name: str
    strategy: str
    holds: bool
    worst_error: float
    complaint: str = ""


@frozen(eq=False)
class Trial:
    """An operator on a pool of `num_rows` rows, of which each call takes some.

    Every one of `variants` must give a row the same bits: the operator as it is used, and with its memory arranged
    otherwise. `measure` returns the worst error of the results of some rows.
    """

    name: str
    strategy: str
    operator: Operator
    num_rows: int
    variants: tuple[Compute, ...]
    measure: Callable[[Pick, Tensor], float]
    tolerance: float
    num_checked: int = 16
    """Rows that are measured."""


def examine(trial: Trial, thread_counts: Sequence[int]) -> OperatorFinding:
    """Only the operator itself runs with several threads; torch's setting is restored. What the operator raises is
    passed on."""
    with torch_threads(1):
        whole = trial.variants[0](trial.operator, torch.arange(trial.num_rows))
        checked = torch.linspace(0, trial.num_rows - 1, trial.num_checked).long()
        error = trial.measure(checked, whole[checked]) if whole.isfinite().all() else math.inf
        if error <= trial.tolerance:  # not so for NaN
            complaint = _dependence(trial, whole, thread_counts)
        else:
            complaint = f"values are off by {error:.2g}, where {trial.tolerance:.2g} is tolerated"
    return OperatorFinding(trial.name, trial.strategy, not complaint, error, complaint)


def _dependence(trial: Trial, whole: Tensor, thread_counts: Sequence[int]) -> str:
    """What a row's bits were seen to depend on; empty if on nothing."""
    order = torch.randperm(trial.num_rows, generator=torch.Generator().manual_seed(1))
    for num_threads in thread_counts:
        operator = _with_threads(trial.operator, num_threads)
        for variant, compute in enumerate(trial.variants):
            for pick in _picks(order, ROW_COUNTS if num_threads == 1 else FEW_ROW_COUNTS):
                if not _same_bits(compute(operator, pick), whole[pick]):
                    return f"bits change ({len(pick)} rows, {num_threads} threads, arrangement {variant})"
    return ""


def _with_threads(operator: Operator, num_threads: int) -> Operator:
    def threaded(*arguments: Any) -> Any:
        with torch_threads(num_threads):
            return operator(*arguments)

    return threaded


def _picks(order: Tensor, counts: Sequence[int]) -> Iterator[Pick]:
    """Rows from all over the pool, the first one alone among them."""
    yield torch.tensor([0])
    for index, count in enumerate(counts):
        if count < len(order):
            first = 37 * index % (len(order) - count)
            yield order[first : first + count]
    yield order


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Signs of zero and payloads of NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def thread_counts() -> tuple[int, ...]:
    """Numbers of threads to try: several, which are as many as torch uses now or two, and one."""
    return (max(2, torch.get_num_threads()), 1)


def relative_error(results: Tensor, truth: Tensor) -> float:
    """The largest distance, as a share of the largest number in its row of `truth`, which is float64."""
    return float(((results.double() - truth).abs().amax(-1) / truth.abs().amax(-1)).max())


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Torch's number of threads, for the calling thread and the time of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
