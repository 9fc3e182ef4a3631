"""What happens when a loop of the engine breaks: nobody waits for it any longer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aengine.assembly import Assembly
from aengine.errors import EngineDeadError

__all__ = ["supervise"]

logger = logging.getLogger(__name__)


async def supervise(parts: Assembly, name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Run one of the engine's loops until it is cancelled.

    If it raises, or is cancelled when nobody has closed the engine (a dying event loop does that), every request,
    update and pause under way ends with `EngineDeadError`, and every later call is refused with it; what the loop
    raised is the cause. The engine then only waits to be closed.
    """
    try:
        await loop()
    except Exception as cause:
        logger.critical("the %s loop died", name, exc_info=cause, extra={"loop": name})
        error = EngineDeadError(f"the {name} loop died: {cause!r}; close the engine")
        error.__cause__ = cause
        _tell(parts, error)
    except BaseException:
        if not parts.gate.is_stopped:
            _tell(parts, EngineDeadError(f"the {name} loop was cancelled; close the engine"))
        raise


def _tell(parts: Assembly, error: EngineDeadError) -> None:
    parts.scheduler.die(error)
    parts.updater.withdraw_all(error)
    parts.gate.stop(error)
