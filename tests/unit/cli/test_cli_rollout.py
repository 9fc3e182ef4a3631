"""`aengine rollout` on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from cli_support import (
    header_of,
    in_order,
    invoke,
    rollout,
    samples_of,
    save_model,
    write_lines,
)
from talking_support import talking_checkpoint

from aengine import Engine, SamplingParams, load_checkpoint
from aengine.audit.rollout_file import RolloutFile
from aengine.errors import PromptsFileError, RequestFailedError
from aengine.testing import tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"prompt_token_ids": [number, 2, 3], "id": f"p{number}"} for number in range(1, 6)]
    return write_lines(tmp_path / "prompts.jsonl", lines)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_prompt_gets_its_samples_as_the_engine_made_them(model: Path, prompts: Path, out: Path) -> None:
    result = rollout(model, prompts, out, "--n", 3)
    assert result.exit_code == 0, result.output
    samples = in_order(samples_of(out))
    assert [(s.prompt_id, s.index) for s in samples] == [(f"p{p}", i) for p in range(1, 6) for i in range(3)]

    async def again() -> None:
        async with Engine(load_checkpoint(model)) as engine:
            output = await engine.generate([1, 2, 3], SamplingParams(n=3, max_tokens=6, seed=samples[0].seed))
            assert engine.installed_policy == header_of(out).policy
        for sample, record in zip(output.outputs, samples, strict=False):
            assert (record.token_ids, record.logprobs, record.raw_logprobs, record.version_spans, record.kv_spans) == (
                (sample.token_ids, sample.logprobs, sample.raw_logprobs, sample.version_spans, sample.kv_spans)
            )

    anyio.run(again)


def test_text_and_messages_are_answered_in_text(tmp_path: Path, out: Path) -> None:
    model = save_model(tmp_path / "talking", talking_checkpoint())
    lines = [{"prompt": "hello world"}, {"messages": [{"role": "user", "content": "good night"}]}]
    result = rollout(model, write_lines(tmp_path / "p.jsonl", lines), out)
    assert result.exit_code == 0, result.output
    samples = in_order(samples_of(out))
    assert [sample.prompt_token_ids for sample in samples] == [(4, 5), (1, 6, 7, 0, 2)]
    assert all(isinstance(sample.text, str) for sample in samples)


def test_a_second_run_makes_nothing_again(model: Path, prompts: Path, out: Path) -> None:
    rollout(model, prompts, out, "--n", 2)
    before = out.read_bytes()
    result = rollout(model, prompts, out, "--n", 2, "--json")
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["samples"], summary["kept"]) == (0, 0, 10)
    assert out.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 40, 2500, 6000])
def test_a_killed_run_is_gone_on_with(model: Path, prompts: Path, out: Path, cut: int) -> None:
    rollout(model, prompts, out, "--n", 3)
    whole = in_order(samples_of(out))
    os.truncate(out, out.stat().st_size - cut)
    left = len(samples_of(out))
    assert left < 15
    result = rollout(model, prompts, out, "--n", 3, "--json")
    assert json.loads(result.stdout)["kept"] == left
    assert in_order(samples_of(out)) == whole


def test_without_a_seed_the_one_of_the_first_run_is_kept(model: Path, prompts: Path, out: Path) -> None:
    arguments = ("rollout", "--model", model, "--prompts", prompts, "--out", out, "--max-tokens", 3)
    assert invoke(*arguments).exit_code == 0
    assert invoke(*arguments).exit_code == 0
    assert len(samples_of(out)) == 5


def test_other_settings_are_refused_by_name(model: Path, prompts: Path, out: Path) -> None:
    rollout(model, prompts, out)
    before = out.read_bytes()
    result = rollout(model, prompts, out, "--temperature", 0.5)
    assert result.exit_code == 1
    assert "temperature: 1.0 in the file, 0.5 now" in result.stderr
    assert out.read_bytes() == before


def test_other_weights_are_refused(tmp_path: Path, model: Path, prompts: Path, out: Path) -> None:
    rollout(model, prompts, out)
    other = save_model(tmp_path / "other", tiny_checkpoint(1, eos_token_ids=(0,)))
    result = rollout(other, prompts, out)
    assert result.exit_code == 1
    assert "policy digest" in result.stderr


def test_another_prompt_under_a_known_id_is_refused(model: Path, prompts: Path, out: Path) -> None:
    rollout(model, prompts, out)
    result = rollout(model, write_lines(prompts, [{"prompt_token_ids": [9], "id": "p1"}]), out)
    assert result.exit_code == 1
    assert "another prompt under the id 'p1'" in result.stderr


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two good lines among five that are not: one is no JSON, the engine refuses the others."""
    ids = [[1, 2], "{", [], [0] * 600, [64], [-1], [3]]
    lines = [line if isinstance(line, str) else {"prompt_token_ids": line} for line in ids]
    return write_lines(tmp_path / "mixed.jsonl", lines)


def test_lines_that_cannot_be_read_are_named_and_nothing_starts(model: Path, mixed: Path, out: Path) -> None:
    result = rollout(model, mixed, out)
    assert result.exit_code == 1
    assert "mixed.jsonl: 1 line cannot be used: line 2: Input data was truncated" in result.stderr
    assert not out.exists()


def test_prompts_that_the_engine_refuses_are_named_and_nothing_starts(model: Path, mixed: Path, out: Path) -> None:
    write_lines(mixed, [line for line in mixed.read_text().splitlines() if line != "{"])
    result = rollout(model, mixed, out)
    assert result.exit_code == 1
    assert "4 lines cannot be used: line 2: the prompt is empty; line 3: the prompt has 600 tokens" in result.stderr
    assert "line 4: prompt position 0 holds token id 64" in result.stderr
    assert "line 5: prompt position 0 holds token id -1" in result.stderr
    assert not out.exists()


def test_skip_bad_runs_the_good_lines(model: Path, mixed: Path, out: Path) -> None:
    result = rollout(model, mixed, out, "--skip-bad", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skipped_lines"] == 5
    assert [sample.prompt_id for sample in in_order(samples_of(out))] == ["line-1", "line-7"]
    assert "line 2: Input data was truncated" in result.stderr


@pytest.mark.parametrize("lines", [[], ["{"]])
def test_a_file_without_a_good_line_is_refused(model: Path, tmp_path: Path, out: Path, lines: list[str]) -> None:
    result = rollout(model, write_lines(tmp_path / "none.jsonl", lines), out, "--skip-bad")
    assert result.exit_code == 1
    assert "has no prompt that can be used" in result.stderr


def test_text_for_a_model_without_a_tokenizer_is_refused_by_line(model: Path, tmp_path: Path, out: Path) -> None:
    result = rollout(model, write_lines(tmp_path / "p.jsonl", [{"prompt": "hello"}]), out)
    assert result.exit_code == 1
    assert "line 1: the prompt is text, and the model has no tokenizer" in result.stderr


@pytest.mark.parametrize("place", ["missing/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_one_sentence(
    model: Path, prompts: Path, tmp_path: Path, place: str
) -> None:
    result = rollout(model, prompts, tmp_path / place)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert ("No such file" in result.stderr) or ("Is a directory" in result.stderr)


def test_a_file_of_another_kind_is_not_touched(model: Path, prompts: Path, out: Path) -> None:
    out.write_text("my notes\n")
    result = rollout(model, prompts, out)
    assert result.exit_code == 1
    assert "line 1 is not a record" in result.stderr
    assert out.read_text() == "my notes\n"


def test_two_runs_cannot_write_one_file(model: Path, prompts: Path, out: Path) -> None:
    with RolloutFile(out):
        result = rollout(model, prompts, out)
    assert result.exit_code == 1
    assert "is being written by another run" in result.stderr


def test_a_missing_model_or_prompts_file_is_one_sentence(model: Path, prompts: Path, out: Path, tmp_path: Path) -> None:
    for result in (rollout(tmp_path / "nowhere", prompts, out), rollout(model, tmp_path / "nothing.jsonl", out)):
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1
        assert not out.exists()


def test_a_prompt_that_fails_does_not_stop_the_others(
    model: Path, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    async def failing(self: Engine, prompt: Any, params: Any, **options: Any) -> Any:
        if options["request_id"] == "p2":
            raise RequestFailedError("p2", "its numbers are not finite")
        return await generate(self, prompt, params, **options)

    monkeypatch.setattr(Engine, "generate", failing)
    result = rollout(model, prompts, out)
    assert result.exit_code == 1
    assert "1 of the prompts failed; the first: request 'p2' failed: its numbers are not finite" in result.stderr
    assert [sample.prompt_id for sample in in_order(samples_of(out))] == ["p1", "p3", "p4", "p5"]


def test_debug_lets_the_error_through(model: Path, tmp_path: Path, out: Path) -> None:
    result = rollout(model, write_lines(tmp_path / "p.jsonl", ["{"]), out, "--debug")
    assert isinstance(result.exception, PromptsFileError)


def test_wrong_usage_has_status_two(model: Path, prompts: Path, out: Path) -> None:
    assert invoke("rollout", "--model", model).exit_code == 2
    assert rollout(model, prompts, out, "--n", 0).exit_code == 2
    assert rollout(model, prompts, out, "--top-p", 0).exit_code == 2


@pytest.fixture
def endless(model: Path, tmp_path: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with far more work than a test waits for."""
    many = write_lines(tmp_path / "many.jsonl", [{"prompt_token_ids": [n % 60 + 1]} for n in range(4000)])
    command = [sys.executable, "-c", "from aengine.cli.main import main; main()", "rollout", "--model", model]
    command += ["--prompts", many, "--out", out, "--max-tokens", "100"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.timeout(300)  # a whole process starts, works and is interrupted
def test_ctrl_c_keeps_what_was_finished_and_has_status_130(endless: subprocess.Popen[str], out: Path) -> None:
    while endless.poll() is None and not (out.exists() and out.stat().st_size > 40_000):
        os.sched_yield()
    endless.send_signal(signal.SIGINT)
    _, stderr = endless.communicate(timeout=200)
    assert (endless.returncode, stderr) == (130, "interrupted; what was finished is kept\n")
    assert out.read_bytes().endswith(b"\n")
    assert len(samples_of(out)) > 3
