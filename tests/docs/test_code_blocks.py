"""The Python blocks of the documentation run as printed, page by page, in order."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))


def compiled_blocks(page: Path) -> list[CodeType]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = []
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        source = "\n" * line + match.group(1)
        blocks.append(compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    return blocks


@pytest.mark.parametrize("page", [page for page in PAGES if compiled_blocks(page)], ids=str)
async def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for block in compiled_blocks(page):
        result = eval(block, names)
        if inspect.iscoroutine(result):
            await result


def test_the_diagram_in_the_text_is_the_generated_one() -> None:
    from statemachines.render import policy_diagram

    text = (ROOT / "docs/concepts/weight-updates.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{policy_diagram()}\n```" in text
