"""A conversation over several turns, as exact token ids: what was sampled, what was given, and which is which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define, field

from aengine.errors import PromptError, TokenizerMissingError
from aengine.model.tokenizer import Tokenizer
from aengine.outputs import RequestOutput
from aengine.validate import as_integer

__all__ = ["Conversation"]


@define(eq=False)
class Conversation:
    """The ids of a conversation so far; nothing in it is ever decoded and encoded again.

    `output = await engine.generate(conversation.token_ids, params)`, then `conversation.add_output(output)`, then
    `conversation.add_tokens(...)` with what a tool or the environment said, and so on. Each turn finds the KV of those
    before it in the prefix cache.

    `token_ids`, `loss_mask`, `logprobs`, `raw_logprobs` and `token_versions` are aligned one to one. The mask is True
    for tokens that the policy sampled; the others have no log-probability and no version (None, not 0).
    """

    tokenizer: Tokenizer | None = field(default=None, repr=False)
    token_ids: list[int] = field(factory=list)
    loss_mask: list[bool] = field(factory=list, repr=False)
    logprobs: list[float | None] = field(factory=list, repr=False)
    raw_logprobs: list[float | None] = field(factory=list, repr=False)
    token_versions: list[int | None] = field(factory=list, repr=False)

    @classmethod
    def start(cls, prompt: Sequence[int] | str, tokenizer: Tokenizer | None = None) -> Conversation:
        """With a prompt; a text is encoded as a prompt of `Engine.generate` would be. Raises `TokenizerMissingError`
        for text without a tokenizer."""
        conversation = cls(tokenizer)
        conversation.add_tokens(
            conversation._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        )
        return conversation

    def add_output(self, output: RequestOutput, index: int = 0) -> None:
        """What the policy answered: sample `index` of an output whose prompt was this conversation, exactly. Raises
        `PromptError` for another prompt, since its log-probabilities would belong to other contexts."""
        if output.prompt_token_ids != tuple(self.token_ids):
            raise PromptError(
                f"output {output.request_id!r} answers a prompt of {len(output.prompt_token_ids)} tokens that is not "
                f"this conversation of {len(self.token_ids)}"
            )
        sample = output.outputs[index]
        self.token_ids += sample.token_ids
        self.loss_mask += [True] * len(sample.token_ids)
        self.logprobs += sample.logprobs
        self.raw_logprobs += sample.raw_logprobs
        self.token_versions += sample.token_versions

    def add_tokens(self, token_ids: Iterable[int]) -> None:
        """What was given: a prompt, a tool's result, the next message of the environment. Raises `PromptError` for what
        is not a token id; whether the vocabulary has it, `Engine.generate` checks."""
        given = [_token_id(token) for token in token_ids]
        self.token_ids += given
        self.loss_mask += [False] * len(given)
        for column in (self.logprobs, self.raw_logprobs, self.token_versions):
            column += [None] * len(given)

    def add_text(self, text: str) -> None:
        """As `add_tokens`, for a text on its own, without the special tokens that begin one. Raises
        `TokenizerMissingError`."""
        self.add_tokens(self._encode(text, add_special_tokens=False))

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise TokenizerMissingError("text was given, and the conversation has no tokenizer; give token ids")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _token_id(value: object) -> int:
    token_id = as_integer(value)
    if token_id is None or token_id < 0:
        raise PromptError(f"{value!r} is not a token id")
    return token_id
