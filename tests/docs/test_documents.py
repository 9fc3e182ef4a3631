"""What the documents print is what the code says, and their programs run."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from talking_support import talking_checkpoint

from aengine.model.checkpoint import save_checkpoint
from statemachines.render import policy_diagram, report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINE = re.compile(r"0 -\d+\.\d+ .*")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory that stands for the model of the printed programs."""
    save_checkpoint(talking_checkpoint(), tmp_path / "model")
    return str(tmp_path / "model")


def test_the_diagram_of_the_readme_is_that_of_the_code() -> None:
    assert [block.strip() for block in blocks("mermaid")] == [policy_diagram()]


def test_the_generated_page_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "generated" / "statemachines.md").read_text(encoding="utf-8")
    assert page == report() + "\n"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[<>=\[ ]", name)[0] for name in wanted} - {project["name"]}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = {cell.strip() for line in page.splitlines() for part in line.split("|") for cell in part.split(",")}
    assert names - explained == set()


def test_no_document_names_the_package_of_somebody_else() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if "pip install aengine" in page.read_text(encoding="utf-8")]


def test_the_script_of_the_readme_runs(model: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks("python")[0].replace("smollm2-135m", model), encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 4
    assert all(LINE.fullmatch(line) for line in done.stdout.splitlines())


def test_the_notebook_cell_of_the_readme_runs(model: str, tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell(blocks("python")[1].replace("smollm2-135m", model))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = notebook.cells[0].outputs
    assert len(output.text.splitlines()) == 4
    assert all(LINE.fullmatch(line) for line in output.text.splitlines())
