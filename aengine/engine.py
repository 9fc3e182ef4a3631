"""The front door: `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import attrs

from aengine.audit.replay import Replay
from aengine.completed import CompletedOutputs, Gathering, submit_all
from aengine.config import EngineConfig
from aengine.control import PolicyControl
from aengine.errors import (
    PromptError,
    RequestFailedError,
)
from aengine.loops import call_soon
from aengine.model.checkpoint import Checkpoint, load_checkpoint
from aengine.model.known import KNOWN_MODELS, get_model
from aengine.model.tokenizer import Tokenizer
from aengine.outputs import RequestOutput
from aengine.params import SamplingParams
from aengine.prompts import Prompt
from aengine.request import Request
from aengine.resume import aborted, params_of, records_of, resume_sample, resumed_output
from aengine.sampling.mask import TokenMaskSource
from aengine.sampling.text import Detokenizer, decode_all
from aengine.scoring import ScoreOutput, score_output
from aengine.stream import OutputKind, RequestStream
from aengine.validate import refuse_unless

__all__ = ["Engine"]


class Engine(PolicyControl):
    """An LLM rollout engine inside this process. Open it with `async with`; one event loop at a time owns it.

    `model` is a `Checkpoint` (see `load_checkpoint`) or a `transformers` causal LM of a supported architecture, whose
    weights are copied. Weights are built when the engine is opened.

    With `share=True` nothing is copied: the engine computes with the module's own float32 parameters, which may then be
    changed in `weight_update()` bodies only. That is slower, since weights are neither fused nor packed.
    """

    @classmethod
    def from_pretrained(cls, source: str | Path, config: EngineConfig | None = None) -> Engine:
        """An engine on a checkpoint directory, a GGUF file, a known small model or a Hub id.

        A known model that is not on this machine yet is fetched first. Raises `CheckpointError` or
        `ModelUnavailableError`.
        """
        return cls(cls.read_pretrained(source), config)

    @staticmethod
    def read_pretrained(source: str | Path) -> Checkpoint:
        """The checkpoint that `from_pretrained` makes an engine of."""
        if str(source) in KNOWN_MODELS and not Path(source).exists():
            get_model(str(source))
        return load_checkpoint(source)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._checkpoint.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        token_mask: TokenMaskSource | None = None,
    ) -> RequestOutput:
        """Sample `params.n` completions of a prompt (text or token ids) and return them when all have ended.

        A lower `priority` number is served earlier. Requests share KV only under the same `cache_salt`. `token_mask`
        decides which tokens may come next (`aengine.structured` makes one from a JSON schema, a regular expression or a
        grammar). Raises `PromptError` for a prompt that cannot be served, `SamplingParamsError` or
        `TokenizerMissingError` for parameters that do not go with the model, and `RequestFailedError` if the request
        failed on its way. Cancelling it aborts the request.
        """
        gathering = Gathering(
            [self._usable().intake.request(prompt, params, request_id, priority, cache_salt, token_mask)]
        )
        self._submit(gathering.requests)
        await self._finish(gathering)
        return self._result(gathering.requests[0])

    async def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Results in order of `prompts`. Every prompt is checked before any is submitted.

        `params` is one for all or one for each. `on_finished` is called with each result as it comes. If a request
        fails the others still run to their end, then `RequestFailedError` is raised; its `outputs` holds the rest.
        """
        gathering = Gathering(self._usable().intake.requests(prompts, params))
        self._submit(gathering.requests)
        await self._finish(gathering, on_finished)
        return self._results(gathering.requests)

    def as_completed(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> CompletedOutputs:
        """`async with engine.as_completed(prompts) as done`, then `async for index, output in done`: results as they
        come, each with the index of its prompt. Arguments as for `generate_batch`, checked at once."""
        requests = self._usable().intake.requests(prompts, params)
        return CompletedOutputs(requests, self._submit, self._withdraw, self._withdraw_soon, self._result)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        token_mask: TokenMaskSource | None = None,
        output_kind: OutputKind = "delta",
    ) -> RequestStream:
        """As `generate`, but read while it is sampled: `async with engine.stream(...) as stream`, then `async for`.

        An item holds a sample's new tokens, or with `output_kind="cumulative"` all it has so far.
        """
        refuse_unless("output_kind", output_kind, ("delta", "cumulative"))
        request = self._usable().intake.request(prompt, params, request_id, priority, cache_salt, token_mask)
        return RequestStream(
            [request],
            self._submit,
            self._withdraw,
            self._withdraw_soon,
            self._result,
            self._new_detokenizer,
            output_kind,
        )

    async def resume(
        self,
        output: RequestOutput,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        token_mask: TokenMaskSource | None = None,
    ) -> RequestOutput:
        """Go on with the aborted samples of `output` within what is left of their `max_tokens`, and return it whole.

        The draws are those that the samples would have had without the abort; under the same policy version so are all
        their numbers. `params` are for an `output` that does not hold them; others than it was made with are refused
        with `SamplingParamsError`. Samples that ended otherwise stay as they are.
        """
        intake, one = self._usable().intake, params_of(output, params)
        requests = []
        for sample in aborted(output):
            tokens = len(sample.token_ids)
            if tokens >= intake.reader.max_new_tokens(output.prompt_token_ids):
                raise PromptError(f"sample {sample.index} has {tokens} tokens, and there is no room for another one")
            own = attrs.evolve(one, seed=sample.seed)
            request = intake.request(output.prompt_token_ids, own, None, priority, cache_salt, token_mask)
            resume_sample(request, sample)
            requests.append(request)
        gathering = Gathering(requests)
        self._submit(requests)
        await self._finish(gathering)
        return resumed_output(output, self._results(requests))

    async def score(
        self,
        sequences: Iterable[tuple[Prompt, Sequence[int]]],
        params: SamplingParams | None = None,
        *,
        with_support: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[ScoreOutput]:
        """Both log-probabilities of given (prompt, response) pairs, in order, under the installed policy version: the
        bits that generating those tokens with `params` would have recorded (without a token mask).

        `with_support` records for each token which ids could have been sampled, for a trainer that renormalises after
        top-k or top-p. A response that an update overtakes is scored anew, so each is of one version; which, it says.
        Raises `PromptError` for what cannot be served and `RequestFailedError` for one that failed or was aborted.
        """
        requests = self._usable().intake.scores(
            sequences, params, with_support=with_support, priority=priority, cache_salt=cache_salt
        )
        gathering = Gathering(requests)
        self._submit(requests)
        await self._finish(gathering)
        return [score_output(request, self._opened().numerics) for request in requests]

    async def replay(self, outputs: Iterable[RequestOutput]) -> list[Replay]:
        """Compute every sample again from prompt, parameters and seed, without the engine's scheduler and cache, and
        compare the bits: a verdict on each, in order of outputs and samples.

        Only samples of the installed version can be replayed; no update replaces it meanwhile. Requests go on between
        the parts of a long replay. Waits while generation is paused or weights change; raises `EngineInvalidatedError`
        while the engine is fenced. `aengine audit` does the same for any version that was kept.
        """
        auditor = self._usable().auditor
        records = [record for output in outputs for record in records_of(output)]
        return await auditor.replay(records) if records else []

    async def abort(self, request_id: str) -> None:
        """End a request with what it has and reason `"abort"`; an unknown or finished id is ignored."""
        self._usable().scheduler.abort(request_id)
        await anyio.lowlevel.checkpoint()

    # ---- requests

    async def _finish(self, gathering: Gathering, on_finished: Callable[[RequestOutput], None] | None = None) -> None:
        """Wait until all have ended; a cancellation aborts those that have not."""
        try:
            while (index := await gathering.next()) is not None:
                request = gathering.requests[index]
                if on_finished is not None and request.error is None:
                    on_finished(self._result(request))
        except BaseException:
            self._withdraw(gathering.alive())
            raise

    def _results(self, requests: Sequence[Request]) -> list[RequestOutput]:
        outputs = [self._output(request) for request in requests]
        failed = next((request for request in requests if request.error is not None), None)
        if failed is not None:
            raise RequestFailedError(failed.request_id, str(failed.error), outputs) from failed.error
        return outputs

    def _submit(self, requests: Sequence[Request]) -> None:
        scheduler = self._usable().scheduler
        submit_all(requests, scheduler.submit, scheduler.withdraw)

    def _withdraw(self, requests: Iterable[Request]) -> None:
        """Abort those of these requests that are alive."""
        for request in requests:
            self._opened().scheduler.withdraw(request)

    def _withdraw_soon(self, requests: Iterable[Request]) -> None:
        """For finalizers, which run in any thread and at any moment."""
        assert self._token is not None
        call_soon(self._token, partial(self._withdraw, requests))

    def _result(self, request: Request) -> RequestOutput:
        return self._results([request])[0]

    def _output(self, request: Request) -> RequestOutput:
        decode = None if self.tokenizer is None else partial(decode_all, self.tokenizer)
        return request.output(decode, self._opened().numerics)

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self.tokenizer is None else Detokenizer(self.tokenizer)
