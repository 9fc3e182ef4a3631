"""Hub ids go through `huggingface_hub` where it is installed; failures are one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading_support import tiny_module

from aengine.errors import CheckpointError, ModelUnavailableError
from aengine.model.checkpoint import load_checkpoint
from aengine.model.hub import is_hub_id


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("name", False),
        ("a/b/c", False),
        ("/org/name", False),
        ("./name", False),
        ("../name", False),
        ("org/", False),
        ("org/na me", False),
    ],
)
def test_a_hub_id_is_an_owner_and_a_name(source: str, expected: bool) -> None:
    assert is_hub_id(source) == expected


def test_a_hub_id_is_loaded_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_module().save_pretrained(tmp_path)
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake(snapshot_download))
    assert load_checkpoint("org/name").name == "org/name"
    assert asked == [("org/name", ["*.json", "*.jinja", "*.safetensors"])]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("no network\nhelp: try again"), "no network$"), (RuntimeError(), "RuntimeError$")],
)
def test_a_hub_that_does_not_answer_is_explained(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake(snapshot_download))
    with pytest.raises(ModelUnavailableError, match=f"'org/name' is not a path here .* from the Hub: {reason}"):
        load_checkpoint("org/name")


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailableError, match="the package huggingface_hub must be installed"):
        load_checkpoint("org/name")


def test_a_path_object_is_never_taken_for_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match="'org/name' is neither a directory"):
        load_checkpoint(Path("org/name"))


def fake(snapshot_download: Any) -> Any:
    return SimpleNamespace(snapshot_download=snapshot_download)
