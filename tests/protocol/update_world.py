"""The update protocol, small and whole: the real gate, updater, transaction, scheduler, planner and cache between
two requests, two updates and a model that writes down in every slot of KV what was computed there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import Factory, define, field, frozen
from step_kernel import Cancelled, CancelScope, Event, Job, Kernel, Task

from aengine.cache.manager import TaskCacheManager
from aengine.errors import EngineError, LedgerError, StaleVersionError, WeightsMismatchError, WeightUpdateError
from aengine.model.inputs import ForwardInputs
from aengine.params import SamplingParams
from aengine.plan import Planner
from aengine.policy.gate import PolicyGate
from aengine.policy.lease import StableLease
from aengine.policy.ledger_history import History
from aengine.policy.ledger_records import CommitRecord, OpenRecord, Record
from aengine.policy.ledger_rules import follow
from aengine.policy.pending import PendingUpdate
from aengine.policy.roles import StagedWeights
from aengine.policy.update import Transaction
from aengine.policy.updater import WeightUpdater
from aengine.policy.version import PolicyVersion
from aengine.request import Request, Sample
from aengine.sampling.sampler import Draw, Drawn
from aengine.sampling.stop import StopRule
from aengine.scheduler import Scheduler
from aengine.signal import Signal
from aengine.worker import Outcome
from statemachines.policy import INITIAL, PolicyMachine, PolicyState
from statemachines.request import RequestState

__all__ = ["FATES", "Scope", "UpdateWorld", "on_step_kernel"]

PAGE = 2
PROMPT = (1, 2, 3)
MAX_TOKENS = 2
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
FATES = ("good", "refused", "flip fails", "record fails", "in place", "torn")
"""What becomes of an update if it is left alone."""
OUTCOMES = {"good": "committed", "in place": "committed", "torn": "fenced"}
"""The other fates leave everything untouched."""


@frozen
class Scope:
    """What may happen in one world: an update by its mode and fate, and the events that may come at any time."""

    updates: tuple[tuple[str, str], ...] = ()
    """(mode, fate); the modes `"keep"` and `"keep kv"` are the two ways to carry requests over."""
    events: tuple[str, ...] = ()
    """Of `"cancel update 1"`, `"cancel update 2"`, `"pause wait"`, `"pause abort"`, `"pause keep"`, `"cancel pause"`,
    `"resume"`, `"abort 1"`, `"abort 2"`, `"reset"`; each comes at most once."""
    requests: int = 2


@define(eq=False)
class Model:
    """Holds the weights, which are a name, and the KV they make: what lies in a slot says which weights computed it
    and for which tokens. A sampled token says which weights it is of: 10 for the first, then 11, …"""

    kernel: Kernel
    installed: StagedWeights = Factory(lambda: StagedWeights("weights 0", "weights 0"))
    kv: dict[int, tuple[str, tuple[int, ...]]] = Factory(dict)
    cannot_flip_to: set[str] = Factory(set)
    is_torn: bool = False
    on_step: Callable[[], None] = field(default=lambda: None)

    def step(
        self, inputs: ForwardInputs, copies: Sequence[tuple[int, int]], rows: Sequence[int], draws: Sequence[Draw]
    ) -> list[Drawn]:
        self.on_step()
        for source, dest in copies:
            for offset in range(PAGE):
                if source * PAGE + offset in self.kv:
                    self.kv[dest * PAGE + offset] = self.kv[source * PAGE + offset]
        each = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.sequences.tolist(), strict=True)
        for token, position, sequence in each:
            slots = [int(page) * PAGE + offset for page in inputs.page_tables[sequence] for offset in range(PAGE)]
            before = self.kv[slots[position - 1]][1] if position else ()
            for at in range(position):
                assert self.kv[slots[at]][1] == before[: at + 1], "a row attends to the KV of other tokens"
            self.kv[slots[position]] = (self.installed.weights, (*before, token))
        token = 10 + int(self.installed.weights.split()[1])
        return [Drawn(token, -1.0, -1.0) for _ in draws]

    # ---- as a holder of weights

    def stage(self, tensors: Any, *, check_finite: bool) -> StagedWeights:
        if "bad" in tensors:
            raise WeightsMismatchError(unexpected=["bad"])
        (name,) = tensors
        return StagedWeights(name, name)

    def check(self, tensors: Any) -> Any:
        return tensors

    def flip(self, staged: StagedWeights) -> StagedWeights:
        if staged.weights in self.cannot_flip_to:
            raise RuntimeError("the device is lost")
        previous, self.installed = self.installed, staged
        return previous

    def open_writer(self) -> Model:
        return self

    def write(self, name: str, tensor: Any) -> None:
        self.installed, self.is_torn = StagedWeights("torn 99", "torn 99"), True
        if name == "bad":
            raise WeightsMismatchError(unexpected=["bad"])
        self.written = name

    def finish(self, *, check_finite: bool) -> str:
        self.installed, self.is_torn = StagedWeights(self.written, self.written), False
        return self.written

    written: str = ""


@define(eq=False)
class KernelWorker:
    kernel: Kernel
    name: str

    async def run(self, call: Callable[[], Any]) -> Any:
        job = await self.kernel.do(Job(self.name, call))
        if job.error is not None:
            raise job.error
        return job.result


@define(eq=False)
class CheckedJournal:
    """Feeds every record to the rules of the offline check as it is written."""

    kernel: Kernel
    history: History = Factory(History)
    num_lines: int = 0
    failing: set[int] = Factory(set)
    """Updates whose commit record does not get to the disk."""
    last: Record | None = None
    is_over: bool = False
    """The world is not used any more; what its coroutines write when they are closed says nothing."""

    def append(self, record: Record) -> int:
        self.num_lines += 1
        self.last = record
        broken = [] if self.is_over else follow(self.history, self.num_lines, record)
        assert not broken, f"{record}: {broken}"
        return self.num_lines

    async def ready(self) -> None:
        """The ledger can be written."""

    async def durable(self) -> Outcome[None]:
        job = await self.kernel.do(Job("ledger", lambda: self._sync(self.last)))
        return Outcome(None, job.error, None)

    def _sync(self, record: Record | None) -> None:
        if isinstance(record, CommitRecord) and record.update in self.failing:
            raise LedgerError(Path("run.ledger"), "no space left")


class Tensors:
    """A stream of two tensors, each of which arrives in its own time."""

    def __init__(self, kernel: Kernel, names: Sequence[str]) -> None:
        self._kernel, self._names = kernel, list(names)

    def __aiter__(self) -> Tensors:
        return self

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        if not self._names:
            raise StopAsyncIteration
        await self._kernel.do(Job("tensor", lambda: None, cancellable=True))
        return self._names.pop(0), NOTHING


NOTHING = torch.zeros(0)


@contextmanager
def on_step_kernel(patch: pytest.MonkeyPatch, kernel: Callable[[], Kernel]) -> Iterator[None]:
    """Let the code under test wait on the kernel instead of on an event loop."""

    async def run_sync(call: Callable[[], Any], **_: Any) -> Any:
        now = kernel()
        assert now.current is not None
        if now.current.is_cancelled:
            raise Cancelled
        if not isinstance(call, partial):
            return call()  # letting go of memory, which nobody waits for
        return await KernelWorker(now, "stage").run(call)

    async def checkpoint_if_cancelled() -> None:
        current = kernel().current
        if current is not None and current.is_cancelled:
            raise Cancelled

    lowlevel = SimpleNamespace(checkpoint_if_cancelled=checkpoint_if_cancelled)
    fake = SimpleNamespace(Event=Event, to_thread=SimpleNamespace(run_sync=run_sync), lowlevel=lowlevel)
    machine = PolicyMachine()

    def new_machine() -> PolicyMachine:
        """The same one again as it was when new: making one takes longer than all the rest of a world."""
        machine.__dict__.update(_state=INITIAL, _entered_swapping_from=None, _weights_known=True)
        return machine

    patch.setattr("aengine.policy.gate.PolicyMachine", new_machine)
    patch.setattr("aengine.signal.anyio", fake)
    patch.setattr("aengine.policy.update.anyio", fake)
    patch.setattr("aengine.policy.updater.anyio", fake, raising=False)
    yield


@define(eq=False)
class Call:
    """An update that was asked for, and what must become of it."""

    mode: str
    fate: str
    update: PendingUpdate
    task: Task
    cancelled_in: str | None = None

    @property
    def outcome(self) -> str | None:
        """What its caller was told, or would have been."""
        if self.update.ack is not None:
            return "committed"
        if self.update.error is not None:
            error = self.update.error
            assert isinstance(error, WeightUpdateError | StaleVersionError)
            is_fenced = isinstance(error, WeightUpdateError) and error.engine_state == PolicyState.INVALIDATED.value
            return "fenced" if is_fenced and error.stage in ("swap", "commit") else "untouched"
        return None


class UpdateWorld:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.kernel = kernel = Kernel()
        self.changed = Signal()
        self.gate = PolicyGate(PolicyVersion(0, "weights 0"), self.changed)
        self.journal = CheckedJournal(kernel)
        self.journal.append(OpenRecord(run_id="run", version=0, digest="weights 0"))
        self.gate.on_transition(self.journal.append)
        self.gate.on_transition(self._note_version)
        self.model = Model(kernel)
        self.model.on_step = self._check_step
        self.cache = TaskCacheManager(num_pages=6, page_size=PAGE, max_num_seqs=2, max_model_len=6)
        self.planner = Planner(self.cache, max_num_seqs=2, max_num_batched_tokens=8)
        worker: Any = KernelWorker(kernel, "step")
        runner: Any = self.model
        self.scheduler = Scheduler(
            self.gate,
            self.cache,
            self.planner,
            runner,
            worker,
            self.changed,
            refuse_when_full=False,
            check_integrity=False,
        )
        journal: Any = self.journal
        writer: Any = KernelWorker(kernel, "write")
        nowhere: Any = None
        self.updater = WeightUpdater(
            Transaction(self.gate, self.model, self.scheduler, self._invalidate, journal, writer, stager=nowhere)
        )
        self.digests = {0: "weights 0"}
        self.calls: list[Call] = []
        self.requests: list[Request] = []
        self.done: set[str] = set()
        self.pausing: Task | None = None
        self._loops = [kernel.spawn("scheduler", self.scheduler.run()), kernel.spawn("updater", self.updater.run())]
        self.submit()

    def close(self) -> None:
        self.journal.is_over = True
        self.kernel.close()

    def _invalidate(self, lease: StableLease, end_ownership: bool) -> int:
        return self.cache.invalidate_cache(lease, end_ownership=end_ownership)

    def _note_version(self, _: object) -> None:
        version = self.gate.version
        if version is not None:
            assert self.digests.setdefault(version.number, version.digest) == version.digest

    # ---- what may happen

    def actions(self) -> dict[str, Callable[[], None]]:
        """Callers that can go on have done so already: they only take what they are handed, so when does not matter."""
        found: dict[str, Callable[[], None]] = {}
        for task in self._loops:
            if task.can_go_on:
                found[f"{task.name} goes on"] = lambda task=task: self.kernel.step(task)  # type: ignore[misc]
        for job in self.kernel.jobs:
            if not job.is_over:
                found[f"{job.name} ends"] = job.finish
        if len(self.requests) < self.scope.requests:
            found["request arrives"] = self.submit
        if len(self.calls) < len(self.scope.updates):
            found["update is called"] = self.call
        for event in self.scope.events:
            if event not in self.done and self._is_possible(event):
                found[event] = lambda event=event: self._happen(event)  # type: ignore[misc]
        return found

    def _is_possible(self, event: str) -> bool:
        what, _, which = event.partition(" ")
        if event.startswith("cancel update"):
            number = int(event[-1])
            return len(self.calls) >= number and not self.calls[number - 1].task.is_done
        if what == "abort":
            return len(self.requests) >= int(which) and not self.requests[int(which) - 1].is_finished
        if event == "cancel pause":
            return self.pausing is not None and not self.pausing.is_done
        return event != "resume" or self.pausing is not None

    def _happen(self, event: str) -> None:
        self.done.add(event)
        what, _, which = event.partition(" ")
        if event.startswith("cancel update"):
            self._cancel(self.calls[int(event[-1]) - 1])
        elif what == "pause":
            self.pausing = self.kernel.spawn("pause", self._pause(which))
        elif event == "cancel pause":
            assert self.pausing is not None
            self.pausing.scopes[0].cancel()
        elif what == "abort":
            self.scheduler.abort(f"request-{which}")
        elif what == "resume":
            self.gate.lift("resume")
        else:
            lease = self.gate.try_invalidation_lease()
            if lease is not None:
                with lease:
                    self.cache.invalidate_cache(lease)

    async def _pause(self, mode: Any) -> None:
        """As `Engine.pause_generation`."""
        hold = self.scheduler.hold_condition(mode)
        self.gate.hold(hold, f"pause, mode {mode}")
        if mode == "abort":
            self.scheduler.abort_started()
        try:
            await self.gate.held()
        except BaseException:
            self.gate.withdraw_hold(hold, "pause withdrawn")
            raise

    def submit(self) -> None:
        params = PARAMS
        name = f"request-{len(self.requests) + 1}"
        request = Request(name, PROMPT, params, StopRule.of(params, (), MAX_TOKENS), seed=1)
        self.requests.append(request)
        try:
            self.scheduler.submit(request)
        except EngineError as error:
            assert self.gate.fence is not None
            request.error = error

    def call(self, mode: str | None = None, fate: str | None = None) -> Call:
        number = len(self.calls) + 1
        if mode is None or fate is None:
            mode, fate = self.scope.updates[number - 1]
        name = f"weights {number}"
        update = PendingUpdate(
            self._source(name, fate),
            mode=mode.removesuffix(" kv"),  # type: ignore[arg-type]
            kv="keep" if mode == "keep kv" else "recompute",
            in_place=fate in ("in place", "torn"),
            scope=CancelScope(self.kernel),  # type: ignore[arg-type]
        )
        if fate == "record fails":
            self.journal.failing.add(number)
        task = self.kernel.spawn(f"caller {number}", self.updater.submit(update))
        call = Call(mode, fate, update, task)
        self.calls.append(call)
        return call

    def _source(self, name: str, fate: str) -> Any:
        if fate == "in place":
            return Tensors(self.kernel, [name, name])
        if fate == "torn":
            return Tensors(self.kernel, [name, "bad"])
        if fate == "flip fails":
            self.model.cannot_flip_to.add(name)
        return {name: NOTHING} | ({"bad": NOTHING} if fate == "refused" else {})

    def _cancel(self, call: Call) -> None:
        if call.update.is_settled:
            call.cancelled_in = "the end"
        else:
            call.cancelled_in = call.update.stage if call.update.number is not None else "queue"
        call.task.scopes[0].cancel()

    # ---- what decides what may happen next

    def state(self) -> Hashable:
        allocator = self.cache._strategy.allocator  # type: ignore[attr-defined]
        history = self.journal.history
        return (
            tuple(task.place() for task in self.kernel.tasks),
            tuple(job.name for job in self.kernel.jobs if not job.is_over),
            (self.gate.state, self.gate.last_number, self.gate.fence is None, self.gate.is_held),
            (self.gate._is_updating, len(self.gate._leases), self.gate._drain_done is self.gate._hold),
            (self.gate._drain_done(), self.model.installed.weights, self.cache.epoch),
            tuple((c.update.stage, c.update.withdrawn, c.outcome, c.cancelled_in) for c in self.calls),
            tuple(self._request_state(request) for request in self.requests),
            tuple(sample.task_id for sample in (*self.planner._to_free, *self.planner._to_recompute)),
            (tuple(allocator.reusable()), tuple(allocator.stale()), tuple(allocator.unindexed())),
            (history.pending, history.installed, history.update and (history.update.ordinal, history.update.stage)),
            frozenset(self.done),
        )

    def _request_state(self, request: Request) -> Hashable:
        sample = request.leader
        pages = None if sample.cache is None else (tuple(sample.cache.pages), sample.cache.publishable)
        return (
            sample.state,
            tuple(sample.tokens),
            sample.num_computed,
            pages,
            sample.finish_reason,
            request.is_started,
        )

    # ---- what must hold

    def _check_step(self) -> None:
        """A forward pass runs on the very weights that the installed version names."""
        assert self.gate.state in (PolicyState.SERVING, PolicyState.DRAINING)
        assert self.gate.version is not None
        assert self.model.installed.weights == self.gate.version.digest

    def settle(self) -> None:
        """After any event: callers go on as far as they can."""
        while waiting := [task for task in self.kernel.tasks[len(self._loops) :] if task.can_go_on]:
            self.kernel.step(waiting[0])

    def check(self) -> None:
        self.cache.check_integrity()
        self._check_version()
        for loop in self._loops:
            assert loop.error is None, repr(loop.error)
        for call in self.calls:
            self._check_call(call)
        for request in self.requests:
            self._check_sample(request.leader)

    def _check_version(self) -> None:
        """Published is what the ledger has as committed, it only grows, and the weights are those it names."""
        version, history = self.gate.version, self.journal.history
        assert history.installed == (None if version is None else version.number)
        if version is not None:
            assert version.number == max(self.digests)
            if self.gate.state is not PolicyState.SWAPPING:
                assert self.model.installed.weights == version.digest
        assert not (self.gate.is_held and self.gate.state is PolicyState.SERVING), "a pause was forgotten"
        assert (self.gate.fence is not None) <= (self.gate.state in (PolicyState.INVALIDATED, PolicyState.SWAPPING))

    def _check_call(self, call: Call) -> None:
        """The outcome is the one the rules name, and what is true is what its caller is told."""
        outcome = call.outcome
        if outcome is None:
            return
        assert outcome in self._lawful_outcomes(call), (call.mode, call.fate, call.cancelled_in, call.update.error)
        if outcome == "committed":
            assert call.update.number in self.digests
        else:
            assert f"weights {call.update.ordinal}" not in self.digests.values()
        if call.task.is_done and call.cancelled_in is None:
            assert (call.task.error is None) == (outcome == "committed")

    def _lawful_outcomes(self, call: Call) -> tuple[str, ...]:
        """Cancelled before its flip an update is untouched; in place and writing, torn or completed; else its fate."""
        own = OUTCOMES.get(call.fate, "untouched")
        if call.fate in ("record fails", "flip fails") and call.update.ordinal in self.recoveries:
            own = "fenced"  # there was no version to go back to
        if call.cancelled_in in ("queue", "stage", "drain"):
            return ("untouched",)
        if call.cancelled_in == "swap" and call.update.in_place:
            return ("fenced", own)
        return (own,)

    @property
    def recoveries(self) -> set[int]:
        """Updates that came to their swap when the engine was fenced."""
        return {
            call.update.ordinal
            for call in self.calls
            if any(other.outcome == "fenced" and other.update.ordinal < call.update.ordinal for other in self.calls)
        }

    def _check_sample(self, sample: Sample) -> None:
        """Labels against what was really computed."""
        provenance = sample.provenance
        for span in provenance.version_spans():
            made = sample.output_ids[span.start : span.end]
            assert made == [10 + int(self.digests[span.version].split()[1])] * len(made), (
                "a token under another version"
            )
        if not self._keeps_kv():
            spans = {(span.version, token) for span in provenance.kv_spans() for token in range(*self._tokens(span))}
            assert all(sample_version(sample, token) == version for version, token in spans), "KV of another version"
        if sample.cache is None or sample.state is not RequestState.RUNNING:
            return
        for stretch in provenance._context:
            for position in range(stretch.start, min(stretch.end, sample.num_computed)):
                slot = sample.cache.pages[position // PAGE] * PAGE + position % PAGE
                expected = (self.digests[stretch.version], tuple(sample.tokens[: position + 1]))
                assert self.model.kv[slot] == expected, "KV is not what its label says"

    @staticmethod
    def _tokens(span: Any) -> tuple[int, int]:
        return span.first_token, span.last_token

    def _keeps_kv(self) -> bool:
        return any(call.mode == "keep kv" for call in self.calls)

    def check_end(self) -> None:
        """Nothing more happens by itself: everybody has been answered, or waits for a pause to end; and from here
        the engine can be made to work again."""
        for call in self.calls:
            assert call.task.is_done, f"{call.task.name} waits for ever"
        assert self.pausing is None or self.pausing.is_done, "a pause waits for ever"
        if not self.gate.is_held:
            self._check_answered()
        self.gate.lift("resume")
        self._run_on()
        self._check_answered()
        self._recover()

    def _check_answered(self) -> None:
        for request in self.requests:
            assert request.is_finished or request.error is not None, f"{request.request_id} waits for ever"
        assert self.gate.state is (PolicyState.SERVING if self.gate.fence is None else PolicyState.INVALIDATED)
        assert self.cache.stats().pages.live == 0
        assert not self.planner.num_waiting + self.planner.num_running

    def _recover(self) -> None:
        """The next good update commits, and the next request runs under it."""
        call = self.call("wait", "good")
        self.settle()
        self._run_on()
        assert call.outcome == "committed" and self.gate.version == PolicyVersion(
            max(self.digests), call.update.ack.digest
        )  # type: ignore[union-attr]
        self.submit()
        self._run_on()
        last = self.requests[-1].leader
        assert last.finish_reason == "length"
        assert {span.version for span in last.provenance.version_spans()} == {call.update.number}
        self._check_answered()

    def _run_on(self) -> None:
        """Let happen what happens by itself."""
        by_themselves = (" goes on", " ends")
        while names := [name for name in self.actions() if name.endswith(by_themselves)]:
            self.actions()[names[0]]()
            self.settle()
            self.check()


def sample_version(sample: Sample, token: int) -> int:
    return next(s.version for s in sample.provenance.version_spans() if s.start <= token < s.end)
