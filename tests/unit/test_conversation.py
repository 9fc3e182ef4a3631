"""A conversation as exact token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_tokenizers import byte_level

from aengine.conversation import Conversation
from aengine.errors import PromptError, TokenizerMissingError
from aengine.outputs import CompletionOutput, RequestOutput, VersionSpan


def answer(prompt: tuple[int, ...], *samples: tuple[int, ...]) -> RequestOutput:
    outputs = tuple(
        CompletionOutput(
            index=index,
            token_ids=ids,
            text=None,
            logprobs=(-0.5,) * len(ids),
            raw_logprobs=(-0.25,) * len(ids),
            finish_reason="stop",
            stop_reason=None,
            version_spans=(VersionSpan(3, 0, len(ids)),),
            kv_spans=(),
            seed=0,
        )
        for index, ids in enumerate(samples)
    )
    return RequestOutput("r", prompt, outputs, True, 0, 0)


def test_turns_are_appended_exactly_and_told_apart() -> None:
    conversation = Conversation.start([1, 2])
    conversation.add_output(answer((1, 2), (7, 8), (9,)), index=1)
    conversation.add_tokens(np.array([4, 5]))
    assert conversation.token_ids == [1, 2, 9, 4, 5]
    assert conversation.loss_mask == [False, False, True, False, False]
    assert conversation.logprobs == [None, None, -0.5, None, None]
    assert conversation.raw_logprobs == [None, None, -0.25, None, None]
    assert conversation.token_versions == [None, None, 3, None, None]
    assert conversation.num_sampled == 1


def test_an_answer_to_something_else_is_refused_and_changes_nothing() -> None:
    conversation = Conversation.start([1, 2])
    with pytest.raises(PromptError, match="not this conversation of 2"):
        conversation.add_output(answer((1, 2, 3), (7,)))
    assert conversation.token_ids == [1, 2]


@pytest.mark.parametrize("bad", [[1.5], [-1], ["a"], [True], [None]])
def test_what_is_not_a_token_id_is_refused_and_changes_nothing(bad: list[Any]) -> None:
    conversation = Conversation.start([1])
    with pytest.raises(PromptError, match="not a token id"):
        conversation.add_tokens(bad)
    assert (conversation.token_ids, conversation.loss_mask) == ([1], [False])


def test_text_is_encoded_once_on_its_own() -> None:
    conversation = Conversation.start("ab", byte_level())
    conversation.add_text("c")
    assert conversation.token_ids == [ord("a"), ord("b"), ord("c")]


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerMissingError):
        Conversation.start("ab")
    with pytest.raises(TokenizerMissingError):
        Conversation.start([1]).add_text("ab")
