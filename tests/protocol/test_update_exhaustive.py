"""Every order of events in the small protocol, with every mode and a failure at every point.

The scope: up to two requests and two updates, and what may come at any time besides. Under the `deep` profile of
hypothesis the worlds are the full product of modes, fates and events, which takes long; by default they are chosen so
that every fate meets every mode, every fate comes first and second, and every event comes in every state.
"""

from __future__ import annotations

import itertools
import os

import pytest
from step_kernel import Kernel, Walk, explore
from update_world import FATES, Scope, UpdateWorld, on_step_kernel

IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
MODES = ("wait", "abort", "keep", "keep kv")
CANCELS = ("cancel update 1", "cancel update 2")
PAUSES = ("pause wait", "pause abort", "pause keep")
PAIRS = (
    (("wait", "good"), ("keep", "good")),
    (("abort", "torn"), ("wait", "record fails")),
    (("keep", "record fails"), ("keep kv", "torn")),
    (("keep kv", "in place"), ("abort", "flip fails")),
    (("keep kv", "flip fails"), ("keep", "refused")),
    (("wait", "refused"), ("keep kv", "in place")),
)


def walk(patch: pytest.MonkeyPatch, scope: Scope) -> None:
    """Explore a world and say how much of it there was (seen with `pytest -s`)."""
    worlds: list[UpdateWorld] = []

    def new_world() -> UpdateWorld:
        worlds[:] = [UpdateWorld(scope)]
        return worlds[0]

    def kernel() -> Kernel:
        return worlds[0].kernel

    with on_step_kernel(patch, kernel):
        found: Walk = explore(new_world)
    print(f"{scope}: {found}")
    assert found.ends > 0


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("mode", MODES)
def test_one_update_and_its_caller_that_may_go_away(mode: str, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(monkeypatch, Scope(((mode, fate),), ("cancel update 1",), requests=2 if IS_DEEP else 1))


@pytest.mark.parametrize(
    "updates", itertools.product(itertools.product(MODES, FATES), repeat=2) if IS_DEEP else PAIRS, ids=str
)
def test_two_updates_and_two_requests(updates: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    walk(monkeypatch, Scope(updates, CANCELS if IS_DEEP else ()))


def test_two_updates_whose_callers_may_go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    walk(monkeypatch, Scope((("keep", "torn"), ("wait", "good")), CANCELS, requests=1))


@pytest.mark.parametrize("mode", MODES if IS_DEEP else ("wait", "keep kv"))
def test_requests_that_are_aborted_and_a_cache_that_is_reset(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk(monkeypatch, Scope(((mode, "good"),), ("abort 1", "reset"), requests=2 if IS_DEEP else 1))


@pytest.mark.parametrize("fate", FATES if IS_DEEP else ("good", "torn"))
@pytest.mark.parametrize("mode", MODES if IS_DEEP else ("wait", "keep kv"))
@pytest.mark.parametrize("pause", PAUSES)
def test_a_pause_and_its_end_at_any_time(pause: str, mode: str, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_DEEP and (mode == "wait") == (fate == "torn"):
        pytest.skip("only under the deep profile")
    walk(monkeypatch, Scope(((mode, fate),), (pause, "resume"), requests=1))


def test_a_pause_whose_caller_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    walk(monkeypatch, Scope((("wait", "good"),), ("pause wait", "cancel pause", "cancel update 1"), requests=1))
