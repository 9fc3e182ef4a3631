"""What a replay says of one sample."""

from __future__ import annotations

import numpy as np
from attrs import Factory, frozen
from msgspec import Struct
from numpy.typing import NDArray

from aengine.audit.record import SampleRecord
from aengine.outputs import Alternatives

__all__ = [
    "Comparison",
    "Consistent",
    "NotReproduced",
    "OtherBits",
    "Recomputed",
    "Reproduced",
    "Unauditable",
    "Verdict",
    "judge",
]

MIN_AGREEMENT = 0.9
"""Share of tokens that must be drawn again on another machine: a draw differs only where the random number falls within
rounding of a border between two tokens."""


class Reproduced(Struct, frozen=True, kw_only=True, tag="reproduced"):
    """Every token was drawn again from its seed, and both log-probabilities have the recorded bits.

    `is_redrawn` is False for a sample drawn under a token mask, which is not in the record: then only `raw_logprobs`
    were compared. `finish_unchecked` names what of its end a record cannot show, if anything.
    """

    num_tokens: int
    is_redrawn: bool = True
    finish_unchecked: str | None = None


class OtherBits(Struct, frozen=True, kw_only=True, tag="other_bits"):
    """Every token was drawn again, but `num_differing` log-probabilities have other bits, the first at `position`."""

    position: int
    num_differing: int
    largest_difference: float
    machine_differences: tuple[str, ...] = ()


class Consistent(Struct, frozen=True, kw_only=True, tag="consistent"):
    """On another machine: log-probabilities are within `epsilon`, and `redraw_agreement` of the tokens (1.0 is all)
    were drawn again."""

    largest_difference: float
    epsilon: float
    redraw_agreement: float
    machine_differences: tuple[str, ...]


class NotReproduced(Struct, frozen=True, kw_only=True, tag="not_reproduced"):
    """`position` is the first output token that differs, None where the labels or the end are wrong, not a token."""

    position: int | None
    reason: str
    largest_difference: float | None = None


class Unauditable(Struct, frozen=True, kw_only=True, tag="unauditable"):
    """Nothing was computed, as no one can say from what."""

    reason: str


Verdict = Reproduced | OtherBits | Consistent | NotReproduced | Unauditable


@frozen(eq=False)
class Recomputed:
    """What a replay found for the T tokens of a sample."""

    redrawn: NDArray[np.int64]  # [T]; -1 where none could be drawn, or the sample cannot be redrawn
    logprobs: NDArray[np.float32]  # [T], of the recorded tokens
    raw_logprobs: NDArray[np.float32]  # [T]
    failures: dict[int, str]
    """Why there is no number (NaN) at these positions."""
    top_logprobs: dict[int, Alternatives] = Factory(dict)
    """Alternatives at each position, where the record has them and the sample can be redrawn."""


@frozen(eq=False)
class Comparison:
    """A record beside what was recomputed: [T] each, True where equal. Equal means the same bits, or, with `epsilon`,
    no farther apart than that. For a sample under a mask only `raw` says something; the others are True."""

    tokens: NDArray[np.bool_]
    logprobs: NDArray[np.bool_]
    raw: NDArray[np.bool_]
    distances: NDArray[np.float64]
    """The larger of the two differences; infinite where a number is missing."""

    @classmethod
    def of(cls, record: SampleRecord, found: Recomputed, epsilon: float = 0.0) -> Comparison:
        everywhere = np.ones(len(record.token_ids), dtype=np.bool_)
        raw, raw_distances = _compare(record.raw_logprobs, found.raw_logprobs, epsilon)
        if record.has_token_mask:
            return cls(everywhere, everywhere, raw, raw_distances)
        logprobs, distances = _compare(record.logprobs, found.logprobs, epsilon)
        tokens = np.array(record.token_ids, dtype=np.int64) == found.redrawn
        return cls(tokens, logprobs, raw, np.maximum(distances, raw_distances))

    @property
    def same(self) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self.tokens & self.logprobs & self.raw
        return same

    @property
    def is_same(self) -> bool:
        return bool(self.same.all())

    @property
    def first_difference(self) -> int | None:
        return None if self.is_same else int(np.argmin(self.same))

    @property
    def num_differing(self) -> int:
        """Of the 2 T log-probabilities."""
        return int((~self.logprobs).sum() + (~self.raw).sum())

    @property
    def largest_difference(self) -> float:
        return float(self.distances.max(initial=0.0))


def _compare(
    recorded: tuple[float, ...], found: NDArray[np.float32], epsilon: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Where they are the same, and how far apart. A recorded number that is no float32 has no bits to equal."""
    ours, theirs = found.astype(np.float64), np.array(recorded, dtype=np.float64)
    same = ours.view(np.int64) == theirs.view(np.int64)
    with np.errstate(invalid="ignore"):  # of two infinities
        distances = np.nan_to_num(np.abs(ours - theirs), nan=np.inf, posinf=np.inf)
    distances[same] = 0.0
    if epsilon:
        same |= distances <= epsilon
    return same, distances


def judge(
    record: SampleRecord,
    found: Recomputed,
    *,
    machine_differences: tuple[str, ...] = (),
    epsilon: float = 1e-3,
    finish_unchecked: str | None = None,
) -> Verdict:
    """The verdict on a sample whose labels and end are in order. `epsilon` says how far other bits may be off."""
    exact = Comparison.of(record, found)
    if exact.is_same:
        if (place := _other_alternatives(record, found)) is not None:
            return NotReproduced(position=place, reason=f"token {place}: its top_logprobs are not what was computed")
        is_redrawn = not record.has_token_mask
        return Reproduced(num_tokens=len(record.token_ids), is_redrawn=is_redrawn, finish_unchecked=finish_unchecked)
    agreement = float(exact.tokens.mean())
    is_near = exact.largest_difference <= epsilon
    if is_near and machine_differences and agreement >= MIN_AGREEMENT:
        return Consistent(
            largest_difference=exact.largest_difference,
            epsilon=epsilon,
            redraw_agreement=agreement,
            machine_differences=machine_differences,
        )
    position = exact.first_difference
    assert position is not None
    if is_near and agreement == 1.0:
        return OtherBits(
            position=position,
            num_differing=exact.num_differing,
            largest_difference=exact.largest_difference,
            machine_differences=machine_differences,
        )
    return NotReproduced(
        position=position,
        reason=_reason(record, found, exact, position),
        largest_difference=exact.largest_difference if np.isfinite(exact.largest_difference) else None,
    )


def _other_alternatives(record: SampleRecord, found: Recomputed) -> int | None:
    """The first token whose recorded alternatives differ, by id, order or a bit."""
    if record.top_logprobs is None or record.has_token_mask:
        return None
    if len(record.top_logprobs) != len(record.token_ids):
        return min(len(record.top_logprobs), len(record.token_ids))
    for position, recorded in enumerate(record.top_logprobs):
        if recorded != found.top_logprobs.get(position):
            return position
    return None


def _reason(record: SampleRecord, found: Recomputed, comparison: Comparison, position: int) -> str:
    if position in found.failures:
        return f"token {position}: {found.failures[position]}"
    if not comparison.raw[position]:
        recorded, ours = record.raw_logprobs[position], float(found.raw_logprobs[position])
        return (
            f"token {position}: the record has raw log-probability {recorded:.9g}, the labelled weights give {ours:.9g}"
        )
    if not comparison.logprobs[position]:
        recorded, ours = record.logprobs[position], float(found.logprobs[position])
        return f"token {position}: the record has log-probability {recorded:.9g}, the labelled weights give {ours:.9g}"
    redrawn = int(found.redrawn[position])
    return f"token {position}: the record has {record.token_ids[position]}, seed {record.seed} draws {redrawn}"
