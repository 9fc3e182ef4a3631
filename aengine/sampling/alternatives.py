"""What else could have been sampled: the likeliest tokens of a row, and the set that truncation kept."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["KeptRow"]

Floats = NDArray[np.float32]


@frozen(eq=False)
class KeptRow:
    """A row of logits [V] as it was sampled from, and what the kernel found out about it (`kernels.sample.ROW`)."""

    logits: Floats
    peak: float
    scale: float
    log_mass: float
    cut: float
    last: int

    def support(self) -> NDArray[np.int32] | None:
        """The tokens that could have been sampled, in order of their ids; None where those are all."""
        kept = self._kept()
        return None if kept.all() else np.flatnonzero(kept).astype(np.int32)

    def top(self, count: int, token: int) -> tuple[tuple[int, float], ...]:
        """The `count` likeliest tokens that could have been sampled, equal ones in order of their ids, and `token`,
        at the end if it is not among them; each with the log-probability that sampling it would have recorded."""
        ids = self._likeliest(count)
        if token not in ids:
            ids = np.append(ids, token)
        return tuple((int(one), self._logprob(one)) for one in ids)

    def _kept(self) -> NDArray[np.bool_]:
        if self.cut == -np.inf:
            return self.logits > -np.inf
        kept = self.logits > self.cut
        tied = np.flatnonzero(self.logits == np.float32(self.cut))
        kept[tied[tied <= self.last]] = True
        return kept

    def _likeliest(self, count: int) -> NDArray[np.int64]:
        """What truncation keeps comes first in the order, so the likeliest of all are looked at first."""
        if count == 0:
            return np.empty(0, np.int64)
        place = len(self.logits) - count
        least = np.partition(self.logits, place)[place]
        ids = np.flatnonzero(self.logits >= least)  # ties of the last one included
        ids = ids[np.argsort(-self.logits[ids], kind="stable")][:count]
        return ids[[self._is_kept(int(token)) for token in ids]]

    def _logprob(self, token: int) -> float:
        """The kernel's arithmetic, step by step, so that the bits are equal."""
        if not self._is_kept(token):
            return -np.inf
        distance = (float(self.logits[token]) - self.peak) * self.scale
        return float(np.float32(distance - self.log_mass))

    def _is_kept(self, token: int) -> bool:
        logit = float(self.logits[token])
        return logit > self.cut or (logit == self.cut and token <= self.last and logit > -np.inf)
