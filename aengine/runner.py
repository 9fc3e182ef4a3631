"""The model at work: one step of forward pass and draws, and the change of weights between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import define
from torch import Tensor

from aengine.cache.storage import KVStorage
from aengine.errors import EngineError
from aengine.model.decoder import Decoder
from aengine.model.inputs import ForwardInputs
from aengine.model.matching import match_tensors
from aengine.model.weights import build_weights
from aengine.policy.digest import digest_tensors
from aengine.policy.update import StagedWeights
from aengine.sampling.sampler import Draw, Drawn, sample

__all__ = ["ModelRunner", "StepResult"]

StepResult = list[Drawn | EngineError]


@define(eq=False)
class ModelRunner:
    """Holds the decoder, whose weights it changes, and the KV the decoder writes.

    `step` runs in the engine's worker thread; `stage` runs in another while steps go on, and changes nothing.
    """

    decoder: Decoder
    storage: KVStorage
    eos_token_ids: tuple[int, ...] = ()

    def step(
        self,
        inputs: ForwardInputs,
        copies: Sequence[tuple[int, int]],
        logit_rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> StepResult:
        """Copy pages, compute KV for every row of `inputs`, and draw tokens from the logits of `logit_rows`."""
        self.storage.copy_pages(copies)
        hidden = self.decoder.forward(inputs, self.storage)  # [R, H]
        if not draws:
            return []
        logits = self.decoder.logits(hidden[np.asarray(logit_rows)])  # [L, V]
        return sample(logits, draws, self.eos_token_ids)

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        """Check, copy, pack and digest new weights. Raises `WeightsMismatchError`."""
        matched = match_tensors(self.decoder.spec, tensors)
        weights = build_weights(self.decoder.spec, matched, self.decoder.weights.strategy)
        return StagedWeights(weights, digest_tensors(weights.named_tensors()))

    def flip(self, staged: StagedWeights) -> None:
        """Use `staged` from the next step on: one assignment."""
        self.decoder.weights = staged.weights

    def weight_checksum(self) -> str:
        """Digest of the weights as they lie in memory now."""
        return digest_tensors(self.decoder.weights.named_tensors())
