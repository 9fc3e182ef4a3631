"""`aengine export` turns a rollouts file into a Parquet file, or says in one sentence why not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_support import invoke, rollout, save_model, write_lines

from aengine.audit.arrow import read_parquet
from aengine.audit.rollout_file import read_rollouts


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export")
    prompts = write_lines(directory / "prompts.jsonl", [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}])
    out = directory / "rollouts.jsonl"
    result = rollout(save_model(directory / "model"), prompts, out, "--n", 2)
    assert result.exit_code == 0, result.output
    return out


def test_the_parquet_file_holds_what_the_rollouts_file_holds(rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.parquet"
    result = invoke("export", rollouts, out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{out.name}: 4 samples" in result.stderr
    assert list(read_parquet(out)) == list(read_rollouts(rollouts))


def test_the_count_can_be_had_as_json(rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.parquet"
    result = invoke("export", rollouts, out, "--json")
    assert json.loads(result.stdout) == {"samples": 4, "out": str(out)}


def test_a_file_that_is_no_rollouts_file_is_refused(tmp_path: Path) -> None:
    result = invoke("export", write_lines(tmp_path / "other.jsonl", ["{}"]), tmp_path / "out.parquet")
    assert result.exit_code == 1
    assert "line 1 is not a record of a rollouts file" in result.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_a_missing_library_is_named(rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aengine.audit.arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = invoke("export", rollouts, tmp_path / "out.parquet")
    assert result.exit_code == 1
    assert "pyarrow is not installed; `export` needs the extra `arrow`" in result.stderr
