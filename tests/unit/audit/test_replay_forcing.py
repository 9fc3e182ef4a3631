"""Hidden states do not depend on what else is computed in the call, nor on which pages are in common."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.audit import forcing
from aengine.audit.context import Stretch
from aengine.audit.forcing import PAGE_SIZE, Passage, force
from aengine.kernels.invariance import probe
from aengine.model.decoder import Decoder
from aengine.model.weights import build_weights, linear_shapes
from aengine.testing import random_tensors, tiny_checkpoint

SPEC = tiny_checkpoint(0).spec
NUMERICS = probe(linear_shapes(SPEC))
WEIGHTS = {version: build_weights(SPEC, random_tensors(SPEC, version), NUMERICS) for version in range(2)}


def new_decoder() -> Decoder:
    return Decoder(SPEC, WEIGHTS[0], SPEC.max_position_embeddings)


@st.composite
def passages(draw: st.DrawFn) -> Passage:
    """Beginnings are drawn from few, so that many have pages in common."""
    beginning, length = draw(st.integers(0, 1)), draw(st.integers(1, 3 * PAGE_SIZE))
    tokens = np.random.default_rng(beginning).integers(0, SPEC.vocab_size, length)
    if draw(st.booleans()):
        tokens[draw(st.integers(0, length - 1))] = 7
    border = draw(st.integers(1, length))
    first = draw(st.integers(0, 1))
    stretches = [Stretch(first, 0, border)] + ([Stretch(1 - first, border, length)] if border < length else [])
    return Passage(tokens, tuple(stretches), draw(st.integers(0, length - 1)))


@settings(max_examples=25, deadline=None)
@given(st.lists(passages(), min_size=1, max_size=6))
def test_passages_together_have_the_bits_of_each_alone(together: list[Passage]) -> None:
    decoder = new_decoder()
    hidden = force(decoder, WEIGHTS, together)
    for passage, states in zip(together, hidden, strict=True):
        assert states.shape == (len(passage.tokens) - passage.first_row, SPEC.hidden_size)
        assert torch.equal(states, force(decoder, WEIGHTS, [passage])[0])


def test_a_shared_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(2 * PAGE_SIZE + 3) % SPEC.vocab_size
    other = np.concatenate([tokens[: 2 * PAGE_SIZE], tokens[:5]])
    rows = []
    decoder = new_decoder()
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda inputs, kv: (rows.append(len(inputs.token_ids)), forward(inputs, kv))[1]
    )
    whole = [Passage(t, (Stretch(0, 0, len(t)),), 2 * PAGE_SIZE) for t in (tokens, other)]
    force(decoder, WEIGHTS, whole)
    assert sum(rows) == 2 * PAGE_SIZE + 3 + 5
    rows.clear()
    force(decoder, WEIGHTS, [whole[0], Passage(other, (Stretch(1, 0, len(other)),), 2 * PAGE_SIZE)])
    assert sum(rows) == len(tokens) + len(other)
    rows.clear()
    force(decoder, WEIGHTS, [whole[0], Passage(other, whole[1].stretches, PAGE_SIZE + 1)])
    assert sum(rows) == len(tokens) + len(other) - PAGE_SIZE


def test_a_sequence_longer_than_a_pass_is_computed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    passage = Passage(np.arange(300) % SPEC.vocab_size, (Stretch(0, 0, 300),), 0)
    whole = force(new_decoder(), WEIGHTS, [passage])[0]
    monkeypatch.setattr(forcing, "MAX_ROWS", 7)
    assert torch.equal(force(new_decoder(), WEIGHTS, [passage])[0], whole)


def test_nothing_is_computed_for_nothing() -> None:
    assert force(new_decoder(), {}, []) == []
