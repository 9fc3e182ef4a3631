"""A request and its samples, as the scheduler sees them. No torch, no event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import Factory, define, field

from aengine.outputs import CompletionOutput, FinishReason, RequestOutput
from aengine.params import SamplingParams
from aengine.provenance import Provenance
from aengine.sampling.stop import StopRule
from statemachines.request import REQUEST_INITIAL, RequestState, RequestTrigger, follow

if TYPE_CHECKING:
    from aengine.cache.state import TaskCacheState

__all__ = ["Request", "Sample"]


@define(eq=False)
class Sample:
    """One sample on its way: tokens so far, what made them, and the KV it holds.

    `tokens` is the prompt followed by the output. `num_computed` counts the leading tokens whose KV has been computed;
    the token sampled last has none until it is fed to the model.
    """

    request: Request = field(repr=False)
    index: int
    seed: int
    tokens: list[int] = field(repr=False)
    state: RequestState = REQUEST_INITIAL
    cache: TaskCacheState | None = None
    num_computed: int = 0
    num_preemptions: int = 0
    logprobs: list[float] = Factory(list)
    raw_logprobs: list[float] = Factory(list)
    provenance: Provenance = Factory(Provenance)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

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
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def follow(self, trigger: RequestTrigger) -> None:
        self.state = follow(self.state, trigger)

    def append(self, token_id: int, logprob: float, raw_logprob: float, version: int) -> None:
        """Add a sampled token and the policy version whose logits it was drawn from."""
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
        self.cache, self.num_computed = None, 0
        self.provenance.forget_context()

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.follow(RequestTrigger.FINISH)
        self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self, text: str | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            token_ids=tuple(self.output_ids),
            text=text,
            logprobs=tuple(self.logprobs),
            raw_logprobs=tuple(self.raw_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            version_spans=self.provenance.version_spans(),
            kv_spans=self.provenance.kv_spans(),
            seed=self.seed,
        )


@define(eq=False)
class Request:
    """One prompt and its samples. `on_progress` is called when tokens came or a sample ended; it must not raise."""

    request_id: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    stop: StopRule = field(repr=False)
    seed: int
    priority: int = 0
    arrival: int = 0
    cache_salt: str | None = None
    samples: list[Sample] = field(init=False, repr=False)
    num_cached_tokens: int = 0
    is_started: bool = False
    """Whether its first sample has been admitted: from then on it belongs to the version it runs under."""
    are_siblings_placed: bool = False
    """Whether the other samples have been forked from the first, or put in line on their own."""
    error: BaseException | None = None
    on_progress: Callable[[], None] = field(default=lambda: None, repr=False)

    def __attrs_post_init__(self) -> None:
        self.samples = [Sample(self, index, self.seed, list(self.prompt_token_ids)) for index in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self.samples)

    @property
    def leader(self) -> Sample:
        """The sample that computes the prompt for all."""
        return self.samples[0]

    def output(self, decode: Callable[[list[int]], str] | None = None) -> RequestOutput:
        """The result so far; `decode` turns output ids into text where there is a tokenizer."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(
                sample.output(decode(sample.output_ids) if decode is not None else None) for sample in self.samples
            ),
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=sum(sample.num_preemptions for sample in self.samples),
        )
