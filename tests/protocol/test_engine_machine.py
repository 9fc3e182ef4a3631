"""Any sequence of calls of a real engine, against a model of what each may lead to."""

from __future__ import annotations

import functools
from typing import Any

import torch
from attrs import define
from engine_rig import WEIGHTS, Call, EngineRig, Tap, assert_true_to_label
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aengine import EngineClosedError, EngineInvalidatedError, RequestOutput, SamplingParams
from aengine.errors import EngineError, RequestFailedError, StaleVersionError, WeightUpdateError
from aengine.policy.pending import WeightUpdateAck
from statemachines.policy import PolicyState

PROMPTS = ([1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9], [20])
BAD = {
    "shape": WEIGHTS[1] | {"model.norm.weight": torch.ones(7)},
    "missing": dict(list(WEIGHTS[1].items())[1:]),
    "not finite": WEIGHTS[1] | {"model.norm.weight": torch.full((32,), torch.nan)},
}
EXPECTED = (EngineClosedError, EngineInvalidatedError, RequestFailedError, StaleVersionError, WeightUpdateError)
index = st.integers(0, 30)
modes = st.sampled_from(["wait", "abort", "keep"])


@functools.cache
def digests() -> dict[str, int]:
    """The digest of each set of weights."""
    rig = EngineRig()
    try:
        found = {rig.engine.installed_policy.digest: 0}
        for number in (1, 2, 3):
            found[rig.finish(rig.engine.update_weights(WEIGHTS[number])).digest] = number
        rig.leave()
        return found
    finally:
        rig.close()


@define(eq=False)
class Update:
    call: Call
    kind: str
    weights: int
    timed: bool


class EngineMachine(RuleBasedStateMachine):
    """Its state: which calls are under way, and what has been asked for. Whatever a call meets, it must end in one of
    the ways its contract names."""

    @initialize(staging=st.sampled_from(["copy", "copy", "none"]))
    def open(self, staging: str) -> None:
        digests()
        self.rig = EngineRig(staging=staging)
        self.engine, self.staging = self.rig.engine, staging
        self.requests: list[tuple[str, Call]] = []
        self.updates: list[Update] = []
        self.pauses: list[Call] = []
        self.taps: list[Tap] = []
        self.last_version, self.is_closed, self.keeps_kv = 0, False, False

    @precondition(lambda self: not self.is_closed)
    @rule(
        prompt=st.sampled_from(PROMPTS), n=st.sampled_from([1, 1, 3]), tokens=st.integers(1, 14), streamed=st.booleans()
    )
    def submit(self, prompt: list[int], n: int, tokens: int, streamed: bool) -> None:
        name = f"r{len(self.requests)}"
        params = SamplingParams(n=n, max_tokens=tokens)
        call = self._stream(name, prompt, params) if streamed else self.engine.generate(prompt, params, request_id=name)
        self.requests.append((name, self.rig.call(call)))

    async def _stream(self, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        async with self.engine.stream(prompt, params, request_id=name) as stream:
            async for _ in stream:
                pass
            return await stream.output()

    @precondition(lambda self: not self.is_closed)
    @rule(
        kind=st.sampled_from(["good", "good", "good", "shape", "missing", "not finite", "slow", "breaks", "stale"]),
        weights=st.integers(0, 3),
        mode=modes,
        kv=st.sampled_from(["recompute", "recompute", "recompute", "keep"]),
        timeout=st.sampled_from([None, None, None, 0]),
    )
    def update(self, kind: str, weights: int, mode: Any, kv: Any, timeout: float | None) -> None:
        source: Any = BAD.get(kind, WEIGHTS[weights])
        if kind in ("slow", "breaks"):
            tap = Tap(WEIGHTS[weights], breaks=kind == "breaks")
            self.taps.append(tap)
            source = tap.flow()
        version = 0 if kind == "stale" else None
        call = self.engine.update_weights(source, version=version, mode=mode, kv=kv, timeout=timeout)
        self.keeps_kv = self.keeps_kv or kv == "keep"
        self.updates.append(Update(self.rig.call(call), kind, weights, timeout is not None))

    @precondition(lambda self: not self.is_closed)
    @rule(
        mode=modes,
        kv=st.sampled_from(["recompute", "recompute", "keep"]),
        weights=st.integers(0, 3),
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3),
        turns=st.integers(2, 8),
    )
    def update_beside_requests(self, mode: Any, kv: Any, weights: int, prompts: list[list[int]], turns: int) -> None:
        for prompt in prompts:
            self.submit(prompt, 1, 14, False)
        self.rig.turn(turns)
        self.update("good", weights, mode, kv, None)

    @precondition(lambda self: not self.is_closed)
    @rule(mode=modes)
    def pause(self, mode: Any) -> None:
        self.pauses.append(self.rig.call(self.engine.pause_generation(mode)))

    @precondition(lambda self: not self.is_closed)
    @rule()
    def resume(self) -> None:
        self.rig.finish(self.engine.resume_generation())
        assert not self.engine.is_paused()

    @precondition(lambda self: not self.is_closed)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.rig.call(self.engine.reset_prefix_cache())

    @precondition(lambda self: self.requests and not self.is_closed)
    @rule(which=index)
    def abort(self, which: int) -> None:
        self.rig.finish(self.engine.abort(self.requests[which % len(self.requests)][0]))

    @precondition(lambda self: self.requests)
    @rule(which=index)
    def cancel_request(self, which: int) -> None:
        self.requests[which % len(self.requests)][1].cancel()

    @precondition(lambda self: self.updates)
    @rule(which=index)
    def cancel_update(self, which: int) -> None:
        self.updates[which % len(self.updates)].call.cancel()

    @precondition(lambda self: self.pauses)
    @rule(which=index)
    def cancel_pause(self, which: int) -> None:
        self.pauses[which % len(self.pauses)].cancel()

    @precondition(lambda self: self.taps)
    @rule(which=index)
    def open_tap(self, which: int) -> None:
        self.taps[which % len(self.taps)].opened.set()

    @rule(turns=st.sampled_from([1, 2, 3, 5, 20]))
    def go_on(self, turns: int) -> None:
        self.rig.turn(turns)

    @precondition(lambda self: not self.is_closed and len(self.requests) + len(self.updates) > 6)
    @rule()
    def close(self) -> None:
        self.is_closed = True
        self.rig.call(self.engine.aclose())

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        self.engine._opened().cache.check_integrity()
        version = self.engine.policy_version
        if version is not None:
            assert version >= self.last_version
            self.last_version = version
        elif self.staging == "copy":
            raise AssertionError("an update that stages a copy has fenced the engine")
        assert not (self.engine.is_paused() and self.engine.state is PolicyState.SERVING)
        assert (version is None) <= (self.engine.state in (PolicyState.INVALIDATED, PolicyState.SWAPPING))

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig"):
                self._end()
        finally:
            if hasattr(self, "rig"):
                self.rig.close()

    def _end(self) -> None:
        for tap in self.taps:
            tap.opened.set()
        if not self.is_closed:
            self.rig.finish(self.engine.resume_generation())
        for call in self.rig.calls:
            self.rig.until(lambda call=call: self._is_over(call), "a call")  # type: ignore[misc]
        if not self.is_closed:
            self._recover()
        report = self.rig.leave()
        assert not report.findings and report.is_closed
        weights_of = {version.number: digests()[version.digest] for version in report.versions}
        for name, call in self.requests:
            self._check_request(name, call, weights_of)
        for update in self.updates:
            self._check_update(update, weights_of)

    def _is_over(self, call: Call) -> bool:
        """A pause that came after the last resume holds everything up until it is lifted."""
        if not self.is_closed and self.engine.is_paused() and all(pause.task.done() for pause in self.pauses):
            self.rig.finish(self.engine.resume_generation())
        return call.task.done()

    def _recover(self) -> None:
        """Back to normal: a good update commits, the next request is right, nothing is kept."""
        self.rig.finish(self.engine.resume_generation())
        ack = self.rig.finish(self.engine.update_weights(WEIGHTS[1]))
        output = self.rig.finish(self.engine.generate(PROMPTS[0], SamplingParams(max_tokens=5)))
        assert_true_to_label(output, {ack.policy_version: 1})
        self.rig.until(lambda: self.engine.stats().pages.live == 0, "pages are kept")
        stats = self.engine.stats()
        assert (stats.state, stats.num_running, stats.num_waiting) == ("Serving", 0, 0)

    def _check_request(self, name: str, call: Call, weights_of: dict[int, int]) -> None:
        if call.task.cancelled():
            assert call.was_cancelled
            return
        assert call.error is None or isinstance(call.error, EngineInvalidatedError | RequestFailedError), call.error
        if call.result is not None:
            assert all(sample.finish_reason in ("length", "abort") for sample in call.result.outputs)
            assert_true_to_label(call.result, weights_of, may_mix=self.keeps_kv)

    def _check_update(self, update: Update, weights_of: dict[int, int]) -> None:
        """Committed with its own weights, or refused for a reason it gave, or withdrawn by whoever withdrew it."""
        call, ack = update.call, update.call.result
        if call.task.cancelled():
            assert call.was_cancelled
        elif isinstance(ack, WeightUpdateAck):
            assert update.kind in ("good", "slow")
            assert weights_of[ack.policy_version] == update.weights
        elif isinstance(call.error, TimeoutError):
            assert update.timed
        else:
            assert isinstance(call.error, EngineError), call.error
            if update.kind in ("good", "slow"):
                assert self.is_closed or "withdrawn" in str(call.error)
            assert isinstance(call.error, EXPECTED)


TestEngineMachine = EngineMachine.TestCase
PROFILE = settings()
TestEngineMachine.settings = settings(max_examples=max(30, PROFILE.max_examples // 2), stateful_step_count=30)
