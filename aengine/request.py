"""A request and its samples, as the scheduler sees them. No torch, no event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import Factory, define, field

from aengine.outputs import Alternatives, CompletionOutput, FinishReason, NumericsLabel, RequestOutput
from aengine.params import SamplingParams
from aengine.provenance import Provenance
from aengine.sampling.history import TokenHistory
from aengine.sampling.mask import TokenMask, TokenMaskSource
from aengine.sampling.stop import Finish, StopRule
from aengine.sampling.stop_text import StopText
from aengine.sampling.text import TextDecoder
from aengine.targets import Targets
from statemachines.request import REQUEST_INITIAL, RequestState, RequestTrigger, follow

if TYPE_CHECKING:
    from aengine.cache.state import TaskCacheState

__all__ = ["Request", "Sample"]


@define(eq=False)
class Sample:
    """One sample on its way: tokens so far, what made them, and the KV it holds.

    Thousands may wait, so what most never need is made when it is needed.

    `tokens` is the prompt followed by the output. `num_computed` counts the leading tokens whose KV has been computed;
    the token sampled last has none until it is fed to the model.
    """

    request: Request = field(repr=False)
    index: int
    seed: int
    tokens: array[int] = field(repr=False)
    """int32."""
    state: RequestState = REQUEST_INITIAL
    cache: TaskCacheState | None = None
    num_computed: int = 0
    num_given_up: int = 0
    """How many of its tokens had KV when its pages were last given up."""
    num_preemptions: int = 0
    logprobs: array[float] = Factory(lambda: array("d"))
    raw_logprobs: array[float] = Factory(lambda: array("d"))
    top_logprobs: tuple[Alternatives, ...] = ()
    mask: TokenMask | None = None
    stop_text: StopText | None = None
    """Its text, where stop strings are looked for in it."""
    targets: Targets | None = None
    """Tokens to score on the way: the prompt's own, or, of a scoring request, the response."""
    provenance: Provenance = Factory(Provenance)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _history: TokenHistory | None = field(init=False, default=None, repr=False)

    @property
    def history(self) -> TokenHistory | None:
        """What its draws look back at; None where nothing does."""
        if self._history is None and (self.mask is not None or self.request.params.has_penalties):
            self._history = TokenHistory(self.tokens, len(self.request.prompt_token_ids))
        return self._history

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of service: lower priority numbers first, then arrival, then index."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def task_id(self) -> str:
        return f"{self.request.request_id}/{self.index}"

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.output_since(0)

    def output_since(self, start: int) -> list[int]:
        """Output ids from the index `start` on."""
        return self.tokens[len(self.request.prompt_token_ids) + start :].tolist()

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def follow(self, trigger: RequestTrigger) -> None:
        self.state = follow(self.state, trigger)

    @property
    def max_cached_tokens(self) -> int | None:
        """How many leading tokens may have KV from the cache: none whose logits are wanted; None for no limit."""
        return None if self.targets is None or self.targets.is_complete else self.targets.next_position

    def append(
        self, token_id: int, logprob: float, raw_logprob: float, version: int, top: Alternatives | None = None
    ) -> None:
        """Add a sampled token and the policy version whose logits it was drawn from."""
        if top is not None:
            self.top_logprobs += (top,)
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw_logprob)
        self.provenance.sampled(version)

    def computed(self, end: int, version: int) -> None:
        """KV of the tokens up to `end` has been computed, or found, under `version`."""
        self.provenance.computed(self.num_computed, end, version)
        self.num_computed = end

    def forget_kv(self) -> None:
        """The sample's pages were given up; its tokens stay, and their KV will be computed again."""
        self.cache, self.num_computed, self.num_given_up = None, 0, self.num_computed
        self.provenance.forget_context()

    def restart_targets(self) -> bool:
        """A new version is about to be committed: score from the beginning what is not complete; whether it was not."""
        return self.targets is not None and self.targets.restart_unless_complete()

    def check_stop(self) -> Finish | None:
        """Whether the token added last ends the sample. To be asked once for each token."""
        token_id, rule = self.tokens[-1], self.request.stop
        finish = rule.check(token_id, self.num_output)
        if self.stop_text is not None:
            matched = self.stop_text.feed(token_id, may_match=self.num_output > rule.min_tokens)
            if matched is not None and (finish is None or finish.stop_reason is None):
                return Finish("stop", matched)
        return finish

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.follow(RequestTrigger.FINISH)
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.stop_text is not None:
            self.stop_text.close()

    def output(self, decode: Callable[[Sequence[int]], str] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            token_ids=tuple(self.output_ids),
            text=self._text(decode),
            logprobs=tuple(self.logprobs),
            raw_logprobs=tuple(self.raw_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            version_spans=self.provenance.version_spans(),
            kv_spans=self.provenance.kv_spans(),
            seed=self.seed,
            top_logprobs=None if self.request.params.logprobs is None else self.top_logprobs,
        )

    def _text(self, decode: Callable[[Sequence[int]], str] | None) -> str | None:
        if self.stop_text is not None:
            return self.stop_text.text
        return None if decode is None else decode(self.output_ids)


@define(eq=False)
class Request:
    """One prompt and its samples.

    `on_progress` is called with the request when it got its place in the queue, when tokens came or a sample ended; it
    must not raise.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    stop: StopRule = field(repr=False)
    seed: int
    priority: int = 0
    arrival: int = 0
    cache_salt: str | None = None
    decoder: TextDecoder | None = field(default=None, repr=False)
    """For `params.stop`, which needs one."""
    token_mask: TokenMaskSource | None = field(default=None, repr=False)
    is_scoring: bool = False
    """Whether it ends with its only sample's targets, and samples nothing."""
    samples: list[Sample] = field(init=False, repr=False)
    num_cached_tokens: int = 0
    is_queued: bool = False
    """Whether it has a place in the queue, or had one: False while the queue is full and it stands in line."""
    is_started: bool = False
    """Whether its first sample has been admitted: from then on it belongs to the version it runs under."""
    are_siblings_placed: bool = False
    """Whether the other samples have been forked from the first, or put in line on their own."""
    error: BaseException | None = None
    on_progress: Callable[[Request], None] = field(default=lambda _: None, repr=False)

    def __attrs_post_init__(self) -> None:
        self.samples = [self._new_sample(index) for index in range(self.params.n)]
        if self.params.prompt_logprobs is not None:
            plain = SamplingParams(logprobs=self.params.prompt_logprobs)
            self.leader.targets = Targets(plain, 0, self.prompt_token_ids[1:])

    def _new_sample(self, index: int) -> Sample:
        sample = Sample(self, index, self.seed, array("i", self.prompt_token_ids))
        if self.params.stop and self.decoder is not None:
            sample.stop_text = StopText.of(self.decoder, self.params.stop)
        if self.token_mask is not None:
            sample.mask = self.token_mask.start()
        return sample

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self.samples)

    @property
    def leader(self) -> Sample:
        """The sample that computes the prompt for all."""
        return self.samples[0]

    def output(
        self, decode: Callable[[Sequence[int]], str] | None = None, numerics: NumericsLabel = "unverified"
    ) -> RequestOutput:
        """The result so far; `decode` turns output ids into text where there is a tokenizer."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(sample.output(decode) for sample in self.samples),
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=sum(sample.num_preemptions for sample in self.samples),
            prompt_logprobs=self._prompt_logprobs(),
            params=self.params,
            has_token_mask=self.token_mask is not None,
            numerics=numerics,
        )

    def _prompt_logprobs(self) -> tuple[Alternatives | None, ...] | None:
        targets = self.leader.targets
        if self.params.prompt_logprobs is None or targets is None or not targets.is_complete:
            return None
        return (None, *(result.top for result in targets.results))
