"""Token masks from schemas, patterns and grammars."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from toy_tokenizers import byte_level, metaspace

from aengine import Engine, EngineConfig, RequestOutput, SamplingParams
from aengine.errors import GrammarError
from aengine.model.tokenizer import Tokenizer
from aengine.structured import Grammar, Grammars
from aengine.testing import tiny_checkpoint

TOKENIZER = byte_level('{"name": "', '", "age": ', "ye", "true")
END = TOKENIZER.eos_token_ids[0]
SIZE = 300
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER)


async def generate(grammar: Grammar, **fields: Any) -> RequestOutput:
    model = tiny_checkpoint(0, vocab_size=SIZE, eos_token_ids=TOKENIZER.eos_token_ids)
    async with Engine(attrs.evolve(model, tokenizer=TOKENIZER), EngineConfig(page_size=4, num_pages=200)) as engine:
        return await engine.generate([1, 2, 3], SamplingParams(**fields), token_mask=grammar)


async def test_samples_under_a_schema_are_json_of_that_schema(grammars: Grammars) -> None:
    output = await generate(grammars.json_schema(SCHEMA), n=6, seed=1, max_tokens=200, temperature=1.5)
    texts = [sample.text or "" for sample in output.outputs]
    assert len(set(texts)) > 1
    for sample, text in zip(output.outputs, texts, strict=True):
        assert (sample.finish_reason, sample.stop_reason) == ("stop", END)
        value = json.loads(text)
        assert sorted(value) == ["age", "name"]
        assert 0 <= value["age"] <= 9


async def test_samples_under_a_pattern_match_it_whole(grammars: Grammars) -> None:
    output = await generate(grammars.regex("(yes|no)[0-9]{2,3}"), n=8, seed=1, max_tokens=20)
    assert all(re.fullmatch("(yes|no)[0-9]{2,3}", sample.text or "") for sample in output.outputs)


async def test_samples_under_a_grammar_are_of_it(grammars: Grammars) -> None:
    grammar = grammars.lark('start: pair ("," pair)?\npair: "(" start ")" | "x"')
    output = await generate(grammar, n=8, seed=3, max_tokens=60, stop_token_ids=[END])
    for sample in output.outputs:
        text = sample.text or ""
        assert set(text) <= set("(),x")
        if sample.finish_reason == "stop":
            assert text.count("(") == text.count(")")
    assert any(sample.finish_reason == "stop" for sample in output.outputs)


def walk(grammar: Grammar, token_ids: Sequence[int]) -> Any:
    mask = grammar.start()
    masks = [mask.next_mask(token_ids[:length]) for length in range(len(token_ids) + 1)]
    assert all(np.array_equal(mask.next_mask(token_ids), masks[-1]) for _ in range(2))  # a step that failed asks again
    resumed = grammar.start().next_mask(token_ids)
    assert np.array_equal(resumed, masks[-1])
    return masks


def test_the_mask_follows_the_output_token_by_token(grammars: Grammars) -> None:
    masks = walk(grammars.regex("yes|no"), [*b"yes"])
    allowed = [set(np.flatnonzero(mask).tolist()) for mask in masks]
    assert allowed == [{ord("y"), ord("n"), 258}, {ord("e")}, {ord("s")}, {END}]


def test_samples_of_a_grammar_do_not_share_their_place_in_it(grammars: Grammars) -> None:
    grammar = grammars.regex("ab")
    first, second = grammar.start(), grammar.start()
    first.next_mask([ord("a")])
    assert np.flatnonzero(second.next_mask([])).tolist() == [ord("a")]


@pytest.mark.parametrize("tokenizer", [metaspace(with_bytes=True)])
def test_a_sentencepiece_like_vocabulary_works(tokenizer: Tokenizer) -> None:
    mask = Grammars(tokenizer).regex("ab|é").start().next_mask([])
    assert {tokenizer.backend.token_to_id("a"), tokenizer.backend.token_to_id("é")} <= set(np.flatnonzero(mask))


def test_an_output_that_left_the_grammar_is_an_error(grammars: Grammars) -> None:
    with pytest.raises(GrammarError):
        grammars.regex("ab").start().next_mask([ord("z")])


def test_what_cannot_be_enforced_is_refused(grammars: Grammars) -> None:
    for make in (
        lambda: grammars.regex("(unclosed"),
        lambda: grammars.lark("start: missing"),
        lambda: grammars.json_schema({"type": "no such type"}),
        lambda: grammars.json_schema("{not json"),
    ):
        with pytest.raises(GrammarError):
            make()
    with pytest.raises(GrammarError, match="EOS"):
        Grammars(attrs.evolve(TOKENIZER, eos_token_ids=()))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match='extra "structured"'):
        Grammars(TOKENIZER)
