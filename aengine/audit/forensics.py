"""Why a sample does not reproduce: the first finding under which all of it follows, bit for bit.

Cheap looks at what differs come first, then other contexts. One fault is looked for, not several at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec
from attrs import define, frozen

from aengine.audit.context import Context, contexts_of, restrict
from aengine.audit.explanation import (
    EditedLogprob,
    EditedTokens,
    Explanation,
    NearWeights,
    NotDrawn,
    OtherParams,
    OtherSeed,
    TokenEdit,
    Unexplained,
)
from aengine.audit.hypotheses import Hypothesis, later_versions, other_versions, stale_prefixes
from aengine.audit.record import SampleRecord
from aengine.audit.redraw import Question
from aengine.audit.replay import Replay, Replayer
from aengine.audit.verdict import MIN_AGREEMENT, Comparison, NotReproduced, OtherBits, Recomputed
from aengine.errors import ProvenanceError

__all__ = ["Forensics", "needs_explanation"]

MAX_EDITS = 4
MAX_SEEDS = 128
SEED_TOKENS = 16
"""Tokens that a seed must draw before all of them are tried."""
MAX_ROWS = 50_000
"""Rows spent on the borders of a stale prefix, of one sample."""
NEAR = 0.1


def needs_explanation(replay: Replay) -> bool:
    return isinstance(replay.verdict, NotReproduced | OtherBits)


@define(eq=False)
class Forensics:
    """Explains replays of `replayer`. `versions` are those whose weights it can load."""

    replayer: Replayer
    versions: Sequence[int]

    def explain(self, replay: Replay, relatives: Iterable[tuple[int, int]] = ()) -> Explanation | None:
        """The best explanation; None where nothing was computed or the end alone is wrong.

        `relatives` are (seed, index) pairs of samples that this one may have been confused with. Takes as long as some
        dozen replays of the sample, or some hundred where nothing fits.
        """
        if not needs_explanation(replay) or not replay.record.token_ids:
            return None
        case = _Case.of(self.replayer, replay, self._by_likelihood(replay.record))
        if case.comparison is not None and case.comparison.is_same:
            return None
        if not case.labelled:
            return case.from_contexts() or case.last_resort()
        return case.from_the_numbers(relatives) or case.from_edits() or case.from_contexts() or case.last_resort()

    def _by_likelihood(self, record: SampleRecord) -> list[int]:
        """A wrong version is one just before the label, mostly."""
        label = max((span.version for span in record.version_spans), default=0)
        return sorted(self.versions, key=lambda version: (version > label, abs(version - label)))


@frozen(eq=False)
class _Case:
    replayer: Replayer
    replay: Replay
    versions: Sequence[int]
    comparison: Comparison | None
    """Of the record with what its label gives; None where that was not computed."""
    labelled: tuple[Context, ...]
    """Empty where the labels contradict themselves."""

    @classmethod
    def of(cls, replayer: Replayer, replay: Replay, versions: Sequence[int]) -> _Case:
        found = replay.found
        seen = None if found is None else Comparison.of(replay.record, found, _allowed(replayer))
        return cls(replayer, replay, versions, seen, _labelled(replay.record))

    @property
    def record(self) -> SampleRecord:
        return self.replay.record

    def _compare(self, record: SampleRecord, found: Recomputed) -> Comparison:
        return Comparison.of(record, found, _allowed(self.replayer))

    def _agrees(self, comparison: Comparison) -> bool:
        """Whether all of it follows; elsewhere than on the machine it was made on, a draw at a border may not."""
        if not self.replayer.machine_differences:
            return comparison.is_same
        near = bool((comparison.logprobs & comparison.raw).all())
        return near and float(comparison.tokens.mean()) >= MIN_AGREEMENT

    # ---- what differs says what was changed

    def from_the_numbers(self, relatives: Iterable[tuple[int, int]]) -> Explanation | None:
        seen, found = self.comparison, self.replay.found
        if seen is None or found is None:
            return None
        if len(seen.tokens) > 1 and _is_one_number(seen):
            return _edited_logprob(self.record, found, seen)
        if not seen.raw.all():
            return None
        if not seen.logprobs.all():
            return OtherParams(int((~seen.logprobs).sum()))
        return self._from_seeds(relatives, int((~seen.tokens).sum()))

    def _from_seeds(self, relatives: Iterable[tuple[int, int]], num_tokens: int) -> Explanation:
        record = self.record
        plausible = chain(
            relatives,
            ((record.seed, index) for index in range(max(record.params.n, 16))),
            ((record.seed + step, record.index) for step in (-1, 1)),
            () if record.params.seed is None else ((record.params.seed, record.index),),
        )
        pairs = [pair for pair in dict.fromkeys(plausible) if pair != (record.seed, record.index) and _is_draw(*pair)]
        pairs = pairs[:MAX_SEEDS]
        length = min(SEED_TOKENS, len(record.token_ids))
        beginnings = restrict(self.labelled, 0, length)
        records = [msgspec.structs.replace(record, seed=seed, index=index) for seed, index in pairs]
        for candidate, found in self._ask([Question(one, beginnings) for one in records]):
            if found.redrawn[:length].tolist() != list(record.token_ids[:length]):
                continue
            for whole, answer in self._ask([Question(candidate.record, self.labelled)]):
                if self._agrees(self._compare(whole.record, answer)):
                    return OtherSeed(whole.record.seed, whole.record.index, record.seed, record.index)
        return NotDrawn(num_tokens, len(pairs))

    # ---- tokens put back

    def from_edits(self) -> Explanation | None:
        """Where another token was drawn, it is put back, and the rest compared again. The numbers recorded beside an
        edited token must be its own or those of the one that was drawn."""
        record, seen, found = self.record, self.comparison, self.replay.found
        edits: list[TokenEdit] = []
        while seen is not None and found is not None:
            position = _first_outside(seen, edits)
            if position is None:
                return EditedTokens(tuple(edits))
            drawn, was_own = int(found.redrawn[position]), bool(seen.raw[position])
            if len(edits) == MAX_EDITS or seen.tokens[position] or drawn < 0:
                return None
            edits.append(TokenEdit(position, record.token_ids[position], drawn))
            ids = (*record.token_ids[:position], drawn, *record.token_ids[position + 1 :])
            record = msgspec.structs.replace(record, token_ids=ids)
            found = next((answer for _, answer in self._ask([Question(record, self.labelled)])), None)
            seen = None if found is None else self._compare(record, found)
            if seen is not None and not (was_own or seen.raw[position]):
                return None
        return None

    # ---- other contexts

    def from_contexts(self) -> Explanation | None:
        """Other versions throughout, then from the first difference on, then in a prefix."""
        record, labelled, seen = self.record, self.labelled, self.comparison
        explanation = self._first_fitting(list(other_versions(record, labelled, self.versions)))
        if explanation is not None or seen is None or seen.raw.all():
            return explanation
        token = int(seen.raw.argmin())
        explanation = self._first_fitting(list(later_versions(record, labelled, token, self.versions)))
        if explanation is not None:
            return explanation
        room = MAX_ROWS // (len(record.prompt_token_ids) + token)
        for group in stale_prefixes(record, labelled, token, self.versions):
            explanation = self._first_fitting(self._promising(group[:room], token))
            room -= len(group)
            if explanation is not None or room <= 0:
                break
        return explanation

    def _promising(self, hypotheses: Sequence[Hypothesis], token: int) -> list[Hypothesis]:
        """Those under which this one token follows."""
        questions = {
            Question(self.record, restrict(hypothesis.contexts, token, token + 1)): hypothesis
            for hypothesis in hypotheses
        }
        return [
            questions[question]
            for question, found in self._ask(list(questions))
            if (seen := self._compare(self.record, found)).raw[token] and seen.logprobs[token]
        ]

    def _first_fitting(self, hypotheses: Sequence[Hypothesis]) -> Explanation | None:
        questions = {Question(self.record, hypothesis.contexts): hypothesis for hypothesis in hypotheses}
        for question, found in self._ask(list(questions)):
            if self._agrees(self._compare(self.record, found)):
                return questions[question].explanation
        return None

    def last_resort(self) -> Explanation:
        seen, found = self.comparison, self.replay.found
        if seen is not None and found is not None and _is_one_number(seen):
            return _edited_logprob(self.record, found, seen)
        if seen is not None and seen.largest_difference <= NEAR:
            return NearWeights(seen.largest_difference, seen.num_differing)
        return Unexplained(tuple(sorted(self.versions)))

    def _ask(self, questions: Sequence[Question]) -> Iterator[tuple[Question, Recomputed]]:
        """The questions that could be answered, with their answers."""
        for question, answer in zip(questions, self.replayer.recompute(questions), strict=True):
            if isinstance(answer, Recomputed):
                yield question, answer


def _allowed(replayer: Replayer) -> float:
    """How far apart log-probabilities may be and still count as the same."""
    return replayer.epsilon if replayer.machine_differences else 0.0


def _labelled(record: SampleRecord) -> tuple[Context, ...]:
    try:
        return contexts_of(len(record.prompt_token_ids), len(record.token_ids), record.version_spans, record.kv_spans)
    except ProvenanceError:
        return ()


def _first_outside(seen: Comparison, edits: Sequence[TokenEdit]) -> int | None:
    """The first difference that is not at an edited token: its recorded log-probabilities may be of either token."""
    same = seen.same.copy()
    same[[edit.position for edit in edits]] = True
    return None if same.all() else int(same.argmin())


def _is_one_number(seen: Comparison) -> bool:
    """Whether the log-probabilities of one token are all that differs."""
    return bool(seen.tokens.all()) and int((~(seen.logprobs & seen.raw)).sum()) == 1


def _edited_logprob(record: SampleRecord, found: Recomputed, seen: Comparison) -> EditedLogprob:
    position = int((seen.logprobs & seen.raw).argmin())
    names = [name for name, same in (("logprobs", seen.logprobs), ("raw_logprobs", seen.raw)) if not same[position]]
    recorded, computed = (getattr(one, names[0])[position] for one in (record, found))
    return EditedLogprob(position, " and ".join(names), recorded, float(computed))


def _is_draw(seed: int, index: int) -> bool:
    """Whether the generator has such draws; a record may say anything."""
    return 0 <= seed < 2**64 and 0 <= index < 2**32
