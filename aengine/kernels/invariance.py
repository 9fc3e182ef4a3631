"""Which products give the same bits whatever else is in the batch, found by trying them on this machine.

Nothing is assumed about processor, torch version or library: for each shape the first strategy whose values are right
and whose bits depend neither on the number of rows, nor on a row's place among them, nor on the number of threads, is
taken.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from aengine.kernels.linear import STRATEGIES, Linear, Strategy
from aengine.kernels.trial import OperatorFinding, thread_counts, torch_threads

__all__ = ["FAST", "UNPACKED", "LinearChoice", "LinearShape", "Numerics", "probe"]

# Fastest first, by measurement on AVX2. The order is fixed, not timed at start: two processes must choose alike.
CANDIDATES = ("onednn", "mkl", "tiles")
"""For float32."""
NARROW_CANDIDATES = ("onednn", "widened-onednn", "widened-mkl", "widened-tiles", "tiles")
"""For 16-bit types. What needs the least memory comes first only where a processor has instructions for it."""
UNPACKED = ("tiles",)
"""Candidates that read the weight itself, so that changes to it are seen."""
ROW_COUNTS = (1, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 33, 64, 100, 129, 256, 512)
"""Up to the largest number that a product is made of: long prompts and replays are multiplied in parts of it."""
FEW_ROW_COUNTS = (1, 1, 2, 3, 8, 17, 64, 128)
"""For large shapes, whose products take long."""
LARGE_SHAPE = 2**23
VALUE_TOLERANCE = 1e-5  # of the sum of absolute products, beside the rounding of the result to its type
CHECKED_OUTPUTS = 64
RANDOM_NUMBERS = 1_000_003  # a prime, so that repeating them never lines up with a weight's rows


@frozen(order=True)
class LinearShape:
    out_features: int
    in_features: int
    has_bias: bool = False
    dtype: torch.dtype = field(default=torch.float32, order=str)

    def __str__(self) -> str:
        return f"{self.out_features} x {self.in_features}{' + bias' if self.has_bias else ''}"


@frozen
class LinearChoice:
    """What was found for one shape. `single_row`: one row alone gives the bits it gives among others."""

    shape: LinearShape
    strategy: str
    single_row: bool
    holds: bool


@frozen
class Numerics:
    """How linear layers are computed, and what may be said of their numbers.

    `"invariant"`: every choice and every operator held when probed. `"unverified"`: some shape has no strategy that
    holds here, or some operator does not hold. `"fast"`: plain products were asked for, and nothing was probed.
    """

    mode: Literal["invariant", "unverified", "fast"]
    choices: tuple[LinearChoice, ...] = field(default=())
    operators: tuple[OperatorFinding, ...] = field(default=())
    """What was found for everything but products."""

    def with_operators(self, operators: tuple[OperatorFinding, ...]) -> Numerics:
        """The same products, beside these operators."""
        holds = all(finding.holds for finding in operators)
        return evolve(self, operators=operators, mode=self.mode if holds else "unverified")

    def complaints(self) -> tuple[str, ...]:
        """What does not hold, by name."""
        return (
            *(f"product {choice.shape}: no strategy holds" for choice in self.choices if not choice.holds),
            *(f"{finding.name}: {finding.complaint}" for finding in self.operators if not finding.holds),
        )

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Packs a contiguous weight by what was chosen for its shape; an unprobed shape raises `KeyError`."""
        if self.mode == "fast":
            name = "plain" if weight.dtype == torch.float32 else "widened-plain"
            return STRATEGIES[name].linear(weight, bias, single_row=True)
        shape = LinearShape(weight.shape[0], weight.shape[1], bias is not None, weight.dtype)
        choice = {choice.shape: choice for choice in self.choices}[shape]
        max_rows = max(_row_counts(shape))
        return STRATEGIES[choice.strategy].linear(weight, bias, single_row=choice.single_row, max_rows=max_rows)


FAST = Numerics("fast")


def probe(shapes: Iterable[LinearShape], candidates: tuple[str, ...] = ()) -> Numerics:
    """Choose a strategy for each distinct shape, by about 0.1 s of products each.

    `candidates` are tried in order; empty, those for the shape's type. Products are tried with one thread and with
    several; torch's setting is restored. Call it in the thread that will run the model. A second probe of the same
    shapes in a process costs nothing.
    """
    choices = tuple(
        _choose(shape, thread_counts(), candidates or _candidates(shape.dtype)) for shape in sorted(set(shapes))
    )
    return Numerics("invariant" if all(choice.holds for choice in choices) else "unverified", choices)


def _candidates(dtype: torch.dtype) -> tuple[str, ...]:
    return CANDIDATES if dtype == torch.float32 else NARROW_CANDIDATES


@functools.cache
def _choose(shape: LinearShape, threads: tuple[int, ...], candidates: tuple[str, ...]) -> LinearChoice:
    """A fact about the machine, so found once per process."""
    random = torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)).to(shape.dtype)
    weight = _repeat(random, shape.out_features, shape.in_features)
    bias = _repeat(random, 1, shape.out_features)[0] if shape.has_bias else None
    counts = _row_counts(shape)
    x = _repeat(random.flip(0), max(counts), shape.in_features)
    for name in candidates:
        single_row, holds = _try(STRATEGIES[name], weight, bias, x, counts, threads)
        if holds:
            break
    return LinearChoice(shape, name, single_row, holds)


def _row_counts(shape: LinearShape) -> tuple[int, ...]:
    return FEW_ROW_COUNTS if shape.out_features * shape.in_features > LARGE_SHAPE else ROW_COUNTS


def _repeat(random: Tensor, rows: int, columns: int) -> Tensor:
    repeats = -(-rows * columns // random.numel())
    return random.repeat(repeats)[: rows * columns].view(rows, columns).contiguous()


def _try(
    strategy: Strategy,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    counts: Sequence[int],
    threads: Collection[int],
) -> tuple[bool, bool]:
    """Whether one row alone holds, and whether two and more do."""
    if not strategy.is_available():
        return False, False
    try:
        linear = strategy.linear(weight, bias, single_row=True)
        whole = linear(x)
        if not _is_right(whole, linear, x):
            return False, False
        single_row = _holds(linear, x, whole, [count for count in counts if count == 1], threads)
        return single_row, _holds(linear, x, whole, [count for count in counts if count > 1], threads)
    except RuntimeError:  # the operator exists and does not work here
        return False, False


def _is_right(whole: Tensor, linear: Linear, x: Tensor) -> bool:
    """Against a float64 product, over all rows and outputs spread over the width."""
    picked = torch.linspace(0, linear.weight.shape[0] - 1, CHECKED_OUTPUTS).long()
    weight, rows = linear.weight[picked].double(), x.double()
    bias = linear.bias[picked].double() if linear.bias is not None else torch.zeros(CHECKED_OUTPUTS).double()
    exact = rows @ weight.T + bias
    rounding = torch.finfo(whole.dtype).eps / 2 * exact.abs()
    tolerance = VALUE_TOLERANCE * (rows.abs() @ weight.T.abs() + bias.abs()) + rounding
    return whole.dtype == x.dtype and bool(((whole[:, picked].double() - exact).abs() <= tolerance).all())


def _holds(linear: Linear, x: Tensor, whole: Tensor, counts: Sequence[int], threads: Collection[int]) -> bool:
    """Whether so many rows from the midst of x give the bits they have in `whole`."""
    for num_threads in threads:
        with torch_threads(num_threads):
            for index, count in enumerate(counts):
                rows = slice(first := 37 * index % (len(x) - count + 1), first + count)
                if not torch.equal(linear(x[rows]), whole[rows]):
                    return False
    return True
