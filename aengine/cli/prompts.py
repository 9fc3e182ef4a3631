"""Reading `prompts.jsonl`: one prompt a line, as text, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from attrs import field, frozen

from aengine.errors import PromptsFileError, TokenizerMissingError
from aengine.model.tokenizer import Tokenizer
from aengine.prompts import Prompt

__all__ = ["LineFault", "PromptEntry", "PromptsFile", "faults_error", "read_prompts"]

MAX_FAULTS_NAMED = 10
CONTENT_FIELDS = ("prompt", "prompt_token_ids", "messages")


class PromptLine(msgspec.Struct):
    """What a line may hold; exactly one of the last three. Other keys are left alone."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None


@frozen
class LineFault:
    line: int
    reason: str


@frozen
class PromptEntry:
    """One good line. `prompt_id` is the line's `id`, or `line-` and its number."""

    line: int
    prompt_id: str
    content: PromptLine = field(repr=False)

    def prompt(self, tokenizer: Tokenizer | None) -> Prompt:
        """Token ids wherever they can be had. Raises `TokenizerMissingError` for messages without a tokenizer, and
        `PromptError` for messages the chat template refuses."""
        content = self.content
        if content.prompt_token_ids is not None:
            return content.prompt_token_ids
        if content.prompt is not None:
            return content.prompt if tokenizer is None else tokenizer.encode(content.prompt)
        assert content.messages is not None
        if tokenizer is None:
            raise TokenizerMissingError("the prompt is chat messages, and the model has no tokenizer; give token ids")
        return tokenizer.apply_chat_template(content.messages)


@frozen
class PromptsFile:
    path: Path
    entries: tuple[PromptEntry, ...]
    faults: tuple[LineFault, ...]


def read_prompts(path: Path) -> PromptsFile:
    """Good lines and faulty ones; blank lines are neither. Raises `OSError` where the file cannot be read."""
    entries: dict[str, PromptEntry] = {}
    faults = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = _parse(number, line)
                if entry.prompt_id in entries:
                    raise ValueError(f"id {entry.prompt_id!r} was used in line {entries[entry.prompt_id].line} already")
                entries[entry.prompt_id] = entry
            except ValueError as error:
                faults.append(LineFault(number, str(error)))
    return PromptsFile(path, tuple(entries.values()), tuple(faults))


def _parse(number: int, line: bytes) -> PromptEntry:
    """Raises `ValueError` with the reason."""
    content = msgspec.json.decode(line, type=PromptLine)
    given = [name for name in CONTENT_FIELDS if getattr(content, name) is not None]
    if len(given) != 1:
        names = ", ".join(CONTENT_FIELDS)
        raise ValueError(f"needs exactly one of {names}; has {' and '.join(given) if given else 'none'}")
    return PromptEntry(number, f"line-{number}" if content.id is None else str(content.id), content)


def faults_error(path: Path, faults: Sequence[LineFault]) -> PromptsFileError:
    """Names up to ten of the lines."""
    named = "; ".join(f"line {fault.line}: {fault.reason}" for fault in faults[:MAX_FAULTS_NAMED])
    more = f"; and {len(faults) - MAX_FAULTS_NAMED} more" if len(faults) > MAX_FAULTS_NAMED else ""
    lines = "1 line" if len(faults) == 1 else f"{len(faults)} lines"
    return PromptsFileError(f"{path}: {lines} cannot be used: {named}{more}")
