"""An update ends as the rules say wherever its caller, or the task that runs it, is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from cancel_support import (
    LONG,
    PROMPT,
    WEIGHTS,
    Blow,
    Ended,
    assert_works,
    call_under,
    new_engine,
    stream_of,
    strikes_on,
    struck_at,
)

from aengine import Engine, RequestOutput
from aengine.errors import RequestFailedError
from aengine.policy.ledger_check import check_ledger
from aengine.policy.pending import PendingUpdate
from aengine.testing import until

WAYS = [*strikes_on("asyncio"), *strikes_on("trio")]
HOW = [
    ("wait", "recompute", "copy"),
    ("abort", "recompute", "copy"),
    ("keep", "recompute", "copy"),
    ("keep", "keep", "copy"),
    ("wait", "recompute", "none"),
    ("keep", "recompute", "none"),
]
"""Mode, KV and staging."""
NEVER = 10**9


class Watch:
    """Tells a blow about each wait of the task that runs the updates, and notes in which stage an update was withdrawn:
    a cancellation may reach its caller only when the update has gone on since the blow fell."""

    def __init__(self, engine: Engine) -> None:
        self.updater = engine._opened().updater
        self.blow, self.stage = Blow(NEVER), "settled"
        self._run, self._withdraw = self.updater.run, self.updater.withdraw
        self.updater.run, self.updater.withdraw = self.run, self.withdraw  # type: ignore[method-assign]

    async def run(self) -> None:
        await struck_at(self._run(), self.on_wait)

    def on_wait(self) -> None:
        self.blow.on_wait()

    def withdraw(self, update: PendingUpdate, reason: str) -> None:
        self.stage = "settled" if update.is_settled else update.stage if update is self.updater._current else "queue"
        self._withdraw(update, reason)

    def arm(self, number: int) -> Blow:
        self.blow, self.stage = Blow(number), "settled"
        return self.blow


def weights_after(stage: str, how: tuple[str, str, str], ended: Ended, engine: Engine, before: int) -> int | None:
    """Check the outcome against the stage that the update was in when the blow fell. Returns whose weights are
    installed; None if the engine is fenced."""
    version = engine.policy_version
    allowed: dict[str, tuple[int | None, ...]] = {
        "stage": (before,),
        "drain": (before,),
        "swap": (before + 1, None),
        "commit": (before + 1,),
        "settled": (before + 1,),
        "queue": (before,),
    }
    assert version in allowed[stage], f"cancelled in {stage}"
    assert stage != "swap" or how[2] == "none"
    if ended.result is not None:
        assert version == ended.result.policy_version == before + 1
    elif not ended.was_cancelled:
        assert version != before + 1
    return None if version is None else 1 if version == before + 1 else 2


async def update_beside_a_request(
    engine: Engine, how: tuple[str, str, str], make: Callable[[Callable[[], Any]], Any]
) -> tuple[Ended, list[RequestOutput | RequestFailedError]]:
    """An update, called through `make`, when a request has two tokens."""
    mode, kv, staging = how
    outputs: list[RequestOutput | RequestFailedError] = []
    source: Any = WEIGHTS[1] if staging == "copy" else stream_of(WEIGHTS[1])
    sampled = engine.stats().num_sampled_tokens

    async def rollout() -> None:
        try:
            outputs.append(await engine.generate(PROMPT, LONG))
        except RequestFailedError as failed:
            outputs.append(failed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollout)
        await until(lambda: engine.stats().num_sampled_tokens >= sampled + 2)
        ended = await make(lambda: engine.update_weights(source, mode=mode, kv=kv))  # type: ignore[arg-type]
        with anyio.fail_after(20):
            await until(lambda: engine._opened().updater._current is None)
    return ended, outputs


@pytest.mark.parametrize("how", HOW, ids="-".join)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("whose", ["its own waits", "the waits of the task that runs it"])
def test_a_caller_cancelled_at_each_of(
    whose: str, way: tuple[str, str], how: tuple[str, str, str], tmp_path: Path
) -> None:
    stages: list[str] = []

    async def scenario() -> None:
        number, has_struck = 0, True
        async with new_engine(staging=how[2], ledger=tmp_path / "ledger.jsonl") as engine:
            watch = Watch(engine)
            await assert_works(engine, 0)
            while has_struck:
                number += 1
                before = engine.policy_version
                assert before is not None

                async def make(call: Callable[[], Any], number: int = number) -> Ended:
                    own = whose == "its own waits"
                    blow = watch.arm(number if not own else NEVER)
                    blow = Blow(number) if own else blow
                    ended = await call_under(way[1], blow, call, own=own)
                    nonlocal has_struck
                    has_struck = blow.has_struck
                    blow.at = NEVER
                    return ended

                ended, (output,) = await update_beside_a_request(engine, how, make)
                if has_struck:
                    stages.append(watch.stage)
                weights = weights_after(watch.stage, how, ended, engine, before)
                assert isinstance(output, RequestFailedError) == (weights is None and how[0] == "keep")
                await assert_works(engine, weights)
        report = check_ledger((tmp_path / "ledger.jsonl").read_bytes())
        assert not report.findings and report.is_closed

    anyio.run(scenario, backend=way[0])
    print(f"{whose}, {way}, {how}: {len(stages)} points: {stages}")
    assert stages
