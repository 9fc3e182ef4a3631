"""Products of rows with a weight, in the ways this machine offers.

A plain product's bits change with the number of rows and of threads, since BLAS chooses another blocking for each. The
packed products of oneDNN and MKL mostly do not, and are faster; which of them hold is measured by `invariance.probe`.
Their operators are private to torch, so each is used only where it exists and was found right.

A 16-bit weight can be multiplied in its own type, or widened: kept as float32, packed as one, and the float32 product
rounded to the type. Widening works on every machine and needs twice the weight's memory for the packed form, beside the
weight itself. Measured on AVX2, one thread, shapes of a 135 M model: a widened product takes 1.03 to 1.2 times as
long as a float32 one, torch's plain 16-bit product 7 to 8 times as long from 32 rows on, and oneDNN packs no 16-bit
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

__all__ = ["STRATEGIES", "Linear", "Strategy"]

TILE_ROWS = 16
PACK_HINT = 128  # rows a packing is optimised for; it serves any number

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@frozen(eq=False)
class Linear:
    """x @ weight.T + bias for contiguous rows x of the weight's type, in that type.

    `weight` [N, K] is kept as given, beside its packed form.
    """

    weight: Tensor
    bias: Tensor | None
    packed: Tensor
    multiply: Multiply
    single_row: bool
    """Whether one row alone gives the bits it gives among others; if not, it is multiplied twice over."""
    max_rows: int | None = None
    """Most rows of one product; more are multiplied in parts. None for no limit."""

    def __call__(self, x: Tensor) -> Tensor:
        """[R, K] to [R, N]."""
        if self.max_rows is not None and x.shape[0] > self.max_rows:
            return torch.cat([self(part) for part in torch.split(x, self.max_rows)])
        if x.shape[0] == 0:
            return x.new_empty(0, self.weight.shape[0])
        if x.shape[0] == 1 and not self.single_row:
            return self.multiply(x.repeat(2, 1), self.packed, self.weight, self.bias)[:1]
        return self.multiply(x, self.packed, self.weight, self.bias)


@frozen(eq=False)
class Strategy:
    """One way to multiply; `multiply` takes rows, the packed weight, the weight itself and the bias.

    Where a machine cannot do it, `pack` or `multiply` raises `RuntimeError`.
    """

    name: str
    is_available: Callable[[], bool]
    pack: Callable[[Tensor], Tensor]
    multiply: Multiply

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, single_row: bool = False, max_rows: int | None = None
    ) -> Linear:
        """Packs `weight`, which must be contiguous; later changes to it are not seen."""
        return Linear(weight, bias, self.pack(weight), self.multiply, single_row, max_rows)


def _multiply_onednn(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return product


def _multiply_mkl(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of the weight itself only the sizes are read, as long as the number of rows is told right."""
    sizes = weight if weight.dtype == x.dtype else x.new_empty(1).expand(weight.shape)
    product: Tensor = torch.ops.mkl._mkl_linear(x, packed, sizes, bias, x.shape[0])  # noqa: SLF001
    return product


def _multiply_tiles(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every product has the same number of rows, so BLAS has no choice to make."""
    num_rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -num_rows % TILE_ROWS))
    return torch.cat([F.linear(tile, packed, bias) for tile in torch.split(padded, TILE_ROWS)])[:num_rows]


def _multiply_plain(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, packed, bias)


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)  # noqa: SLF001
    return packed


def _pack_mkl(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACK_HINT)  # noqa: SLF001
    return packed


def _has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_mkl() -> bool:
    return hasattr(torch.ops.mkl, "_mkl_linear")


def _widened(strategy: Strategy) -> Strategy:
    """For 16-bit weights: float32 inside, as `strategy` does it, and one rounding at the end."""

    def multiply(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return strategy.multiply(x.float(), packed, weight, wide_bias).to(x.dtype)

    return Strategy(
        f"widened-{strategy.name}", strategy.is_available, lambda weight: strategy.pack(weight.float()), multiply
    )


_NATIVE = (
    Strategy("onednn", _has_onednn, _pack_onednn, _multiply_onednn),
    Strategy("mkl", _has_mkl, _pack_mkl, _multiply_mkl),
    Strategy("tiles", lambda: True, lambda weight: weight, _multiply_tiles),
    Strategy("plain", lambda: True, lambda weight: weight, _multiply_plain),
)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {strategy.name: strategy for strategy in (*_NATIVE, *map(_widened, _NATIVE))}
)
