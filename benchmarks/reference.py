"""The yardstick: the matrix products of one decode step, and nothing else.

    python -m benchmarks.reference [--json FILE] [--model NAME]

All layers, each with weights of its own, and the output head, in plain torch. An engine at 1.0 of it spends nothing on
attention, cache, sampling and scheduling; with packed weights it can be over 1.0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor

from aengine import Engine
from aengine.model.spec import ModelSpec
from aengine.model.weights import linear_shapes
from benchmarks.report import Figure, plain, report

__all__ = ["ReferencePass"]

ROW_COUNTS = (1, 32, 128)


@frozen(eq=False)
class ReferencePass:
    """Random weights in the model's shapes: products take the same time whatever is in them."""

    spec: ModelSpec
    dtype: torch.dtype = torch.float32
    _weights: list[Tensor] = field(init=False)

    @_weights.default
    def _make_weights(self) -> list[Tensor]:
        *layer, head = linear_shapes(self.spec, self.dtype)
        shapes = [*(layer * self.spec.num_layers), head]
        return [_random(shape.out_features, shape.in_features, self.dtype) for shape in shapes]

    @torch.no_grad()
    def seconds(self, num_rows: int) -> float:
        """Wall time of one pass over `num_rows` rows."""
        inputs = {size: _random(num_rows, size, self.dtype) for size in {w.shape[1] for w in self._weights}}
        begun = time.perf_counter()
        for weight in self._weights:
            F.linear(inputs[weight.shape[1]], weight)
        return time.perf_counter() - begun


def _random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def measure(model: str) -> list[Figure]:
    reference = ReferencePass(Engine.read_pretrained(model).spec)
    figures = []
    for rows in ROW_COUNTS:
        seconds = statistics.median(reference.seconds(rows) for _ in range(12))
        figures += [
            plain(f"pass_{rows}_rows", seconds * 1e3, "ms"),
            plain(f"reference_{rows}_rows", rows / seconds, "tokens/s"),
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    report(measure(options.model), options.json)


if __name__ == "__main__":
    main()
