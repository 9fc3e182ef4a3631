"""A sample's tokens as its own next draws see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

__all__ = ["OutputView", "TokenHistory"]


@define(eq=False)
class TokenHistory:
    """How often each token is in a sample so far. `tokens` is the prompt followed by the output, and may grow.

    Each token is counted once, when a draw behind it asks, so a draw costs what the distinct tokens cost.
    """

    tokens: Sequence[int] = field(repr=False)
    num_prompt: int
    _counts: dict[int, int] = field(factory=dict, init=False, repr=False)
    _num_counted: int = field(default=0, init=False)

    def counts(self, num_output: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens in the prompt or among the first `num_output` of the output, and how often each is in the latter."""
        if num_output < self._num_counted or not self._counts:
            self._counts, self._num_counted = dict.fromkeys(self.tokens[: self.num_prompt], 0), 0
        for token in self.tokens[self.num_prompt + self._num_counted : self.num_prompt + num_output]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._num_counted = num_output
        size = len(self._counts)
        ids = np.fromiter(self._counts, np.int64, size)
        return ids, np.fromiter(self._counts.values(), np.float32, size)

    def output(self, num_output: int) -> OutputView:
        return OutputView(self.tokens, self.num_prompt, num_output)


class OutputView(Sequence[int]):
    """The first `length` output tokens of a sample, not copied."""

    def __init__(self, tokens: Sequence[int], num_prompt: int, length: int) -> None:
        self._tokens, self._start, self._length = tokens, num_prompt, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> list[int]: ...

    def __getitem__(self, key: int | slice) -> int | list[int]:
        places = range(self._start, self._start + self._length)[key]
        if isinstance(places, range):
            return [self._tokens[place] for place in places]
        return self._tokens[places]
