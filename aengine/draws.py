"""What a step is to draw: which rows of logits, and for each token to sample or to score a `Draw`."""

from __future__ import annotations

from attrs import Factory, define

from aengine.request import Sample
from aengine.sampling.sampler import Draw
from aengine.steps import Chunk, StepPlan

__all__ = ["StepDraws"]


@define(eq=False)
class StepDraws:
    """`draws[i]` is for `samples[i]`; its `row` counts among `rows`, which are rows of the step's input."""

    rows: list[int] = Factory(list)
    samples: list[Sample] = Factory(list)
    draws: list[Draw] = Factory(list)

    @classmethod
    def of(cls, plan: StepPlan) -> StepDraws:
        wanted, start = cls(), 0
        for chunk in plan.chunks:
            if chunk.sample.targets is not None:
                wanted._add_targets(chunk, start)
            if chunk.draws:
                wanted._add_samples(chunk, start + chunk.count - 1)
            start += chunk.count
        return wanted

    def _add_targets(self, chunk: Chunk, start: int) -> None:
        sample, targets = chunk.sample, chunk.sample.targets
        assert targets is not None
        for position in targets.positions(chunk.start + chunk.count):
            place = position - targets.first
            self.draws.append(
                Draw(
                    len(self.rows),
                    targets.params,
                    sample.seed,
                    sample.index,
                    place,
                    sample.history,
                    token=targets.token_ids[place],
                    with_support=targets.with_support,
                )
            )
            self.samples.append(sample)
            self.rows.append(start + position - chunk.start)

    def _add_samples(self, chunk: Chunk, row: int) -> None:
        for sample in chunk.draws:
            params = sample.request.params
            self.draws.append(
                Draw(
                    len(self.rows),
                    params,
                    sample.seed,
                    sample.index,
                    sample.num_output,
                    sample.history,
                    sample.mask,
                )
            )
            self.samples.append(sample)
        self.rows.append(row)
