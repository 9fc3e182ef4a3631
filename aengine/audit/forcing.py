"""Teacher forcing: hidden states of given tokens by plain forward passes, each stretch under the version that made it.

The pages are this module's own and live for one call. Sequences of the call that begin alike, as the samples of one
prompt do, have the full pages of that beginning in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from aengine.audit.context import Stretch
from aengine.cache.storage import KVStorage
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.weights import DecoderWeights

__all__ = ["PAGE_SIZE", "Passage", "force"]

PAGE_SIZE = 64
MAX_ROWS = 512
"""Rows of one pass; they may be of many sequences, as no row's bits depend on the others."""


@frozen(eq=False)
class Passage:
    """Tokens to feed from position 0 on, under the versions of `stretches`, which cover them all. Hidden states are
    wanted from row `first_row` on."""

    tokens: NDArray[np.int64]
    stretches: tuple[Stretch, ...]
    first_row: int

    def stretch_at(self, position: int) -> Stretch:
        return next(stretch for stretch in self.stretches if stretch.start <= position < stretch.end)

    def versions_within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Which versions made positions `start` to `end`, and from where on."""
        return [(max(s.start, start), s.version) for s in self.stretches if s.start < end and s.end > start]


@frozen
class _Piece:
    """Rows `start` to `end` of passage number `passage`."""

    passage: int
    start: int
    end: int


@frozen(eq=False)
class _Layout:
    """Which pages each passage uses, [passages, pages of the longest], and what it need not compute itself."""

    tables: NDArray[np.int32]
    num_pages: int
    shared: list[int]
    """How many leading positions lie in pages that an earlier passage writes; not up to `first_row`."""
    writers: list[int]
    """The passage that writes the last of these pages."""


def force(decoder: Decoder, weights: Mapping[int, DecoderWeights], passages: Sequence[Passage]) -> list[Tensor]:
    """Hidden states [len(tokens) - first_row, hidden] of every passage. Changes `decoder.weights`.

    `weights` holds every version that the passages name; the KV of all passages is held at once.
    """
    if not passages:
        return []
    layout = _lay_out(passages)
    storage = _storage(decoder, next(iter(weights.values())), layout.num_pages)
    done = list(layout.shared)
    wanted: list[list[Tensor]] = [[] for _ in passages]
    while pieces := _next_pieces(passages, layout, done):
        decoder.weights = weights[passages[pieces[0].passage].stretch_at(pieces[0].start).version]
        hidden = decoder.forward(_inputs(passages, pieces, layout.tables), storage)
        row = 0
        for piece in pieces:
            skipped = max(0, min(passages[piece.passage].first_row, piece.end) - piece.start)
            wanted[piece.passage].append(hidden[row + skipped : row + piece.end - piece.start])
            row += piece.end - piece.start
            done[piece.passage] = piece.end
    return [torch.cat(parts) for parts in wanted]


def _next_pieces(passages: Sequence[Passage], layout: _Layout, done: Sequence[int]) -> list[_Piece]:
    """What the next pass computes: the rows of one version that come next, as many as fit, in order of passages. Within
    a pass all KV of a layer is written before any of it is read."""
    pieces: list[_Piece] = []
    version, room, reached = None, MAX_ROWS, list(done)
    for number, passage in enumerate(passages):
        if done[number] == len(passage.tokens) or not room or reached[layout.writers[number]] < layout.shared[number]:
            continue
        stretch = passage.stretch_at(done[number])
        if version in (None, stretch.version):
            version = stretch.version
            reached[number] = min(stretch.end, done[number] + room)
            pieces.append(_Piece(number, done[number], reached[number]))
            room -= reached[number] - done[number]
    return pieces


def _inputs(passages: Sequence[Passage], pieces: Sequence[_Piece], tables: NDArray[np.int32]) -> ForwardInputs:
    counts = [piece.end - piece.start for piece in pieces]
    return ForwardInputs(
        token_ids=np.concatenate([passages[piece.passage].tokens[piece.start : piece.end] for piece in pieces]),
        positions=np.concatenate([np.arange(piece.start, piece.end, dtype=np.int64) for piece in pieces]),
        sequences=np.repeat(np.array([piece.passage for piece in pieces], dtype=np.int64), counts),
        page_tables=tables,
    )


def _lay_out(passages: Sequence[Passage]) -> _Layout:
    counts = [-(-len(passage.tokens) // PAGE_SIZE) for passage in passages]
    layout = _Layout(np.zeros((len(passages), max(counts)), dtype=np.int32), sum(counts), [], [])
    pages: dict[tuple[object, ...], tuple[int, int]] = {}  # what lies in a page: its number, and who writes it
    for number, (passage, count) in enumerate(zip(passages, counts, strict=True)):
        shared, writer, before = 0, number, -1
        for at in range(count):
            start, end = at * PAGE_SIZE, (at + 1) * PAGE_SIZE
            content = (before, passage.tokens[start:end].tobytes(), *passage.versions_within(start, end))
            known = pages.get(content)
            if known is not None and shared == start and end <= passage.first_row:
                shared, (before, writer) = end, known
            else:
                before = sum(counts[:number]) + at
                pages.setdefault(content, (before, number))
            layout.tables[number, at] = before
        layout.shared.append(shared)
        layout.writers.append(writer)
    return layout


def _storage(decoder: Decoder, weights: DecoderWeights, num_pages: int) -> KVStorage:
    spec = decoder.spec
    return KVStorage(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=PAGE_SIZE,
        dtype=weights.dtype,
    )
