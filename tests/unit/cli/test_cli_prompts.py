"""Prompts files: what a line may hold, and how faulty ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import write_lines
from talking_support import word_tokenizer

from aengine.cli.prompts import LineFault, faults_error, read_prompts
from aengine.errors import TokenizerMissingError


def test_text_ids_and_messages_become_token_ids(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello world"},
        {"prompt_token_ids": [5, 4], "answer": "other keys are left alone"},
        {"messages": [{"role": "user", "content": "good night"}], "id": "chat"},
    ]
    source = read_prompts(write_lines(tmp_path / "p.jsonl", lines))
    assert [list(entry.prompt(word_tokenizer())) for entry in source.entries] == [[4, 5], [5, 4], [1, 6, 7, 0, 2]]


def test_an_id_is_the_one_given_or_made_from_the_line_number(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "id": 17}, "", {"prompt": "b"}, {"prompt": "c", "id": "x"}]
    source = read_prompts(write_lines(tmp_path / "p.jsonl", lines))
    assert [entry.prompt_id for entry in source.entries] == ["17", "line-3", "x"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "malformed"),
        ("[1, 2]", "Expected `object`"),
        ('{"prompt": 3}', "Expected `str | null`"),
        ('{"prompt_token_ids": [1, "2"]}', "Expected `int`"),
        ('{"prompt_token_ids": [1, true]}', "Expected `int`"),
        ('{"messages": [{"role": 1}]}', "Expected `str`"),
        ('{"id": "x"}', "has none"),
        ('{"prompt": "a", "messages": []}', "has prompt and messages"),
        ('{"prompt": "a", "id": "first"}', "was used in line 1 already"),
    ],
)
def test_a_faulty_line_is_named_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    good = {"prompt": "a", "id": "first"}
    source = read_prompts(write_lines(tmp_path / "p.jsonl", [good, line, {"prompt": "b"}]))
    assert [fault.line for fault in source.faults] == [2]
    assert reason in source.faults[0].reason
    assert [entry.line for entry in source.entries] == [1, 3]


def test_bytes_that_are_no_utf8_are_a_fault_of_their_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    source = read_prompts(path)
    assert ([entry.line for entry in source.entries], [fault.line for fault in source.faults]) == ([1], [2])


def test_ten_faulty_lines_are_named_and_the_rest_counted() -> None:
    faults = [LineFault(number, "broken") for number in range(1, 14)]
    message = str(faults_error(Path("p.jsonl"), faults))
    assert message.startswith("p.jsonl: 13 lines cannot be used: line 1: broken; ")
    assert message.endswith("line 10: broken; and 3 more")


def test_messages_need_a_tokenizer(tmp_path: Path) -> None:
    source = read_prompts(write_lines(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}]))
    with pytest.raises(TokenizerMissingError, match="chat messages"):
        source.entries[0].prompt(None)
