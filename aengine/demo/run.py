"""The loop of the demo: roll out, reward, verify, step, push."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean

import anyio
import anyio.from_thread
import anyio.to_thread
from attrs import define, evolve, field, frozen

from aengine import Engine, EngineConfig
from aengine.audit.record import PolicyRecord, rollout_header, sample_records
from aengine.audit.rollout_file import RolloutFile
from aengine.demo.questions import Question, Questions, load_questions
from aengine.demo.report import DemoReport, StepReport
from aengine.demo.reward import sample_reward
from aengine.demo.trainer import Group, Trainer, Verified
from aengine.demo.verify import num_reproduced
from aengine.demo.view import DemoView
from aengine.errors import TokenizerMissingError
from aengine.model.checkpoint import Checkpoint
from aengine.params import SamplingParams
from aengine.policy.version import PolicyVersion
from aengine.sampling.random import derive_seed

__all__ = ["DemoSettings", "run_demo"]

REFRESH_SECONDS = 0.25


@frozen(kw_only=True)
class DemoSettings:
    """Two steps go once through the sixteen questions."""

    steps: int = 6
    questions_per_step: int = 8
    samples: int = 8
    max_tokens: int = 20
    learning_rate: float = 1e-5
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(n=self.samples, max_tokens=self.max_tokens, seed=self.seed)

    def chosen(self, questions: Sequence[Question], step: int) -> list[tuple[int, Question]]:
        """The questions of a step with their numbers, in turn."""
        first = (step - 1) * self.questions_per_step
        numbers = [(first + place) % len(questions) for place in range(self.questions_per_step)]
        return [(number, questions[number]) for number in numbers]


async def run_demo(checkpoint: Checkpoint, settings: DemoSettings, out: RolloutFile, view: DemoView) -> DemoReport:
    """Train, and tell `view` of it. Each step's samples are in `out` once they are verified.

    Raises `VerificationError` when a sample is not what its label says; nothing is trained on it then.
    """
    if checkpoint.tokenizer is None:
        raise TokenizerMissingError(f"{checkpoint.name} has no tokenizer, and the demo asks questions in text")
    started = time.perf_counter()
    view.phase("building the trainer's copy and the engine")
    trainer = await anyio.to_thread.run_sync(Trainer.of, checkpoint, settings.learning_rate)
    async with Engine(checkpoint, EngineConfig()) as engine:
        out.begin(rollout_header(checkpoint, engine.installed_policy, engine.stats(), settings.params))
        run = _Run(engine, trainer, settings, out, view, load_questions())
        async with run.watching():
            before = await run.held_out("before")
            training = time.perf_counter()
            steps = [await run.step(number) for number in range(1, settings.steps + 1)]
            trained = time.perf_counter()
            after = await run.held_out("after")
    report = DemoReport(
        steps=tuple(steps),
        held_out_before=before,
        held_out_after=after,
        verified=run.verified,
        training_seconds=trained - training,
        seconds=time.perf_counter() - started,
        out=str(out.path),
    )
    view.end(report)
    return report


@define(eq=False)
class _Run:
    engine: Engine
    trainer: Trainer
    settings: DemoSettings
    out: RolloutFile
    view: DemoView
    questions: Questions
    verified: Verified = field(factory=Verified)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep the view up to date with the engine. An exception of the body comes out as it is."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch)
                yield
                group.cancel_scope.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _watch(self) -> None:
        sampled, at = 0, time.perf_counter()
        while True:
            stats, now = self.engine.stats(), time.perf_counter()
            self.view.engine(stats, (stats.num_sampled_tokens - sampled) / (now - at) if now > at else 0.0)
            sampled, at = stats.num_sampled_tokens, now
            await anyio.sleep(REFRESH_SECONDS)

    async def held_out(self, when: str) -> float:
        """Mean reward of greedy answers to the held-out questions; these samples are verified and written too."""
        self.view.phase(f"held-out questions, {when} training")
        policy = self.engine.installed_policy
        params = evolve(self.settings.params, n=1, temperature=0.0)
        named = [(f"{when}/{number}", question) for number, question in enumerate(self.questions.held_out)]
        groups = await self._roll_out(named, params)
        verify = partial(self.trainer.verify, groups, policy, anyio.from_thread.check_cancelled)
        self.verified += await anyio.to_thread.run_sync(verify) + await self._replayed(groups)
        self._write(policy, named, groups, params)
        return _mean_reward(groups)

    async def step(self, number: int) -> StepReport:
        started = time.perf_counter()
        policy = self.engine.installed_policy
        self.view.phase(f"step {number} of {self.settings.steps}: rolling out under policy {policy.number}")
        chosen = self.settings.chosen(self.questions.train, number)
        named = [(f"step-{number}/{place}", question) for place, question in chosen]
        groups = await self._roll_out(named, self.settings.params)
        rolled_out = time.perf_counter() - started
        self.view.phase(f"step {number} of {self.settings.steps}: verifying and training")
        backward = partial(self.trainer.backward, groups, policy, anyio.from_thread.check_cancelled)
        verified = await anyio.to_thread.run_sync(backward) + await self._replayed(groups)
        self.verified += verified
        self._write(policy, named, groups, self.settings.params)
        await anyio.to_thread.run_sync(self.trainer.step)
        await self.trainer.tracker.push(self.engine)
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.output.outputs)
        report = StepReport(
            step=number,
            policy_version=policy.number,
            reward=_mean_reward(groups),
            tokens=tokens,
            tokens_per_second=tokens / rolled_out,
            cached_tokens=sum(group.output.num_cached_tokens for group in groups),
            verified=verified,
            example=groups[0].output.outputs[0].text or "",
            seconds=time.perf_counter() - started,
        )
        self.view.step(report)
        return report

    async def _roll_out(self, named: Sequence[tuple[str, Question]], params: SamplingParams) -> list[Group]:
        """One group of rewarded samples for each question; each has its own seed, derived from its name."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        prompts = [question.prompt(tokenizer, self.questions.system) for _, question in named]
        each = [self._own(params, name) for name, _ in named]
        outputs = await self.engine.generate_batch(prompts, each)
        return [
            Group(output, tuple(sample_reward(sample, question.answers) for sample in output.outputs))
            for output, (_, question) in zip(outputs, named, strict=True)
        ]

    async def _replayed(self, groups: Iterable[Group]) -> Verified:
        """Computed again in the engine, while their policy is installed."""
        return Verified(reproduced=num_reproduced(await self.engine.replay(group.output for group in groups)))

    def _own(self, params: SamplingParams, name: str) -> SamplingParams:
        return evolve(params, seed=derive_seed(self.settings.seed, name))

    def _write(
        self,
        policy: PolicyVersion,
        named: Sequence[tuple[str, Question]],
        groups: Iterable[Group],
        params: SamplingParams,
    ) -> None:
        records = [
            record
            for (name, _), group in zip(named, groups, strict=True)
            for record in sample_records(name, group.output, self._own(params, name), group.rewards)
        ]
        self.out.append([PolicyRecord(policy=policy), *records])


def _mean_reward(groups: Iterable[Group]) -> float:
    return fmean(reward for group in groups for reward in group.rewards)
