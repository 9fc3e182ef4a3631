"""The work of `aengine rollout`: check everything, then sample, appending each prompt as it finishes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
from attrs import define, evolve, field, frozen
from rich.console import Console

from aengine import Engine, EngineConfig
from aengine.audit.record import RolloutHeader, rollout_header, sample_records
from aengine.audit.rollout_file import RolloutFile
from aengine.cli.loading import load_model
from aengine.cli.progress import RolloutProgress
from aengine.cli.prompts import LineFault, PromptEntry, faults_error, read_prompts
from aengine.errors import PromptError, PromptsFileError, RequestFailedError, TokenizerMissingError
from aengine.params import SamplingParams
from aengine.sampling.random import derive_seed

__all__ = ["RolloutJob", "RolloutSummary", "run_rollout"]


@frozen
class RolloutJob:
    model: str
    prompts: Path
    out: Path
    params: SamplingParams
    skip_bad: bool


@define
class RolloutSummary:
    """`samples` and `tokens` were made now, `kept` samples were there before."""

    samples: int = 0
    tokens: int = 0
    kept: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    skipped_lines: int = 0
    failed: list[str] = field(factory=list)

    def sentence(self, out: Path) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{out}: {self.samples} samples written, {self.kept} were there; "
            f"{self.tokens} tokens in {self.seconds:.1f} s ({rate:.0f} a second)"
        )


@frozen
class _Task:
    """A prompt ready to be submitted. `wanted` are the indices that the output lacks."""

    prompt_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    wanted: frozenset[int]


async def run_rollout(job: RolloutJob, console: Console) -> RolloutSummary:
    """Raises `PromptsFileError`, `RolloutFileError`, what loading a model raises, or `OSError`."""
    source = read_prompts(job.prompts)
    _refuse(job.prompts, source.faults, len(source.entries), job, console)
    with RolloutFile(job.out) as out:
        checkpoint = load_model(job.model, console)
        params = evolve(job.params, seed=_base_seed(job.params, out.header))
        config = EngineConfig()
        async with Engine(checkpoint, config) as engine:
            prompts, faults = _checked(engine, source.entries, params)
            _refuse(job.prompts, faults, len(prompts), job, console)
            out.begin(rollout_header(checkpoint, engine.installed_policy, engine.stats(), params))
            tasks, kept = _tasks(prompts, params, out)
            summary = RolloutSummary(kept=kept, skipped_lines=len(source.faults) + len(faults))
            width = config.max_num_seqs // params.n + 1  # one more than may run, so that the engine never waits for us
            await _sample_all(engine, tasks, out, summary, width, console)
    return summary


def _refuse(path: Path, faults: Sequence[LineFault], num_good: int, job: RolloutJob, console: Console) -> None:
    """Raise for faulty lines, or only tell of them; a file without one good line is refused either way."""
    if faults:
        error = faults_error(path, faults)
        if not job.skip_bad:
            raise error
        console.print(f"skipped: {error}", markup=False)
    if not num_good:
        raise PromptsFileError(f"{path} has no prompt that can be used")


def _base_seed(params: SamplingParams, header: RolloutHeader | None) -> int:
    """The seed that was given, else that of the run that is gone on with, else a new one."""
    if params.seed is not None:
        return params.seed
    if header is not None and header.params.seed is not None:
        return header.params.seed
    return secrets.randbits(63)


def _checked(
    engine: Engine, entries: Iterable[PromptEntry], params: SamplingParams
) -> tuple[list[tuple[str, tuple[int, ...]]], list[LineFault]]:
    """Ids and tokens of the prompts the engine takes, and the lines of those it refuses."""
    good, faults = [], []
    for entry in entries:
        try:
            prompt = entry.prompt(engine.tokenizer)
            engine.stream(prompt, params)  # checks as a submit would; never entered, so nothing is submitted
            good.append((entry.prompt_id, tuple(int(token) for token in prompt)))
        except (PromptError, TokenizerMissingError) as error:
            faults.append(LineFault(entry.line, str(error)))
    return good, faults


def _tasks(
    prompts: Iterable[tuple[str, tuple[int, ...]]], params: SamplingParams, out: RolloutFile
) -> tuple[list[_Task], int]:
    """What is left to do, and how many samples are there already."""
    tasks, kept = [], 0
    assert params.seed is not None
    for prompt_id, token_ids in prompts:
        made = out.made(prompt_id, token_ids)
        wanted = frozenset(range(params.n)) - made
        kept += params.n - len(wanted)
        if wanted:
            own = evolve(params, seed=derive_seed(params.seed, prompt_id))
            tasks.append(_Task(prompt_id, token_ids, own, wanted))
    return tasks, kept


async def _sample_all(
    engine: Engine, tasks: list[_Task], out: RolloutFile, summary: RolloutSummary, width: int, console: Console
) -> None:
    """Keep `width` prompts with the engine until all are done."""
    started = time.perf_counter()
    todo = iter(tasks)
    with RolloutProgress(console, sum(len(task.wanted) for task in tasks)) as progress:

        async def work() -> None:
            for task in todo:
                await _sample(engine, task, out, summary)
                summary.seconds = time.perf_counter() - started
                progress.show(summary.samples, summary.tokens, summary.cached_tokens)

        async with anyio.create_task_group() as workers:
            for _ in range(min(width, len(tasks))):
                workers.start_soon(work)


async def _sample(engine: Engine, task: _Task, out: RolloutFile, summary: RolloutSummary) -> None:
    """A prompt that fails is noted; the others go on."""
    try:
        output = await engine.generate(task.token_ids, task.params, request_id=task.prompt_id)
    except RequestFailedError as error:
        summary.failed.append(str(error))
        return
    records = [r for r in sample_records(task.prompt_id, output, task.params) if r.index in task.wanted]
    out.append(records)
    summary.samples += len(records)
    summary.tokens += sum(len(record.token_ids) for record in records)
    summary.cached_tokens += output.num_cached_tokens
