"""Sixteen float32 numbers as one value inside compiled code.

With a vector type the order of arithmetic stands in the source: which position goes to which lane, where a product is
fused with a sum, in which order lanes are added up. Nothing depends on what the optimiser makes of a loop, so decode,
prefill and replay give the same bits. On AVX-512 a value is one register, on AVX2 two.

Arrays are contiguous, of any number of dimensions and any type of `formats`, whose numbers are float32 once loaded;
indices count numbers in memory order; nothing checks bounds. `+ - * /` act on each lane.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model
from numpy.typing import NDArray

from aengine.kernels.formats import FORMATS
from aengine.kernels.jit import compiled

Lanes: TypeAlias = Any
Floats: TypeAlias = NDArray[Any]

LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_declare: Callable[..., Any] = cgutils.get_or_insert_function


class LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


lanes = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)  # type: ignore[no-untyped-call]


def intrinsic(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's decorator, typed as what it makes: a function for compiled code, without the typing context."""
    return cast(Callable[..., Any], numba.extending.intrinsic(generator))


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    vector = ir.VectorType(FORMATS[array_type.dtype].memory, LANES)
    return builder.bitcast(_element(context, builder, array_type, array, index), vector.as_pointer())


def _broadcast(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _call(builder: Any, name: str, arguments: Any) -> Any:
    signature = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
    return builder.call(_declare(builder.module, signature, name), arguments)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = FORMATS[signature.args[0].dtype]
        value = builder.load(_pointer(context, builder, signature.args[0], *arguments), align=number.num_bytes)
        return number.widen(builder, value)

    return lanes(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = FORMATS[signature.args[0].dtype]
        place = _pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store(number.narrow(builder, arguments[2]), place, align=number.num_bytes)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), generate


@intrinsic
def load_one(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_element(context, builder, signature.args[0], *arguments))
        return FORMATS[signature.args[0].dtype].widen(builder, value)

    return types.float32(array, types.intp), generate


@intrinsic
def store_one(typing: Any, array: Any, index: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = FORMATS[signature.args[0].dtype].narrow(builder, arguments[2])
        builder.store(value, _element(context, builder, signature.args[0], *arguments[:2]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """All lanes the same number."""
    return lanes(types.float32), lambda context, builder, signature, values: _broadcast(builder, values[0], _FLOATS)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return lanes(lanes, lanes, lanes), lambda context, builder, signature, values: _call(
        builder, "llvm.fma.v16f32", values
    )


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; b where either is not a number."""
    return lanes(lanes, lanes), lambda context, builder, signature, values: _larger(builder, *values)


@intrinsic
def where_less(typing: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """Lanes of `then` where a < b, else of `otherwise`, also where a or b is not a number."""
    return lanes(lanes, lanes, lanes, lanes), lambda context, builder, signature, values: builder.select(
        builder.fcmp_ordered("<", values[0], values[1]), values[2], values[3]
    )


@intrinsic
def keep_first(typing: Any, value: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of `value` (all where count is 16 or more), the rest from `other`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bound = _broadcast(builder, builder.trunc(arguments[1], _INT), _INTS)
        kept = builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), bound)
        return builder.select(kept, arguments[0], arguments[2])

    return lanes(lanes, types.int64, lanes), generate


@intrinsic
def lane_of(typing: Any, value: Any, lane: Any) -> Any:
    return types.float32(lanes, types.intp), lambda context, builder, signature, values: builder.extract_element(
        *values
    )


@intrinsic
def with_lane(typing: Any, value: Any, lane: Any, number: Any) -> Any:
    return lanes(lanes, types.intp, types.float32), lambda context, builder, signature, values: builder.insert_element(
        values[0], values[2], values[1]
    )


def _fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes into one, by halves: lane i with lane i + 8, then with i + 4, i + 2, i + 1; always the same tree."""
    for width in (8, 4, 2, 1):
        order = ir.Constant(_INTS, [(lane + width) % LANES for lane in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, ir.Constant(_FLOATS, ir.Undefined), order))
    return builder.extract_element(value, ir.Constant(_INT, 0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def total(typing: Any, value: Any) -> Any:
    return types.float32(lanes), lambda context, builder, signature, values: _fold(builder, values[0], builder.fadd)


@intrinsic
def largest(typing: Any, value: Any) -> Any:
    return types.float32(lanes), lambda context, builder, signature, values: _fold(
        builder, values[0], functools.partial(_larger, builder)
    )


@intrinsic
def power_of_two(typing: Any, shifted: Any) -> Any:
    """2**n, given n + ROUND: the low bits of that sum are n, moved here to where a float32 has its exponent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.shl(builder.bitcast(arguments[0], _INTS), ir.Constant(_INTS, [23] * LANES))
        return builder.bitcast(builder.add(exponent, ir.Constant(_INTS, [127 << 23] * LANES)), _FLOATS)

    return lanes(lanes), generate


def _arithmetic(instruction: str) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        return lanes(lanes, lanes), lambda context, builder, signature, values: getattr(builder, instruction)(*values)

    return operation


def _overload_operator(symbol: Callable[[Any, Any], Any], instruction: str) -> None:
    operation = _arithmetic(instruction)

    @overload(symbol, strict=False)
    def implement(a: Any, b: Any) -> Any:
        if isinstance(a, LanesType) and isinstance(b, LanesType):
            return lambda a, b: operation(a, b)  # noqa: PLW0108  Numba wants a Python function here
        return None


_overload_operator(operator.add, "fadd")
_overload_operator(operator.sub, "fsub")
_overload_operator(operator.mul, "fmul")
_overload_operator(operator.truediv, "fdiv")


@compiled
def load_part(array: Floats, index: int, count: int) -> Lanes:
    """As `load`, but reads only the first `count` numbers where that is less than 16; the other lanes are zero."""
    if count >= LANES:
        return load(array, index)
    value = splat(np.float32(0))
    for lane in range(count):
        value = with_lane(value, lane, load_one(array, index + lane))
    return value


@compiled
def store_part(array: Floats, index: int, value: Lanes, count: int) -> None:
    if count >= LANES:
        store(array, index, value)
    else:
        for lane in range(count):
            store_one(array, index + lane, lane_of(value, lane))
