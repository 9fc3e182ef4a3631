"""From a sample's spans follows, for every token, which version computed each position it attended to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.audit.context import Context, Stretch, contexts_of, restrict, single_version
from aengine.errors import ProvenanceError
from aengine.outputs import KVSpan, VersionSpan
from aengine.provenance import Provenance


def versions_seen(contexts: tuple[Context, ...], num_prompt: int) -> list[list[int]]:
    """For each token, the version of every position before it."""
    return [
        [context.version_at(position) for position in range(num_prompt + token)]
        for context in contexts
        for token in range(context.first_token, context.last_token)
    ]


@given(
    st.integers(1, 6),
    st.lists(st.sampled_from(["token", "token", "update and keep", "update and recompute", "preempt"]), max_size=20),
    st.integers(1, 4),
)
def test_what_provenance_writes_down_is_read_back(num_prompt: int, events: list[str], chunk: int) -> None:
    provenance, version, seen = Provenance(), 0, []
    kv: list[int] = []  # the version of every position that has KV
    for event in [*events, "token"]:
        if event == "token":
            while len(kv) < num_prompt + len(seen):
                count = min(chunk, num_prompt + len(seen) - len(kv))
                provenance.computed(len(kv), len(kv) + count, version)
                kv += [version] * count
            provenance.sampled(version)
            seen.append(list(kv))
        else:
            version += event != "preempt"
            if event != "update and keep":
                provenance.forget_context()
                kv = []
            elif len(kv) < num_prompt + len(seen) - 1:
                provenance.computed(len(kv), len(kv) + 1, version)  # a step of a chunked prefill
                kv.append(version)
    contexts = contexts_of(num_prompt, len(seen), provenance.version_spans(), provenance.kv_spans())
    assert versions_seen(contexts, num_prompt) == seen
    for first in range(len(seen)):
        assert versions_seen(restrict(contexts, first, first + 1), num_prompt) == seen[first : first + 1]


def test_one_version_is_one_context() -> None:
    contexts = contexts_of(5, 4, [VersionSpan(3, 0, 4)], [KVSpan(3, 0, 8, 0, 4)])
    assert contexts == single_version(5, 4, 3) == (Context((Stretch(3, 0, 8),), 0, 4),)


def test_kept_kv_is_one_context_and_kv_computed_again_another() -> None:
    spans = [VersionSpan(0, 0, 2), VersionSpan(1, 2, 4)]
    kept = contexts_of(5, 4, spans, [KVSpan(0, 0, 6, 0, 4), KVSpan(1, 6, 8, 2, 4)])
    assert kept == (Context((Stretch(0, 0, 6), Stretch(1, 6, 8)), 0, 4),)
    again = contexts_of(5, 4, spans, [KVSpan(0, 0, 6, 0, 2), KVSpan(1, 0, 8, 2, 4)])
    assert again == (Context((Stretch(0, 0, 6),), 0, 2), Context((Stretch(1, 0, 8),), 2, 4))


def test_a_sample_without_tokens_has_no_context() -> None:
    assert contexts_of(5, 0, [], []) == single_version(5, 0, 1) == ()


GOOD_TOKENS, GOOD_KV = (VersionSpan(0, 0, 4),), (KVSpan(0, 0, 8, 0, 4),)


@pytest.mark.parametrize(
    ("tokens", "kv"),
    [
        ((), GOOD_KV),
        ((VersionSpan(0, 0, 3),), GOOD_KV),
        ((VersionSpan(0, 0, 5),), GOOD_KV),
        ((VersionSpan(0, 0, 10**12),), GOOD_KV),
        ((VersionSpan(0, 0, 2), VersionSpan(0, 1, 4)), GOOD_KV),
        ((VersionSpan(0, 0, 2), VersionSpan(0, 2, 2), VersionSpan(0, 2, 4)), GOOD_KV),
        ((VersionSpan(1, 0, 4),), GOOD_KV),
        (GOOD_TOKENS, ()),
        (GOOD_TOKENS, (KVSpan(0, 0, 7, 0, 4),)),
        (GOOD_TOKENS, (KVSpan(0, 1, 8, 0, 4),)),
        (GOOD_TOKENS, (KVSpan(0, 0, 8, 0, 3),)),
        (GOOD_TOKENS, (KVSpan(0, 0, 8, 0, 5),)),
        (GOOD_TOKENS, (KVSpan(0, 0, 8, -1, 4),)),
        (GOOD_TOKENS, (*GOOD_KV, *GOOD_KV)),
        (GOOD_TOKENS, (KVSpan(0, 0, 4, 0, 4), KVSpan(0, 5, 8, 0, 4))),
        (GOOD_TOKENS, (KVSpan(0, 0, 7, 0, 4), KVSpan(0, 7, 8, 0, 4))),
    ],
)
def test_spans_that_cannot_be_true_are_refused(tokens: tuple[VersionSpan, ...], kv: tuple[KVSpan, ...]) -> None:
    with pytest.raises(ProvenanceError):
        contexts_of(5, 4, tokens, kv)
