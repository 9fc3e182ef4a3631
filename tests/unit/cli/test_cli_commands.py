"""The small commands, and how errors are said."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from cli_support import invoke
from rich.console import Console

from aengine.cli import loading, models
from aengine.cli.progress import RolloutProgress
from aengine.cli.report import errors_in_one_sentence
from aengine.errors import EngineError
from aengine.model.known import Progress
from statemachines.render import policy_diagram, report, request_diagram


def test_diagram_prints_the_machines_of_the_code() -> None:
    assert invoke("diagram").stdout == policy_diagram() + "\n"
    assert invoke("diagram", "request").stdout == request_diagram() + "\n"
    assert invoke("diagram", "all").stdout == report() + "\n"
    assert json.loads(invoke("diagram", "--json").stdout) == {"machine": "policy", "text": policy_diagram()}


def test_version_is_that_of_the_package() -> None:
    assert invoke("--version").stdout == "0.1.0\n"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AENGINE_CACHE", str(tmp_path))
    return tmp_path


def test_models_list_says_what_was_not_fetched(empty_cache: Path) -> None:
    assert "smollm2-135m" in invoke("models", "list").stdout
    listed = json.loads(invoke("models", "list", "--json").stdout)
    assert {(model["name"], model["path"]) for model in listed} == {("smollm2-135m", None)}


def test_models_get_refuses_a_name_it_does_not_know(empty_cache: Path) -> None:
    result = invoke("models", "get", "gpt-9")
    assert result.exit_code == 1
    assert result.stderr == "error: 'gpt-9' is not a known model; known are smollm2-135m\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (EngineError("the engine [says] no"), "the engine [says] no"),
        (OSError(28, "No space left on device", "out.jsonl"), "out.jsonl: No space left on device"),
        (OSError("just a reason"), "just a reason"),
        (ExceptionGroup("", [ExceptionGroup("", [EngineError("inner")])]), "inner"),
        (ValueError("odd"), "ValueError: odd (a fault of the program; --debug shows where)"),
    ],
)
def test_an_error_is_one_sentence_and_status_one(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exit_, errors_in_one_sentence(debug=False):
        raise error
    assert exit_.value.exit_code == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_debug_leaves_errors_alone() -> None:
    with pytest.raises(EngineError, match="as it is"), errors_in_one_sentence(debug=True):
        raise EngineError("as it is")


@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c_has_status_130(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_, errors_in_one_sentence(debug):
        raise KeyboardInterrupt
    assert exit_.value.exit_code == 130
    assert "interrupted" in capsys.readouterr().err


def test_models_get_shows_how_far_it_is_and_prints_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str, *, progress: Progress) -> Path:
        progress("download", 1_000_000, 2_000_000)
        progress("unpack", 3_000_000, 3_000_000)
        return tmp_path / f"{name}.gguf"

    monkeypatch.setattr(models, "get_model", fetch)
    text = io.StringIO()
    assert models.fetch_model("small", Console(file=text, force_terminal=True, width=100)) == tmp_path / "small.gguf"
    assert "small: download" in text.getvalue()
    assert "1.0/2.0 MB" in text.getvalue()
    assert invoke("models", "get", "small").stdout == f"{tmp_path / 'small.gguf'}\n"
    assert json.loads(invoke("models", "get", "small", "--json").stdout) == {
        "name": "small",
        "path": str(tmp_path / "small.gguf"),
    }


def test_loading_a_known_model_fetches_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(loading, "fetch_model", lambda name, console: fetched.append(name))
    monkeypatch.setattr(loading, "load_checkpoint", lambda source: source)
    console = Console(file=io.StringIO())
    assert [loading.load_model(name, console) for name in ("smollm2-135m", "elsewhere")] == [
        "smollm2-135m",
        "elsewhere",
    ]
    assert fetched == ["smollm2-135m"]


def test_the_progress_of_a_rollout_shows_samples_and_speed_and_clears_itself() -> None:
    text = io.StringIO()
    with RolloutProgress(Console(file=text, force_terminal=True, width=120), total=8) as progress:
        progress.show(3, 120, 16)
        progress._bar.refresh()
    shown = text.getvalue()
    assert "3/8" in shown
    assert "16 cached" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_the_progress_of_a_rollout_prints_nothing_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    with RolloutProgress(Console(file=text), total=8) as progress:
        progress.show(8, 100, 0)
    assert text.getvalue() == ""
