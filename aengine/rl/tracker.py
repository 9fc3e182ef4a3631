"""`PolicyTracker`: the trainer's side of a policy version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aengine.policy.pending import WeightUpdateAck

__all__ = ["PolicyTracker", "WeightReceiver"]


class WeightReceiver(Protocol):
    """What `PolicyTracker.push` needs of an engine: `Engine.update_weights`."""

    async def update_weights(self, *args: Any, **kwargs: Any) -> WeightUpdateAck: ...


class PolicyTracker:
    """Counts optimizer steps and knows which version was pushed at which of them.

    Counting goes through torch's step hooks: gradient accumulation counts once per `step()`, so does a step that
    evaluates its closure many times, and a step that a `GradScaler` skips does not count (for fused optimizers, which
    skip inside, this reads `found_inf` and so waits for the device).

    With several optimizers `train_step` advances when each has stepped at least once since it last advanced; an
    optimizer that steps more often than another (a critic, say) does not run ahead. A step that only some have taken
    does not show in `steps_since_push`.
    """

    def __init__(self, optimizer: Optimizer, *optimizers: Optimizer, model: nn.Module | None = None) -> None:
        self.model = model
        self.train_step = 0
        """Optimizer steps taken since the start of training, across restarts (`load_state_dict`)."""
        self.pushed_version: int | None = None
        """The version number of the last acknowledged push; None before the first."""
        self.pushed_step: int | None = None
        """`train_step` of the weights in that push."""
        tracked = list(dict.fromkeys((optimizer, *optimizers)))
        self._num_optimizers = len(tracked)
        self._stepped: set[int] = set()
        self._hooks = [
            one.register_step_post_hook(lambda stepping, *_, index=index: self._note_step(stepping, index))
            for index, one in enumerate(tracked)
        ]

    @property
    def steps_since_push(self) -> int:
        """Train steps that the engine has not got; before the first push, all of them."""
        return self.train_step - (self.pushed_step or 0)

    async def push(
        self, engine: WeightReceiver, source: Mapping[str, Tensor] | nn.Module | None = None, **options: Any
    ) -> WeightUpdateAck:
        """Update the engine's weights, labelled with this tracker's `train_step`; `options` go to `update_weights`.

        `source` defaults to the state dict of the `model` given at construction. The push is recorded once the
        engine has acknowledged it: after an exception or a cancellation the tracker is as before, even where the
        engine went on to commit. Steps taken while waiting belong to the next push.
        """
        if source is None:
            if self.model is None:
                raise TypeError("push() needs a source: none was given, and the tracker was made without a model")
            source = self.model.state_dict()
        step = self.train_step
        ack = await engine.update_weights(source, train_step=step, **options)
        self.pushed_version, self.pushed_step = ack.policy_version, step
        return ack

    def state_dict(self) -> dict[str, Any]:
        """Counts and last push, in plain values; goes into the trainer's checkpoint."""
        return {
            "train_step": self.train_step,
            "pushed_version": self.pushed_version,
            "pushed_step": self.pushed_step,
            "stepped": sorted(self._stepped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; the optimizers must be given in the same order as before."""
        self.train_step = int(state["train_step"])
        self.pushed_version, self.pushed_step = state["pushed_version"], state["pushed_step"]
        self._stepped = set(state["stepped"])

    def close(self) -> None:
        """Stop counting: removes the hooks. Counts stay readable; closing twice is fine."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note_step(self, optimizer: Optimizer, index: int) -> None:
        if _was_skipped(optimizer):
            return
        self._stepped.add(index)
        if len(self._stepped) == self._num_optimizers:
            self._stepped.clear()
            self.train_step += 1


def _was_skipped(optimizer: Optimizer) -> bool:
    # GradScaler calls step() of fused optimizers in any case and leaves the verdict on the optimizer while it runs.
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())
