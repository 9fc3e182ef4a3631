"""Field cases E5 and L: text is a view on ids, never half a character, and never any of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import tokenizers
from case_support import PAGE, both_backends, new_engine, until_idle
from tokenizers import decoders, models
from toy_tokenizers import byte_level, finished

from aengine import CompletionOutput, Engine, SamplingParams
from aengine.errors import SamplingParamsError, TokenizerMissingError
from aengine.model.checkpoint import Checkpoint
from aengine.model.tokenizer import Tokenizer
from aengine.testing import tiny_checkpoint

WORDS = ("beta", " gam", "ma", " brown", " fox")
EMOJI = list("😀".encode())
SIZE = 300


class Forced:
    """Makes every sample consist of the given tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def start(self) -> Forced:
        return self

    def next_mask(self, output_ids: Sequence[int]) -> Any:
        return np.arange(SIZE) == self._token_ids[len(output_ids)]


def model_with(tokenizer: Tokenizer) -> Checkpoint:
    return attrs.evolve(tiny_checkpoint(0, vocab_size=SIZE), tokenizer=tokenizer)


TOKENIZER = byte_level(*WORDS)
MODEL = model_with(TOKENIZER)


def ids(*words: str) -> list[int]:
    return [token for word in words for token in ([256 + WORDS.index(word)] if word in WORDS else word.encode())]


async def both_ways(
    engine: Engine, token_ids: Sequence[int], prompt: Sequence[int] = (1, 2, 3), **fields: Any
) -> tuple[CompletionOutput, list[str]]:
    """A forced sample, and the pieces of text in which it was streamed; both forms agree."""
    params = SamplingParams(**{"max_tokens": len(token_ids), "seed": 1, **fields})
    whole = (await engine.generate(prompt, params, token_mask=Forced(token_ids))).outputs[0]
    deltas = []
    async with engine.stream(prompt, params, token_mask=Forced(token_ids)) as stream:
        async for delta in stream:
            deltas.append(delta)
        streamed = (await stream.output()).outputs[0]
    async with engine.stream(prompt, params, token_mask=Forced(token_ids), output_kind="cumulative") as stream:
        cumulative = [item async for item in stream]
    pieces = [delta.text or "" for delta in deltas]
    assert whole == streamed
    assert "".join(pieces) == whole.text == cumulative[-1].text
    assert all((whole.text or "").startswith(item.text or "") for item in cumulative)
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert len(whole.logprobs) == len(whole.raw_logprobs) == len(whole.token_ids)
    return whole, pieces


@pytest.mark.parametrize(
    ("token_ids", "stop", "text", "count"),
    [
        (ids("a", "beta", " gam", "ma", "z", "z"), "beta gamma", "a", 4),
        (ids(" brown", " fox", "z", "z"), "own fox", " br", 2),
        (ids("a", "b", "a", "b", "c", "z"), "abc", "ab", 5),
        (ids("a", "beta", " gam", "!", "z"), "beta gamma", "abeta gam!z", 5),
        (ids("a", "beta", " gam"), "beta gamma", "abeta gam", 3),
    ],
)
@both_backends
async def test_l1_text_ends_before_the_stop_string_and_ids_after_it(
    token_ids: list[int], stop: str, text: str, count: int
) -> None:
    async with new_engine(MODEL) as engine:
        sample, pieces = await both_ways(engine, token_ids, stop=stop)
        await until_idle(engine)
    assert (sample.text, len(sample.token_ids)) == (text, count)
    assert sample.token_ids == tuple(token_ids[:count])
    stopped = count < len(token_ids)
    assert "".join(pieces) == text  # pieces are never taken back, so nothing of the stop string was in any of them
    assert (sample.finish_reason, sample.stop_reason) == (("stop", stop) if stopped else ("length", None))


@both_backends
async def test_l1_the_last_token_by_length_may_complete_the_match_and_the_first_match_counts() -> None:
    async with new_engine(MODEL) as engine:
        last, _ = await both_ways(engine, ids("a", "beta"), stop=["eta", "zz"])
        first, _ = await both_ways(engine, ids("a", "beta", "ma"), stop=["am", "ta"])
    assert (last.finish_reason, last.stop_reason, last.text) == ("stop", "eta", "ab")
    assert (first.stop_reason, first.text) == ("ta", "abe")


@both_backends
async def test_l1_no_match_counts_before_min_tokens() -> None:
    async with new_engine(MODEL) as engine:
        sample, _ = await both_ways(engine, ids("a", "a", "a", "b"), stop="a", min_tokens=2)
    assert (sample.text, len(sample.token_ids)) == ("aa", 3)


@both_backends
async def test_l1_a_stop_token_is_looked_at_before_the_text_that_it_completes() -> None:
    async with new_engine(MODEL) as engine:
        sample, _ = await both_ways(engine, ids("a", "b", "c"), stop="ab", stop_token_ids=[ord("b")])
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", ord("b"), "")


@both_backends
async def test_l1_an_abort_gives_out_what_was_held_back() -> None:
    async with new_engine(MODEL) as engine:
        async with engine.stream(
            [1, 2], SamplingParams(stop="beta gamma"), token_mask=Forced(ids("a", "beta", *"! " * 50))
        ) as stream:
            text = ""
            async for delta in stream:
                text += delta.text or ""
                if len((await anext(stream)).token_ids):
                    break
            await stream.aclose()
            output = await stream.output()
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == TOKENIZER.decode(output.outputs[0].token_ids)


@both_backends
async def test_l1_stop_strings_without_a_tokenizer_are_refused() -> None:
    async with new_engine() as engine:
        with pytest.raises(TokenizerMissingError, match="stop"):
            await engine.generate([1, 2], SamplingParams(stop="x"))
        with pytest.raises(TokenizerMissingError, match="stop"):
            engine.stream([1, 2], SamplingParams(stop=["x"]))
        assert engine.stats().num_waiting == 0


@both_backends
async def test_l3_a_character_over_four_tokens_is_streamed_whole() -> None:
    async with new_engine(MODEL) as engine:
        sample, pieces = await both_ways(engine, [*ids("a"), *EMOJI, *EMOJI, *ids("z")])
    assert sample.text == "a😀😀z"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@both_backends
async def test_l3_after_a_prompt_that_ends_inside_a_character_the_rest_of_it_is_replaced() -> None:
    async with new_engine(MODEL) as engine:
        sample, _ = await both_ways(engine, [0xAC, *ids("a")], prompt=[*ids("beta"), 0xE2, 0x82])
    assert sample.text == TOKENIZER.decode([0xAC, *ids("a")]) == "\N{REPLACEMENT CHARACTER}a"


@both_backends
async def test_l3_an_output_that_ends_inside_a_character_loses_nothing() -> None:
    async with new_engine(MODEL) as engine:
        sample, pieces = await both_ways(engine, [*ids("a"), *EMOJI[:3]])
    assert (sample.text, sample.token_ids) == ("a\N{REPLACEMENT CHARACTER}", (*ids("a"), *EMOJI[:3]))
    assert pieces[:-1] == ["a", "", ""]


@both_backends
async def test_l3_invalid_bytes_in_a_row_come_out_as_they_are_decoded() -> None:
    async with new_engine(MODEL, num_pages=256) as engine:
        sample, _ = await both_ways(engine, [0xFF, 0xE2, 0x82] * 60)
    assert sample.text == TOKENIZER.decode([0xFF, 0xE2, 0x82] * 60)


@both_backends
async def test_e5_text_that_two_ids_and_one_share_is_never_encoded_again() -> None:
    vocab = {"?": 0, "a": 1, "b": 2, "ab": 3, "c": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.decoder = decoders.Fuse()
    tokenizer = finished(backend)
    assert tokenizer.decode([1, 2]) == tokenizer.decode([3]) == "ab"
    assert tokenizer.encode("ab") == [3]
    async with new_engine(model_with(tokenizer)) as engine:
        prompt = [4] * (2 * PAGE - 1)
        params = SamplingParams(max_tokens=2, seed=1)
        first = await engine.generate(prompt, params, token_mask=Forced([1, 2]))
        assert (first.outputs[0].token_ids, first.outputs[0].text) == ((1, 2), "ab")
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 4, 4]
        second = await engine.generate(turn, params)
    assert second.prompt_token_ids == tuple(turn)
    assert second.num_cached_tokens == 2 * PAGE


@both_backends
async def test_ids_beyond_the_vocabulary_are_refused_by_name() -> None:
    async with new_engine() as engine:
        for fields in (
            {"stop_token_ids": [64]},
            {"logit_bias": {64: 1.0}},
            {"allowed_token_ids": [1, 64]},
            {"logprobs": 65},
            {"prompt_logprobs": 65},
        ):
            with pytest.raises(SamplingParamsError, match=next(iter(fields))):
                await engine.generate([1, 2], SamplingParams(**fields))  # type: ignore[arg-type]
