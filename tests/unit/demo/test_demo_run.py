"""The demo from end to end, on a tiny model that knows no answers."""

from __future__ import annotations

import io
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import define, field
from rich.console import Console
from talking_support import talking_checkpoint
from typer.testing import CliRunner

from aengine.audit.record import PolicyRecord, SampleRecord
from aengine.audit.rollout_file import RolloutFile, read_rollouts
from aengine.cli import demo as demo_command
from aengine.cli.main import app
from aengine.demo import run as demo_run
from aengine.demo.report import DemoReport, StepReport
from aengine.demo.run import DemoSettings, run_demo
from aengine.demo.trainer import Trainer, Verified
from aengine.demo.view import LiveView, PlainView, new_view
from aengine.errors import TokenizerMissingError, VerificationError
from aengine.model.checkpoint import save_checkpoint
from aengine.testing import tiny_checkpoint

SMALL = DemoSettings(steps=2, questions_per_step=2, samples=2, max_tokens=4, learning_rate=1e-3)


@define
class Seen(PlainView):
    """A view that remembers."""

    console: Console = field(factory=lambda: Console(file=io.StringIO()))
    phases: list[str] = field(factory=list)
    states: set[str] = field(factory=set)
    reports: list[StepReport] = field(factory=list)

    def phase(self, what: str) -> None:
        self.phases.append(what)

    def engine(self, stats: Any, tokens_per_second: float) -> None:
        self.states.add(stats.state)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "demo.jsonl"


@pytest.fixture
def rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that tells samples apart, so that every step has a gradient."""
    monkeypatch.setattr(demo_run, "sample_reward", lambda sample, _: float(sample.index % 2))


def run(path: Path, view: PlainView, settings: DemoSettings = SMALL) -> DemoReport:
    with RolloutFile(path) as file:
        return anyio.run(partial(run_demo, talking_checkpoint(), settings, file, view))


@pytest.mark.usefixtures("rewarded")
def test_each_step_is_verified_written_and_pushed(path: Path) -> None:
    view = Seen()
    report = run(path, view)
    records = list(read_rollouts(path))
    samples = [record for record in records if isinstance(record, SampleRecord)]
    assert [(step.step, step.policy_version, step.verified.samples) for step in report.steps] == [(1, 0, 4), (2, 1, 4)]
    assert [record.policy.number for record in records if isinstance(record, PolicyRecord)] == [0, 0, 1, 2]
    assert len({record.policy.digest for record in records if isinstance(record, PolicyRecord)}) == 3
    assert report.verified.samples == len(samples) == 12 + 4 + 4 + 12
    assert report.verified.largest_difference < 1e-4
    versions = {sample.prompt_id.split("/")[0]: {span.version for span in sample.version_spans} for sample in samples}
    assert versions == {"before": {0}, "step-1": {0}, "step-2": {1}, "after": {2}}
    assert "Serving" in view.states


@pytest.mark.usefixtures("rewarded")
def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, Seen()) for name in ("a", "b")]
    assert [[(s.reward, s.tokens, s.example) for s in report.steps] for report in runs[:1]] == [
        [(s.reward, s.tokens, s.example) for s in report.steps] for report in runs[1:]
    ]
    tokens = [[r.token_ids for r in read_rollouts(tmp_path / n) if isinstance(r, SampleRecord)] for n in ("a", "b")]
    assert tokens[0] == tokens[1]


def test_a_model_without_a_tokenizer_is_refused(path: Path) -> None:
    with RolloutFile(path) as file, pytest.raises(TokenizerMissingError, match="tiny-0 has no tokenizer"):
        anyio.run(partial(run_demo, tiny_checkpoint(), SMALL, file, Seen()))


def shifted_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose weights are not those of the engine."""
    of = Trainer.of

    def shifted(*arguments: Any) -> Trainer:
        trainer = of(*arguments)
        with torch.no_grad():
            next(trainer.model.parameters()).add_(0.5)
        return trainer

    monkeypatch.setattr(Trainer, "of", shifted)


def test_what_cannot_be_verified_ends_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted_trainer(monkeypatch)
    with pytest.raises(VerificationError):
        run(path, Seen())
    assert not any(isinstance(record, SampleRecord) for record in read_rollouts(path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_checkpoint(talking_checkpoint(), tmp_path / "model")
    return tmp_path / "model"


def invoke(model: Path, path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--model", str(model), "--out", str(path), "--steps", "1", *options])


def test_the_command_prints_plain_lines_where_there_is_no_terminal(model: Path, path: Path) -> None:
    result = invoke(model, path)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("step 1: reward 0.00, policy 0, ")
    assert "88 of 88 samples verified" in lines[3]
    assert lines[-1] == "88 of 88 samples reproduced bit for bit"
    assert str(path) in lines[4]
    assert "\x1b" not in result.stderr


def test_the_command_gives_its_report_as_json(model: Path, path: Path) -> None:
    report = json.loads(invoke(model, path, "--json").stdout)
    assert report["verified"]["samples"] == 88
    assert [step["policy_version"] for step in report["steps"]] == [0]


def test_the_command_fails_when_a_sample_cannot_be_verified(
    model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted_trainer(monkeypatch)
    result = invoke(model, path)
    assert result.exit_code == 1
    assert result.stderr == "error: the trainer's weights are not those of policy version 0\n"


def test_the_command_does_not_write_into_an_older_run(model: Path, path: Path) -> None:
    path.write_text("older\n")
    result = invoke(model, path)
    assert (result.exit_code, path.read_text()) == (1, "older\n")
    assert "has something in it" in result.stderr


def test_without_a_path_the_rollouts_get_a_new_file_in_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--model", str(model), "--steps", "1"])
    assert result.exit_code == 0, result.output
    (written,) = (tmp_path / "runs").iterdir()
    assert sum(isinstance(record, SampleRecord) for record in read_rollouts(written)) == 88


def test_without_transformers_the_command_says_which_extra_it_needs(
    model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None)
    result = invoke(model, path)
    assert result.exit_code == 1
    assert "extra 'demo'" in result.stderr


def test_ctrl_c_keeps_the_finished_steps(model: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(Seen):
        def step(self, report: StepReport) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo_command, "new_view", lambda console: Interrupting())
    result = invoke(model, path, "--steps", "3")
    assert result.exit_code == 130
    groups = {record.prompt_id.split("/")[0] for record in read_rollouts(path) if isinstance(record, SampleRecord)}
    assert groups == {"before", "step-1"}


def report() -> DemoReport:
    steps = tuple(
        StepReport(
            step=number,
            policy_version=number - 1,
            reward=reward,
            tokens=100,
            tokens_per_second=50.0,
            cached_tokens=16,
            verified=Verified(64, 2e-5, 64),
            example="The [capital]\nof France",
            seconds=9.0,
        )
        for number, reward in enumerate((0.1, 0.3, 0.5, 0.9), 1)
    )
    return DemoReport(
        steps=steps,
        held_out_before=0.25,
        held_out_after=0.5,
        verified=Verified(280, 2e-5, 280),
        training_seconds=36.0,
        seconds=50.0,
        out="demo.jsonl",
    )


def test_the_report_compares_the_first_two_steps_with_the_last_two() -> None:
    assert (report().reward_before, report().reward_after) == (pytest.approx(0.2), pytest.approx(0.7))
    assert "0.20 -> 0.70" in report().lines()[0]
    assert "280 of 280 samples verified" in report().lines()[2]
    assert report().lines()[-1] == "280 of 280 samples reproduced bit for bit"


def test_the_live_view_shows_steps_and_leaves_the_cursor_visible() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    view = new_view(console)
    assert isinstance(view, LiveView)
    with view:
        view.phase("step 1 of 4")
        for step in report().steps:
            view.step(step)
        view.end(report())
    shown = text.getvalue()
    assert "The [capital] of France" in shown
    assert "64 to 2e-05" in shown
    assert "0.20 -> 0.70" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_console_that_is_no_terminal_gets_the_plain_view() -> None:
    assert isinstance(new_view(Console(file=io.StringIO())), PlainView)
