"""One prompt through the decoder, as one forward pass."""

from __future__ import annotations

import numpy as np
import torch

from aengine.cache.storage import KVStorage
from aengine.kernels.invariance import probe
from aengine.model.checkpoint import Checkpoint
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.weights import build_weights, linear_shapes

PAGE_SIZE = 16


def make_decoder(checkpoint: Checkpoint, max_model_len: int) -> Decoder:
    spec = checkpoint.spec
    return Decoder(spec, build_weights(spec, checkpoint.tensors, probe(linear_shapes(spec))), max_model_len)


def decoder_logits(decoder: Decoder, ids: np.ndarray, *, step: int | None = None) -> torch.Tensor:
    """Logits after each of `ids`, computed `step` tokens at a time, or all at once."""
    spec, num_pages = decoder.spec, -(-len(ids) // PAGE_SIZE)
    storage = KVStorage(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=PAGE_SIZE,
    )
    rows = []
    for start in range(0, len(ids), step or len(ids)):
        chunk = ids[start : start + (step or len(ids))]
        inputs = ForwardInputs(
            token_ids=chunk,
            positions=np.arange(start, start + len(chunk)),
            sequences=np.zeros(len(chunk), np.int64),
            page_tables=np.arange(num_pages, dtype=np.int32)[None],
        )
        rows.append(decoder.logits(decoder.forward(inputs, storage)))
    return torch.cat(rows)
