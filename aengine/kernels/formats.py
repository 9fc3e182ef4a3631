"""Number formats in memory. Compiled code computes in float32 and converts where it loads and stores.

Numba has no 16-bit floats on the CPU, so it sees arrays of them as integers of the same bits: uint16 stands for
bfloat16, int16 for float16. Loading is exact; storing rounds to nearest, ties to even, and a NaN stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen
from llvmlite import ir
from numba import types
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FLOAT_TYPES", "FORMATS", "Format", "as_array"]

FLOAT_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
"""What kernels compute with, by name."""

STAND_INS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
)

_FLOAT, _HALF, _SHORT, _INT = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)

Convert = Callable[[Any, Any], Any]
"""Takes an LLVM builder and a number or a vector of them."""


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory as compiled code takes it; raises `TypeError` for other than float types above."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    if tensor.dtype not in STAND_INS:
        raise TypeError(f"kernels compute with {', '.join(FLOAT_TYPES)}, got a tensor of {tensor.dtype}")
    return tensor.view(STAND_INS[tensor.dtype]).numpy()


@frozen(eq=False)
class Format:
    """How numbers of one type lie in memory, as LLVM sees them."""

    memory: Any
    num_bytes: int
    widen: Convert
    """From `memory` to float32."""
    narrow: Convert


def _like(value: Any, element: Any) -> Any:
    """The type of `element` with as many lanes as `value` has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(value: Any, number: int) -> Any:
    """`number` in every lane of a value's integer type."""
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else None
    return ir.Constant(value.type, number if lanes is None else [number] * lanes)


def _widen_bfloat16(builder: Any, value: Any) -> Any:
    bits = builder.zext(value, _like(value, _INT))
    return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _like(value, _FLOAT))


def _narrow_bfloat16(builder: Any, value: Any) -> Any:
    """Adding just under half of the last place kept, or half where that place is odd, carries when it should."""
    bits = builder.bitcast(value, _like(value, _INT))
    high = builder.lshr(bits, _constant(bits, 16))
    odd = builder.and_(high, _constant(bits, 1))
    carried = builder.add(bits, builder.add(odd, _constant(bits, 0x7FFF)))
    rounded = builder.lshr(carried, _constant(bits, 16))
    quiet = builder.or_(high, _constant(bits, 0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), _like(value, _SHORT))


def _widen_float16(builder: Any, value: Any) -> Any:
    return builder.fpext(builder.bitcast(value, _like(value, _HALF)), _like(value, _FLOAT))


def _narrow_float16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, _like(value, _HALF)), _like(value, _SHORT))


def _keep(builder: Any, value: Any) -> Any:
    return value


FORMATS: Mapping[Any, Format] = MappingProxyType(
    {
        types.float32: Format(_FLOAT, 4, _keep, _keep),
        types.uint16: Format(_SHORT, 2, _widen_bfloat16, _narrow_bfloat16),
        types.int16: Format(_SHORT, 2, _widen_float16, _narrow_float16),
    }
)
"""By the type of an array's numbers in Numba."""
