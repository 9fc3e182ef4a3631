"""The model at work: one step of forward pass and draws, and the change of weights between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import Factory, define, field
from torch import Tensor

from aengine.cache.storage import KVStorage
from aengine.errors import AttributionError, EngineError, WeightsMismatchError
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.matching import complaint_about, is_ignored, match_tensors
from aengine.model.weights import build_weights, repack_weights
from aengine.policy.digest import HashedTensor, combine_digests, digest_each, digest_tensors
from aengine.policy.roles import StagedWeights
from aengine.sampling.sampler import Draw, Drawn, sample

__all__ = ["ModelRunner", "SharedModelRunner", "StepResult"]

StepResult = list[Drawn | EngineError]

MAX_LOGIT_ROWS = 128
"""Rows of logits that are held at once; more are made in several turns."""


@define(eq=False)
class ModelRunner:
    """Holds the decoder, whose weights it changes, and the KV the decoder writes.

    `step` runs in the engine's worker thread; `stage` runs in another while steps go on, and changes nothing.
    """

    decoder: Decoder
    storage: KVStorage
    installed: StagedWeights
    eos_token_ids: tuple[int, ...] = ()

    def step(
        self,
        inputs: ForwardInputs,
        copies: Sequence[tuple[int, int]],
        logit_rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> StepResult:
        """Copy pages, compute KV for every row of `inputs`, and draw tokens from the logits of `logit_rows`.

        `draws` are in order of their rows."""
        self.storage.copy_pages(copies)
        hidden = self.decoder.forward(inputs, self.storage)  # [R, H]
        if not draws:
            return []
        results: StepResult = []
        for first in range(0, len(logit_rows), MAX_LOGIT_ROWS):
            rows = np.asarray(logit_rows[first : first + MAX_LOGIT_ROWS])
            logits = self.decoder.logits(hidden[rows])  # [L, V]
            wanted = [draw for draw in draws if first <= draw.row < first + len(rows)]
            results += sample(logits, wanted, self.eos_token_ids, first_row=first)
        return results

    # ---- what an update asks (`policy.roles.WeightHolder`)

    def stage(self, tensors: Mapping[str, Tensor], *, check_finite: bool = True) -> StagedWeights:
        """Check, copy, pack and digest new weights. Raises `WeightsMismatchError`, also for weights that are not
        finite unless told not to look."""
        matched = self.check(tensors)
        dtype = self.decoder.weights.dtype
        weights = build_weights(self.decoder.spec, matched, self.decoder.weights.strategy, dtype)
        if check_finite:
            refuse_non_finite(weights.named_tensors())
        types = Counter(str(t.dtype).removeprefix("torch.") for t in matched.values() if t.dtype != dtype)
        parts = digest_each(weights.named_tensors(), self._hashed())
        return StagedWeights(weights, combine_digests(parts), parts, dict(types))

    def _hashed(self) -> dict[str, HashedTensor]:
        """What is installed, with digests at hand."""
        parts, tensors = self.installed.parts, self.decoder.weights.tensors
        return {name: HashedTensor(tensors[name], digest) for name, digest in parts.items()}

    def check(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Names, shapes and types against the model's. Raises `WeightsMismatchError`."""
        return match_tensors(self.decoder.spec, tensors)

    def flip(self, staged: StagedWeights) -> StagedWeights:
        """Use `staged` from the next step on, and return what was in use: one assignment."""
        previous, self.installed = self.installed, staged
        self.decoder.weights = staged.weights
        return previous

    def digest(self) -> str:
        """Of the weights as they lie in memory now."""
        return digest_tensors(self.decoder.weights.named_tensors())

    def accept(self) -> str:
        """Take note of weights that were written in place by their owner."""
        return self.digest()

    def open_writer(self) -> InPlaceWriter:
        return InPlaceWriter(self, dict(self.decoder.weights.named_tensors()))


@define(eq=False)
class SharedModelRunner(ModelRunner):
    """Computes with parameters that a trainer's module holds and writes, in `Engine.weight_update` bodies only."""

    _write_count: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._write_count = self.decoder.weights.write_count()

    def step(self, *arguments: Any) -> StepResult:
        if self.decoder.weights.write_count() != self._write_count:
            raise AttributionError(
                "the module's parameters were changed outside of weight_update(); what they are now has no version. "
                "Change them in `async with engine.weight_update()` only"
            )
        return super().step(*arguments)

    def accept(self) -> str:
        self._write_count = self.decoder.weights.write_count()
        return super().accept()


@define(eq=False)
class InPlaceWriter:
    """Writes tensors over the installed ones, for models that do not fit twice (`policy.roles.WeightWriter`)."""

    _runner: ModelRunner
    _installed: dict[str, Tensor]
    _written: set[str] = Factory(set)

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises `WeightsMismatchError` for a tensor that the model does not have or that does not fit."""
        if is_ignored(self._runner.decoder.spec, name, tensor, self._installed):
            return
        target = self._installed.get(name)
        if target is None:
            raise WeightsMismatchError(unexpected=[name])
        if complaint := complaint_about(tensor, tuple(target.shape)):
            raise WeightsMismatchError(wrong=[f"{name}: {complaint}"])
        target.copy_(tensor.detach())
        self._written.add(name)

    def finish(self, *, check_finite: bool = True) -> str:
        """Pack what was written; returns the digest. Raises `WeightsMismatchError` naming what never came."""
        if missing := [name for name in self._installed if name not in self._written]:
            raise WeightsMismatchError(missing=missing)
        weights = repack_weights(self._runner.decoder.weights)
        if check_finite:
            refuse_non_finite(weights.named_tensors())
        parts = digest_each(weights.named_tensors())
        staged = StagedWeights(weights, combine_digests(parts), parts)
        self._runner.flip(staged)
        return staged.digest


def refuse_non_finite(named: Iterable[tuple[str, Tensor]]) -> None:
    """A sum is finite only if all of its terms are, and cheaper to take than a look at each; one that overflows is
    looked at again."""
    wrong = [
        f"{name}: holds NaN or an infinity"
        for name, tensor in named
        if not tensor.sum().isfinite() and not tensor.isfinite().all()
    ]
    if wrong:
        raise WeightsMismatchError(wrong=wrong)
