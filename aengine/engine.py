"""The front door: `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import anyio
import anyio.lowlevel
from torch import Tensor, nn

from aengine.assembly import Assembly, assemble
from aengine.config import EngineConfig
from aengine.errors import EngineClosedError, EngineError, RequestFailedError
from aengine.model.checkpoint import Checkpoint, checkpoint_from_module, load_checkpoint
from aengine.model.known import KNOWN_MODELS, get_model
from aengine.model.tokenizer import Tokenizer
from aengine.outputs import RequestOutput
from aengine.params import SamplingParams
from aengine.policy.source import read_source
from aengine.policy.update import WeightUpdate, WeightUpdateAck
from aengine.policy.version import PolicyVersion
from aengine.prompts import Prompt
from aengine.request import Request
from aengine.sampling.random import derive_seed
from aengine.sampling.stop import StopRule
from aengine.sampling.text import Detokenizer
from aengine.signal import Signal
from aengine.stats import EngineStats
from aengine.stream import RequestStream
from statemachines.policy import PolicyState

__all__ = ["Engine"]


class Engine:
    """An LLM rollout engine inside this process. Open it with `async with`; one event loop at a time owns it.

    `model` is a `Checkpoint` (see `load_checkpoint`) or a `transformers` causal LM of a supported architecture, whose
    weights are copied. Weights are built when the engine is opened.
    """

    def __init__(self, model: Checkpoint | nn.Module, config: EngineConfig | None = None) -> None:
        self._checkpoint = model if isinstance(model, Checkpoint) else checkpoint_from_module(model)
        self._config = config if config is not None else EngineConfig()
        self._parts: Assembly | None = None
        self._token: object = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._loops = anyio.CancelScope()
        self._stopped: anyio.Event | None = None
        self._is_closed = False
        self._num_requests = 0

    @classmethod
    def from_pretrained(cls, source: str | Path, config: EngineConfig | None = None) -> Engine:
        """An engine on a checkpoint directory, a GGUF file, a known small model or a Hub id.

        A known model that is not on this machine yet is fetched first. Raises `CheckpointError` or
        `ModelUnavailableError`.
        """
        if str(source) in KNOWN_MODELS and not Path(source).exists():
            get_model(str(source))
        return cls(load_checkpoint(source), config)

    # ---- life cycle

    async def __aenter__(self) -> Engine:
        if self._is_closed or self._parts is not None:
            raise EngineClosedError("an engine is opened once; make a new one")
        self._token = anyio.lowlevel.current_token()
        self._stopped = anyio.Event()
        self._parts = await assemble(self._checkpoint, self._config)
        self._parts.gate.on_transition(self._parts.scheduler.wake)
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
                self._parts.worker.close()

    async def aclose(self) -> None:
        """Stop: running and waiting requests end with reason `"abort"`, updates not yet flipped are withdrawn.

        Idempotent. Returns when the loops have ended, also when it is cancelled.
        """
        if self._parts is None or self._stopped is None:
            self._is_closed = True
            return
        if not self._is_closed:
            self._is_closed = True
            self._parts.scheduler.abort_all()
            self._parts.updater.withdraw_all(EngineClosedError("the engine was closed"))
            self._loops.cancel()
        with anyio.CancelScope(shield=True):
            await self._stopped.wait()

    async def _run_loops(self, parts: Assembly) -> None:
        assert self._stopped is not None
        try:
            with self._loops:
                async with anyio.create_task_group() as loops:
                    loops.start_soon(parts.scheduler.run)
                    loops.start_soon(parts.updater.run)
        finally:
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
    ) -> RequestOutput:
        """Sample `params.n` completions of a prompt (text or token ids) and return them when all have ended.

        A lower `priority` number is served earlier. Requests share KV only under the same `cache_salt`. Raises
        `PromptError` for a prompt that cannot be served, and `RequestFailedError` if the request failed on its way.
        Cancelling it aborts the request.
        """
        request = self._new_request(prompt, params, request_id, priority, cache_salt)
        self._usable().scheduler.submit(request)
        return (await self._finish([request]))[0]

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
        prompts = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        requests = [self._new_request(*pair) for pair in zip(prompts, each, strict=True)]
        scheduler = self._usable().scheduler
        try:
            for request in requests:
                scheduler.submit(request)
        except EngineError:
            self._abort(requests)
            raise
        return await self._finish(requests, on_finished)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """As `generate`, but read while it is sampled: `async with engine.stream(...) as stream`, then `async for`."""
        request = self._new_request(prompt, params, request_id, priority, cache_salt)
        scheduler = self._usable().scheduler
        return RequestStream(request, scheduler.submit, scheduler.abort, self._result, self._new_detokenizer)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has and reason `"abort"`; an unknown or finished id is ignored."""
        self._usable().scheduler.abort(request_id)
        await anyio.lowlevel.checkpoint()

    # ---- weights

    async def update_weights(
        self,
        source: Mapping[str, Tensor] | nn.Module,
        *,
        version: int | None = None,
        expected_version: int | None = None,
        train_step: int | None = None,
        mode: str = "wait",
    ) -> WeightUpdateAck:
        """Install new weights as one transaction; returns when they are installed and no older KV can be matched.

        `source` is a state dict or a module with the checkpoint's tensor names; it is read until the tensors are
        copied, so do not change it before this returns. Requests that have started finish under the old version first
        (`mode="wait"`); requests still waiting run under the new one. `version` defaults to the next number.

        Raises `StaleVersionError` or `WeightUpdateError`; then version, weights and cache are as before. Cancelled
        before the swap it withdraws the update.
        """
        if mode != "wait":
            raise ValueError(f"mode {mode!r} is unknown; the mode is 'wait'")
        update = WeightUpdate(read_source(source), version, expected_version, train_step, mode)
        return await self._usable().updater.submit(update)

    # ---- what it is doing

    @property
    def policy_version(self) -> int:
        """Number of the installed policy version."""
        return self.installed_policy.number

    @property
    def installed_policy(self) -> PolicyVersion:
        """The installed policy version with its digest."""
        return self._opened().gate.version

    @property
    def state(self) -> PolicyState:
        return self._opened().gate.state

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._checkpoint.tokenizer

    async def weight_checksum(self) -> str:
        """The digest of the weights as they lie in memory now; equals `installed_policy.digest`."""
        parts = self._usable()
        return await parts.worker.run(parts.runner.weight_checksum)

    def stats(self) -> EngineStats:
        return self._opened().stats()

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
        return parts

    def _new_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        reader = self._usable().reader
        params = params if params is not None else SamplingParams()
        token_ids = reader.read(prompt)
        self._num_requests += 1
        seed = derive_seed(self._config.seed, self._num_requests) if params.seed is None else params.seed
        return Request(
            request_id=request_id if request_id is not None else f"request-{self._num_requests}",
            prompt_token_ids=token_ids,
            params=params,
            stop=StopRule.of(params, self._checkpoint.eos_token_ids, reader.max_new_tokens(token_ids)),
            seed=seed,
            priority=priority,
            cache_salt=cache_salt,
        )

    async def _finish(
        self, requests: Sequence[Request], on_finished: Callable[[RequestOutput], None] | None = None
    ) -> list[RequestOutput]:
        """Wait until all have ended; a cancellation aborts those that have not."""
        progress = Signal()
        for request in requests:
            request.on_progress = progress.set
        alive = list(requests)
        try:
            while alive:
                for request in [request for request in alive if request.is_finished]:
                    alive.remove(request)
                    if on_finished is not None and request.error is None:
                        on_finished(self._result(request))
                if alive:
                    await progress.wait()
        except BaseException:
            self._abort(alive)
            raise
        return self._results(requests)

    def _results(self, requests: Sequence[Request]) -> list[RequestOutput]:
        outputs = [self._output(request) for request in requests]
        failed = next((request for request in requests if request.error is not None), None)
        if failed is not None:
            raise RequestFailedError(failed.request_id, str(failed.error), outputs) from failed.error
        return outputs

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._opened().scheduler.abort(request.request_id)

    def _result(self, request: Request) -> RequestOutput:
        return self._results([request])[0]

    def _output(self, request: Request) -> RequestOutput:
        return request.output(None if self.tokenizer is None else self.tokenizer.decode)

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self.tokenizer is None else Detokenizer(self.tokenizer.decode)
