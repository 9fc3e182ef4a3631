"""The life of a request: waiting, running, preempted, finished."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

__all__ = ["REQUEST_INITIAL", "REQUEST_TRANSITIONS", "RequestState", "RequestTransition", "RequestTrigger", "follow"]


class RequestState(StrEnum):
    __hash__ = str.__hash__  # the members are keys of a look-up that every request makes; that of Enum is Python code

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestTrigger(StrEnum):
    __hash__ = str.__hash__

    ADMIT = "admit"
    PREEMPT = "preempt"
    READMIT = "readmit"
    FINISH = "finish"


@frozen
class RequestTransition:
    trigger: RequestTrigger
    source: RequestState
    dest: RequestState
    meaning: str


REQUEST_INITIAL = RequestState.WAITING

REQUEST_TRANSITIONS: tuple[RequestTransition, ...] = (
    RequestTransition(RequestTrigger.ADMIT, RequestState.WAITING, RequestState.RUNNING, "pages allocated"),
    RequestTransition(RequestTrigger.PREEMPT, RequestState.RUNNING, RequestState.PREEMPTED, "pages given up"),
    RequestTransition(RequestTrigger.READMIT, RequestState.PREEMPTED, RequestState.RUNNING, "pages allocated again"),
    RequestTransition(RequestTrigger.FINISH, RequestState.WAITING, RequestState.FINISHED, "aborted before its start"),
    RequestTransition(
        RequestTrigger.FINISH, RequestState.RUNNING, RequestState.FINISHED, "stop, length, abort or error"
    ),
    RequestTransition(RequestTrigger.FINISH, RequestState.PREEMPTED, RequestState.FINISHED, "aborted while set aside"),
)

_DEST = {(row.source, row.trigger): row.dest for row in REQUEST_TRANSITIONS}


def follow(state: RequestState, trigger: RequestTrigger) -> RequestState:
    """The state after `trigger`. A request changes state a few times in thousands of steps, but there are many of
    them, so this is a table look-up rather than a machine object each; `KeyError` would be a bug of the scheduler."""
    return _DEST[state, trigger]
