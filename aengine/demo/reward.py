"""The rule-based reward: the right answer, in a required short form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aengine.outputs import CompletionOutput

__all__ = ["MAX_WORDS", "reward", "sample_reward"]

MAX_WORDS = 8
NAMED, FINISHED, SHORT = 0.2, 0.3, 0.5


def reward(text: str, finished: bool, answers: Sequence[str]) -> float:
    """0 without a right answer, whatever the form. Else 0.2 for naming it, 0.3 more for coming to an end by itself,
    and 0.5 more for having ended within eight words."""
    if not _names_one(text, answers):
        return 0.0
    if not finished:
        return NAMED
    return NAMED + FINISHED + (SHORT if len(text.split()) <= MAX_WORDS else 0.0)


def sample_reward(sample: CompletionOutput, answers: Sequence[str]) -> float:
    return reward(sample.text or "", sample.finish_reason == "stop", answers)


def _names_one(text: str, answers: Sequence[str]) -> bool:
    """As whole words, in any case."""
    return any(re.search(rf"\b{re.escape(answer)}\b", text, re.IGNORECASE) for answer in answers)
