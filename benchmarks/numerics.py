"""What the same bits cost: steps with `numerics="invariant"` against `"fast"`, the probe at start, and what it is for.

    python -m benchmarks.numerics [--quick] [--json FILE] [--model NAME]

`cost_at_N_rows` is the time of a decode step of N sequences with what the probe chose, over that with plain products;
both models take turns, so that another busy process shows in both. `probe_products` and `probe_operators` are what an
engine's opening takes for it, once the kernels are compiled and loaded. `plain_changes` is the share of row counts from
1 to 64 for which plain products, over all shapes, give a row other bits than among 64 rows; for the chosen products the
goal is none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from aengine.cache.storage import KVStorage
from aengine.kernels import invariance, operator_probe
from aengine.kernels.invariance import FAST, Numerics, probe
from aengine.kernels.operator_probe import probe_operators
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.known import get_model
from aengine.model.numerics import decoder_shape
from aengine.model.weights import build_weights, linear_shapes
from aengine.sampling import sampler_probe
from aengine.sampling.sampler_probe import probe_sampler
from benchmarks.report import Figure, at_most, plain, report

CONTEXT, PAGE_SIZE = 128, 16
ROWS = (1, 32, 128)
COUNTS = range(1, 64)


def decode_inputs(num_rows: int) -> ForwardInputs:
    """One token for each of so many sequences, at the end of their contexts."""
    width = CONTEXT // PAGE_SIZE
    return ForwardInputs(
        token_ids=np.arange(num_rows, dtype=np.int64),
        positions=np.full(num_rows, CONTEXT - 1, np.int64),
        sequences=np.arange(num_rows, dtype=np.int64),
        page_tables=np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
    )


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def step_seconds(decoder: Decoder, inputs: ForwardInputs, storage: KVStorage) -> float:
    return seconds(lambda: decoder.logits(decoder.forward(inputs, storage)))


def step_costs(checkpoint: Checkpoint, numerics: Numerics, rounds: int) -> list[Figure]:
    """Medians over rounds of what both take."""
    spec = checkpoint.spec
    decoders = [Decoder(spec, build_weights(spec, checkpoint.tensors, one), 2 * CONTEXT) for one in (numerics, FAST)]
    storage = KVStorage(
        num_layers=spec.num_layers,
        num_pages=max(ROWS) * CONTEXT // PAGE_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=PAGE_SIZE,
    )
    for layer in storage.layers:
        layer.normal_(generator=torch.Generator().manual_seed(0))
    figures = []
    for num_rows in ROWS:
        inputs = decode_inputs(num_rows)
        taken = [[step_seconds(decoder, inputs, storage) for decoder in decoders] for _ in range(rounds + 1)]
        invariant, fast = np.median(np.array(taken[1:]), axis=0)
        figures += [
            plain(f"step_of_{num_rows}_rows", invariant * 1e3, "ms"),
            plain(f"cost_at_{num_rows}_rows", invariant / fast, "x fast"),
        ]
    return figures


def probe_costs(checkpoint: Checkpoint) -> tuple[Numerics, list[Figure]]:
    """The first probe loads the kernels and is not counted."""
    spec = checkpoint.spec
    shape = decoder_shape(spec, page_size=PAGE_SIZE, max_model_len=spec.max_position_embeddings, dtype=torch.float32)

    def operators() -> None:
        probe_operators(shape)
        probe_sampler(spec.vocab_size)

    operators()
    operator_probe._find.cache_clear()
    sampler_probe._find.cache_clear()
    taken = seconds(operators)
    invariance._choose.cache_clear()
    products = seconds(lambda: probe(linear_shapes(spec)))
    return probe(linear_shapes(spec)), [
        plain("probe_products", products, "s"),
        at_most("probe_operators", taken, "s", 0.5),
    ]


def share_changed(checkpoint: Checkpoint, numerics: Numerics) -> float:
    """Of all row counts and shapes, those at which a row's bits are not what they are among 64."""
    changed = tried = 0
    for shape in sorted(set(linear_shapes(checkpoint.spec))):
        weight = torch.randn(shape.out_features, shape.in_features, generator=torch.Generator().manual_seed(0))
        linear = numerics.linear(weight, torch.zeros(shape.out_features) if shape.has_bias else None)
        x = torch.randn(64, shape.in_features, generator=torch.Generator().manual_seed(1))
        whole = linear(x)
        changed += sum(not torch.equal(linear(x[:count]), whole[:count]) for count in COUNTS)
        tried += len(COUNTS)
    return changed / tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five steps of each kind instead of forty")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    get_model(options.model)
    checkpoint = load_checkpoint(options.model)
    with torch.no_grad():
        numerics, figures = probe_costs(checkpoint)
        figures += step_costs(checkpoint, numerics, 5 if options.quick else 40)
        figures += [
            plain("plain_changes", share_changed(checkpoint, FAST), "of all"),
            at_most("chosen_changes", share_changed(checkpoint, numerics), "of all", 0.0),
        ]
    report(figures, options.json)


if __name__ == "__main__":
    main()
