"""The front door: `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import anyio
import anyio.lowlevel
import attrs
from torch import nn

from aengine.assembly import Assembly, assemble
from aengine.completed import CompletedOutputs, Gathering, submit_all
from aengine.config import EngineConfig
from aengine.errors import (
    EngineClosedError,
    InsideWeightUpdateError,
    PromptError,
    RequestFailedError,
    TokenizerMissingError,
)
from aengine.events import EventStream
from aengine.loops import call_soon
from aengine.model.checkpoint import Checkpoint, checkpoint_from_module, load_checkpoint
from aengine.model.known import KNOWN_MODELS, get_model
from aengine.model.tokenizer import Tokenizer
from aengine.outputs import RequestOutput
from aengine.params import SamplingParams
from aengine.policy.in_place import InPlaceUpdate
from aengine.policy.ledger_records import InvalidationRecord
from aengine.policy.pending import PendingUpdate, WeightUpdateAck
from aengine.policy.roles import KVOnUpdate, UpdateMode
from aengine.policy.source import WeightSource, read_source
from aengine.policy.version import PolicyVersion
from aengine.prompts import Prompt
from aengine.request import Request
from aengine.resume import aborted, params_of, resume_sample, resumed_output
from aengine.sampling.mask import TokenMaskSource
from aengine.sampling.random import derive_seed
from aengine.sampling.stop import StopRule
from aengine.sampling.text import Detokenizer, decode_all
from aengine.scoring import ScoreOutput, score_output, scoring_request
from aengine.stats import EngineStats
from aengine.stream import OutputKind, RequestStream
from aengine.supervision import supervise
from statemachines.policy import PolicyState

__all__ = ["Engine"]


class Engine:
    """An LLM rollout engine inside this process. Open it with `async with`; one event loop at a time owns it.

    `model` is a `Checkpoint` (see `load_checkpoint`) or a `transformers` causal LM of a supported architecture, whose
    weights are copied. Weights are built when the engine is opened.

    With `share=True` nothing is copied: the engine computes with the module's own float32 parameters, which may then be
    changed in `weight_update()` bodies only. That is slower, since weights are neither fused nor packed.
    """

    def __init__(
        self, model: Checkpoint | nn.Module, config: EngineConfig | None = None, *, share: bool = False
    ) -> None:
        if share and isinstance(model, Checkpoint):
            raise TypeError("share=True needs the module whose parameters are shared, not a checkpoint")
        self._share = share
        self._inside_updates: set[int] = set()
        self._checkpoint = model if isinstance(model, Checkpoint) else checkpoint_from_module(model)
        self._config = config if config is not None else EngineConfig()
        self._parts: Assembly | None = None
        self._token: anyio.lowlevel.EventLoopToken | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._loops: anyio.CancelScope | None = None
        self._stopped: anyio.Event | None = None
        self._is_closed = False
        self._num_requests = self._num_scores = 0

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

    # ---- life cycle

    async def __aenter__(self) -> Engine:
        if self._is_closed or self._parts is not None:
            raise EngineClosedError("an engine is opened once; make a new one")
        self._token = anyio.lowlevel.current_token()
        # A cancellation around the block reaches its callers; the loops serve what they shield until `aclose`.
        self._stopped, self._loops = anyio.Event(), anyio.CancelScope(shield=True)
        self._parts = await assemble(self._checkpoint, self._config, share=self._share)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run_loops, self._parts)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._parts is not None
        assert self._tasks is not None
        try:
            await self.aclose()
        finally:
            try:
                # The loops have ended; the body's own exception is not the group's business and comes out as it is.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._parts.close()

    async def aclose(self) -> None:
        """Stop: running and waiting requests end with reason `"abort"`, updates not yet flipped are withdrawn.

        Idempotent. Returns when the loops have ended, also when it is cancelled.
        """
        if self._parts is None or self._stopped is None or self._loops is None:
            self._is_closed = True
            return
        if not self._is_closed:
            self._is_closed = True
            self._parts.scheduler.abort_all()
            self._parts.updater.withdraw_all(EngineClosedError("the engine was closed"))
            self._parts.gate.stop(EngineClosedError("the engine was closed"))
            self._loops.cancel()
        with anyio.CancelScope(shield=True):
            await self._stopped.wait()

    async def _run_loops(self, parts: Assembly) -> None:
        assert self._stopped is not None
        assert self._loops is not None
        try:
            with self._loops:
                async with anyio.create_task_group() as loops:
                    loops.start_soon(supervise, parts, "scheduler", parts.scheduler.run)
                    loops.start_soon(supervise, parts, "updater", parts.updater.run)
        finally:
            parts.journal.events.close()
            self._stopped.set()

    # ---- rollouts

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
        gathering = Gathering([self._new_request(prompt, params, request_id, priority, cache_salt, token_mask)])
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
        gathering = Gathering(self._new_requests(prompts, params))
        self._submit(gathering.requests)
        await self._finish(gathering, on_finished)
        return self._results(gathering.requests)

    def as_completed(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> CompletedOutputs:
        """`async with engine.as_completed(prompts) as done`, then `async for index, output in done`: results as they
        come, each with the index of its prompt. Arguments as for `generate_batch`, checked at once."""
        requests = self._new_requests(prompts, params)
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
        _refuse_unless("output_kind", output_kind, ("delta", "cumulative"))
        request = self._new_request(prompt, params, request_id, priority, cache_salt, token_mask)
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
        their numbers. `params` defaults to those in `output`. Samples that ended otherwise stay as they are.
        """
        reader, one = self._usable().reader, params_of(output, params)
        requests = []
        for sample in aborted(output):
            tokens = len(sample.token_ids)
            if tokens >= reader.max_new_tokens(output.prompt_token_ids):
                raise PromptError(f"sample {sample.index} has {tokens} tokens, and there is no room for another one")
            own = attrs.evolve(one, seed=sample.seed)
            request = self._new_request(output.prompt_token_ids, own, None, priority, cache_salt, token_mask)
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
        reader, params = self._usable().reader, params if params is not None else SamplingParams()
        params.check_vocabulary(reader.vocab_size)
        requests = []
        for prompt, response in sequences:
            prompt_token_ids = reader.read(prompt)
            self._num_scores += 1
            requests.append(
                scoring_request(
                    self._new_id(f"score-{self._num_scores}"),
                    prompt_token_ids,
                    reader.read_response(prompt_token_ids, response),
                    params,
                    with_support=with_support,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
        gathering = Gathering(requests)
        self._submit(requests)
        await self._finish(gathering)
        return [score_output(request) for request in requests]

    async def abort(self, request_id: str) -> None:
        """End a request with what it has and reason `"abort"`; an unknown or finished id is ignored."""
        self._usable().scheduler.abort(request_id)
        await anyio.lowlevel.checkpoint()

    # ---- weights

    async def update_weights(
        self,
        source: WeightSource,
        *,
        version: int | None = None,
        expected_version: int | None = None,
        train_step: int | None = None,
        mode: UpdateMode = "wait",
        kv: KVOnUpdate = "recompute",
        check_finite: bool = True,
        timeout: float | None = None,
    ) -> WeightUpdateAck:
        """Install new weights as one transaction; returns when they are installed and no older KV can be matched.

        `source` is a state dict, a module, a checkpoint, a safetensors file or directory, or an async iterator of
        (name, tensor), with the checkpoint's names; it is read until the tensors are copied, so do not change it
        before this returns. Requests that have started

        * finish under the old version first (`mode="wait"`),
        * end with what they have and reason `"abort"` (`"abort"`), or
        * stop at a token and go on under the new version (`"keep"`), their KV computed again or, with `kv="keep"`,
          kept on purpose: then their later tokens attend to KV of the old version, and their `kv_spans` say so.

        Requests still waiting run under the new version in any mode. `version` defaults to the next number. Updates
        run one at a time, in order of arrival; `version` and `expected_version` are compared when the turn comes.

        Raises `StaleVersionError` or `WeightUpdateError`; then version, weights and cache are as before, unless
        `EngineConfig.staging` is `"none"` and the update failed while it wrote: then the engine is fenced. `timeout`,
        in seconds, raises `TimeoutError`; like a cancellation it withdraws an update that has not come to its swap.
        """
        _refuse_unless("mode", mode, ("wait", "abort", "keep"))
        _refuse_unless("kv", kv, ("recompute", "keep"))
        if self._share:
            raise ValueError("this engine shares its parameters with a module; change them in weight_update()")
        update = PendingUpdate(
            read_source(source),
            version,
            expected_version,
            train_step,
            mode,
            kv,
            in_place=self._config.staging == "none",
            check_finite=check_finite,
        )
        parts = self._usable()
        with anyio.fail_after(timeout):
            return await parts.updater.submit(update)

    def weight_update(
        self,
        *,
        train_step: int | Callable[[], int] | None = None,
        mode: UpdateMode = "wait",
        kv: KVOnUpdate = "recompute",
    ) -> InPlaceUpdate:
        """For an engine with `share=True`: `async with engine.weight_update(): optimizer.step()`.

        Entering drains by `mode` as `update_weights` does and returns when nothing reads the weights any more; leaving
        commits what the body wrote as the next version. `train_step`, or what it returns when called after the body,
        goes into the version. See `InPlaceUpdate` for steps that change nothing and bodies that raise.
        """
        _refuse_unless("mode", mode, ("wait", "abort", "keep"))
        _refuse_unless("kv", kv, ("recompute", "keep"))
        if not self._share:
            raise ValueError("weight_update() is for an engine with share=True; use update_weights()")
        read_step = train_step if callable(train_step) else lambda: train_step
        update = PendingUpdate.in_body(read_step, mode, kv)
        assert update.body is not None
        return InPlaceUpdate(self._usable().updater, update, update.body, self._inside_updates)

    async def pause_generation(self, mode: UpdateMode = "wait") -> None:
        """Hold all generation; returns when that is so. Requests that have started finish first (`"wait"`), end with
        what they have (`"abort"`), or stop at a token and go on where they were when generation resumes (`"keep"`).

        Requests may still be submitted; they wait. An update under a pause finds nothing to wait for, and leaves the
        pause in place. Cancelling this lifts the pause.
        """
        _refuse_unless("mode", mode, ("wait", "abort", "keep"))
        parts = self._usable()
        parts.gate.hold(parts.scheduler.hold_condition(mode), f"pause, mode {mode}")
        if mode == "abort":
            parts.scheduler.abort_started()
        try:
            await parts.gate.held()
        except BaseException:
            parts.gate.lift("pause withdrawn")
            raise

    async def resume_generation(self) -> None:
        """End a pause; without one, do nothing."""
        self._usable().gate.lift("resume")
        await anyio.lowlevel.checkpoint()

    def is_paused(self) -> bool:
        return self._opened().gate.is_held

    async def reset_prefix_cache(self) -> int:
        """Make all cached prefixes unreachable, without an update; returns how many entries there were.

        Running requests keep their KV, which is of the installed version, but it is never matched by others. Waits
        while weights are being swapped.
        """
        while (lease := (parts := self._usable()).gate.try_invalidation_lease()) is None:
            await parts.gate.changed.wait()
        with lease:
            dropped = parts.cache.invalidate_cache(lease)
            parts.journal.append(InvalidationRecord(reason="reset_prefix_cache", entries=dropped, epoch=lease.epoch))
        await anyio.lowlevel.checkpoint()
        return dropped

    # ---- what it is doing

    @property
    def policy_version(self) -> int | None:
        """Number of the installed policy version; None while the engine is fenced."""
        version = self._opened().gate.version
        return None if version is None else version.number

    @property
    def installed_policy(self) -> PolicyVersion:
        """The installed policy version with its digest. Raises `EngineInvalidatedError` while the engine is fenced."""
        return self._opened().gate.installed()

    @property
    def state(self) -> PolicyState:
        return self._opened().gate.state

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._checkpoint.tokenizer

    async def weight_checksum(self) -> str:
        """The digest of the weights as they lie in memory now; equals `installed_policy.digest`."""
        parts = self._usable()
        return await parts.worker.run(parts.runner.digest)

    def events(self) -> EventStream:
        """Everything that happens to the policy from now on, as an async iterator that ends when the engine closes:
        transitions, updates, invalidations. Any number of readers may follow; none slows the engine."""
        return self._opened().journal.events.follow()

    def stats(self) -> EngineStats:
        return self._opened().stats()

    async def check_health(self) -> None:
        """Return if the engine can serve. Raises `EngineDeadError`, with the cause, if a loop of the engine has died,
        `EngineInvalidatedError` while it is fenced, and `EngineClosedError`."""
        self._usable().gate.installed()
        await anyio.lowlevel.checkpoint()

    # ---- helpers

    def _opened(self) -> Assembly:
        if self._parts is None:
            raise EngineClosedError("the engine is not open; open it with `async with`")
        return self._parts

    def _usable(self) -> Assembly:
        """The parts, for work in the loop that opened them."""
        parts = self._opened()
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if anyio.lowlevel.current_token() != self._token:
            raise EngineClosedError("the engine was opened in another event loop; use it there, or open one here")
        parts.scheduler.refuse_if_dead()
        if self._inside_updates and anyio.get_current_task().id in self._inside_updates:
            raise InsideWeightUpdateError("the engine cannot be used inside a weight_update() body; leave it first")
        return parts

    def _new_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        token_mask: TokenMaskSource | None = None,
    ) -> Request:
        reader = self._usable().reader
        params = params if params is not None else SamplingParams()
        params.check_vocabulary(reader.vocab_size)
        if params.stop and self.tokenizer is None:
            raise TokenizerMissingError(f"SamplingParams.stop = {params.stop!r} needs text, and there is no tokenizer")
        token_ids = reader.read(prompt)
        self._num_requests += 1
        seed = derive_seed(self._config.seed, self._num_requests) if params.seed is None else params.seed
        return Request(
            request_id=self._new_id(f"request-{self._num_requests}") if request_id is None else request_id,
            prompt_token_ids=token_ids,
            params=params,
            stop=StopRule.of(params, self._checkpoint.eos_token_ids, reader.max_new_tokens(token_ids)),
            seed=seed,
            priority=priority,
            cache_salt=cache_salt,
            decoder=self.tokenizer,
            token_mask=token_mask,
        )

    def _new_requests(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        prompts = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        return [self._new_request(*pair) for pair in zip(prompts, each, strict=True)]

    def _new_id(self, request_id: str) -> str:
        """An id that no caller has chosen for a request that is alive."""
        while self._opened().scheduler.is_alive(request_id):
            request_id += "+"
        return request_id

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
        return request.output(None if self.tokenizer is None else partial(decode_all, self.tokenizer))

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self.tokenizer is None else Detokenizer(self.tokenizer)


def _refuse_unless(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, choices))}")
