"""How to sample: `SamplingParams`, with vLLM's names and meanings."""

from __future__ import annotations

from attrs import field, frozen

from aengine import param_checks as check
from aengine.errors import SamplingParamsError

__all__ = ["SamplingParams"]

MAX_TEMPERATURE = 1e4


@frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, validated when made; a bad value raises `SamplingParamsError`. What depends
    on the model (its vocabulary, its tokenizer) is checked at submit.

    The defaults truncate nothing, so that the behaviour policy is the model's own distribution. What changes it works
    in this order, as in vLLM: `allowed_token_ids`, `min_tokens`, `logit_bias`, repetition, frequency and presence
    penalty, `temperature`, `min_p`, `top_k`, `top_p`.
    """

    n: int = field(default=1, validator=check.at_least(1))
    """Samples per prompt. Sample j does not depend on n."""
    temperature: float = field(default=1.0, validator=check.between(0.0, MAX_TEMPERATURE))
    """Divides the logits; 0 is greedy (the lowest id wins a tie)."""
    top_p: float = field(default=1.0, validator=check.between(0.0, 1.0, open_low=True))
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = field(default=0, validator=check.at_least(-1))
    """Keep this many most likely tokens; 0 and -1 keep all."""
    min_p: float = field(default=0.0, validator=check.between(0.0, 1.0))
    """Drop tokens less likely than this times the likeliest; 0 drops none."""
    max_tokens: int | None = field(default=None, validator=check.optional(check.at_least(1)))
    """New tokens, not total length. None, or more than fits, means: as many as model and page pool allow."""
    min_tokens: int = field(default=0, validator=check.at_least(0))
    """EOS and stop tokens cannot be sampled before this many new tokens, and no stop string is seen."""
    stop: tuple[str, ...] = field(default=(), converter=check.to_tuple, validator=check.stop_strings)
    """Texts that end a sample; its text ends just before the match, its tokens after the one that completed it."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=check.to_tuple, validator=check.token_ids)
    """Tokens that end a sample, beside the model's EOS; the ending token is kept."""
    ignore_eos: bool = field(default=False, validator=check.boolean)
    """Go on past EOS."""
    presence_penalty: float = field(default=0.0, validator=check.between(-2.0, 2.0))
    """Taken from the logit of every token that is in the output already."""
    frequency_penalty: float = field(default=0.0, validator=check.between(-2.0, 2.0))
    """Taken from the logit of every token once for each time that it is in the output."""
    repetition_penalty: float = field(default=1.0, validator=check.between(0.0, 100.0, open_low=True))
    """Divides positive logits of tokens in prompt or output, and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] | None = field(
        default=None, converter=check.to_pairs, validator=check.optional(check.logit_bias)
    )
    """Added to the logits of single tokens; given as a mapping from id to number in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = field(
        default=None, converter=check.to_tuple_or_none, validator=check.optional(check.some_token_ids)
    )
    """Only these can be sampled; None allows all."""
    logprobs: int | None = field(default=None, validator=check.optional(check.at_least(0)))
    """Alternatives to record for each token, the sampled one always among them (`CompletionOutput.top_logprobs`)."""
    prompt_logprobs: int | None = field(default=None, validator=check.optional(check.at_least(0)))
    """The same for the prompt's tokens under the model's own distribution (`RequestOutput.prompt_logprobs`); the prompt
    is then computed without the prefix cache."""
    seed: int | None = field(default=None, validator=check.optional(check.seed))
    """Seed of the draws; None lets the engine choose one. The seed used is in every result."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check_vocabulary(self, size: int) -> None:
        """Raise `SamplingParamsError` for a token id, or a number of alternatives, beyond a vocabulary of `size`."""
        biased = tuple(token for token, _ in self.logit_bias or ())
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": biased,
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, token_ids in named.items():
            if too_large := [token for token in token_ids if token >= size]:
                reason = f"the vocabulary has ids 0 to {size - 1}, not {too_large[0]}"
                raise SamplingParamsError(name, getattr(self, name), reason)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > size:
                raise SamplingParamsError(name, getattr(self, name), f"the vocabulary has {size} tokens")
