"""A decoder with its own pages, driven by sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from aengine.cache.storage import KVStorage
from aengine.kernels.invariance import probe
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.spec import ModelSpec
from aengine.model.weights import build_weights, linear_shapes
from aengine.testing import TINY, random_tensors

Chunk = tuple[int, Sequence[int]]  # a sequence's number, and its next tokens


def make_spec(**config: Any) -> ModelSpec:
    return ModelSpec.from_config(TINY | config)


def make_decoder(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    weights = build_weights(spec, random_tensors(spec, seed), probe(linear_shapes(spec, dtype)), dtype)
    return Decoder(spec, weights, max_model_len=128, **options)


@define(eq=False)
class Session:
    """Feeds chunks of sequences; the pages of each are dealt out at random and start as NaN."""

    decoder: Decoder
    page_size: int = 4
    num_sequences: int = 4
    storage: KVStorage = field(init=False)
    page_tables: np.ndarray = field(init=False)
    lengths: dict[int, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        spec, width = self.decoder.spec, -(-128 // self.page_size)
        num_pages = self.num_sequences * width
        self.storage = KVStorage(
            num_layers=spec.num_layers,
            num_pages=num_pages,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=self.page_size,
            dtype=self.decoder.weights.dtype,
        )
        for layer in self.storage.layers:
            layer.fill_(torch.nan)
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        self.page_tables = pages.reshape(self.num_sequences, width)

    def inputs(self, chunks: Sequence[Chunk]) -> ForwardInputs:
        starts = [self.lengths.get(sequence, 0) for sequence, _ in chunks]
        positions = [np.arange(start, start + len(ids)) for start, (_, ids) in zip(starts, chunks, strict=True)]
        return ForwardInputs(
            token_ids=np.concatenate([np.asarray(ids, np.int64) for _, ids in chunks]),
            positions=np.concatenate(positions),
            sequences=np.repeat(np.arange(len(chunks)), [len(ids) for _, ids in chunks]),
            page_tables=np.ascontiguousarray(self.page_tables[[sequence for sequence, _ in chunks]]),
        )

    def feed(self, *chunks: Chunk) -> Tensor:
        """Logits of all rows of one forward pass, in order."""
        hidden = self.decoder.forward(self.inputs(chunks), self.storage)
        for sequence, ids in chunks:
            self.lengths[sequence] = self.lengths.get(sequence, 0) + len(ids)
        return self.decoder.logits(hidden)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()
