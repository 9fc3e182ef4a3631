"""`aengine diagram`: the state machines as Mermaid source."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from aengine.cli.report import JsonOption
from statemachines.render import policy_diagram, report, request_diagram

__all__ = ["diagram"]


class Machine(StrEnum):
    POLICY = "policy"
    REQUEST = "request"
    ALL = "all"


def diagram(
    machine: Annotated[Machine, typer.Argument(help="Which machine; 'all' prints the tables too.")] = Machine.POLICY,
    as_json: JsonOption = False,
) -> None:
    """Print a state machine as Mermaid source."""
    texts = {Machine.POLICY: policy_diagram, Machine.REQUEST: request_diagram, Machine.ALL: report}
    text = texts[machine]()
    typer.echo(json.dumps({"machine": machine.value, "text": text}) if as_json else text)
