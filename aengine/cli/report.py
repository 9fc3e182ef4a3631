"""How commands end: one sentence instead of a traceback, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from aengine.errors import EngineError

__all__ = ["DebugOption", "JsonOption", "errors_in_one_sentence", "new_console"]

INTERRUPTED = 130

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def new_console() -> Console:
    """For people: standard error, so that standard output carries results only."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


@contextmanager
def errors_in_one_sentence(debug: bool) -> Iterator[None]:
    """Turns what a command may raise into a sentence on standard error and an exit status.

    `debug` lets exceptions through as they are; Ctrl-C ends with status 130 either way.
    """
    try:
        yield
    except KeyboardInterrupt:
        new_console().print("interrupted; what was finished is kept")
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            raise
        new_console().print(Text.assemble(("error: ", "bold red"), _sentence(_first(error))))
        raise typer.Exit(1) from None


def _first(error: BaseException) -> BaseException:
    """Of several that ended a task group together, one is enough for a sentence."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _sentence(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return reason if error.filename is None else f"{error.filename}: {reason}"
    return f"{type(error).__name__}: {error} (a fault of the program; --debug shows where)"
