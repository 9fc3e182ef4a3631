"""Chat templates, rendered as transformers renders them, in a sandbox: they come with the model, so from anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aengine.errors import CheckpointError, PromptError

__all__ = ["compile_template", "render_template"]


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for trainers; what it encloses is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error


def render_template(
    template: Template,
    messages: Sequence[Mapping[str, str]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
) -> str:
    """Raises `PromptError` when the template refuses the messages or trips over them."""
    try:
        return template.render(
            **special_tokens,
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise PromptError(f"the model's chat template refuses these messages: {error}") from error


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
