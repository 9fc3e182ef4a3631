"""Replay: compute samples again from weights, prompt and seed, on a path that shares neither scheduler nor cache with
the engine that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from attrs import define, field, frozen

from aengine.audit.context import contexts_of
from aengine.audit.finish import FinishCheck, check_finish
from aengine.audit.record import SampleRecord
from aengine.audit.redraw import Question, nothing_drawn, redraw
from aengine.audit.verdict import NotReproduced, Recomputed, Unauditable, Verdict, judge
from aengine.errors import EngineError, ProvenanceError, SamplingParamsError
from aengine.model.decoder import Decoder
from aengine.model.spec import ModelSpec
from aengine.model.weights import DecoderWeights

__all__ = ["EPSILONS", "Replay", "Replayer"]

EPSILONS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far other bits may be off, by the type that was computed in."""
POSITIONS_AT_ONCE = 4096
"""Positions whose KV is held at once, unless a single sample has more."""
VERSIONS_AT_ONCE = 2


@frozen(eq=False)
class Replay:
    """A sample, what was found for it (None where it was not computed), and what that means."""

    record: SampleRecord
    verdict: Verdict
    found: Recomputed | None = None


@define(eq=False)
class Replayer:
    """Replays samples in the thread that calls it; several may work at once, each with its own storage.

    `weights_of` gives a version's weights or raises an `EngineError`, such as `UnknownVersionError`; it is asked again
    for every batch, and at most two versions are held at once unless one sample has more. Their products must be those
    the engine used, or the bits differ. `machine_differences` says in which facts this machine differs from the one
    that made the samples; where there are any, or a sample's own label promises no bits, nearness within `epsilon` is
    asked for instead. `max_sequence_len` is the most tokens a sample may have, its prompt included.
    """

    spec: ModelSpec
    weights_of: Callable[[int], DecoderWeights]
    max_sequence_len: int
    eos_token_ids: tuple[int, ...] = ()
    machine_differences: tuple[str, ...] = ()
    epsilon: float = 1e-3
    named_versions: frozenset[int] | None = None
    """Versions that are bound to weights by a digest; a sample labelled with another is unauditable. None: all are."""
    _decoder: Decoder | None = field(default=None, init=False)

    def replay(self, records: Sequence[SampleRecord]) -> list[Replay]:
        """A verdict on each record, in order. Nothing about a sample raises; what does is a fault of the machine."""
        replays: dict[int, Replay] = {}
        questions: dict[int, Question] = {}
        for place, record in enumerate(records):
            question = self._ask(record)
            if isinstance(question, Question):
                questions[place] = question
            else:
                replays[place] = Replay(record, question)
        found = self.recompute(list(questions.values()))
        for (place, question), answer in zip(questions.items(), found, strict=True):
            replays[place] = Replay(question.record, *self._answer(question, answer))
        return [replays[place] for place in range(len(records))]

    def recompute(self, questions: Sequence[Question]) -> list[Recomputed | EngineError]:
        """What each question asks for; in its place the error that `weights_of` raised, where it did."""
        results: list[Recomputed | EngineError | None] = [None] * len(questions)
        for batch in _batches(questions):
            weights, errors = self._load({version for place in batch for version in questions[place].versions})
            ready = []
            for place in batch:
                missing = questions[place].versions & errors.keys()
                if missing:
                    results[place] = errors[min(missing)]
                else:
                    ready.append(place)
            computed = self._compute([questions[place] for place in ready], weights)
            for place, result in zip(ready, computed, strict=True):
                results[place] = result
        return [result for result in results if result is not None]

    def _ask(self, record: SampleRecord) -> Question | Verdict:
        if complaint := _complaint(record, self.spec.vocab_size, self.max_sequence_len):
            return Unauditable(reason=complaint)
        num_prompt, num_tokens = len(record.prompt_token_ids), len(record.token_ids)
        try:
            question = Question(record, contexts_of(num_prompt, num_tokens, record.version_spans, record.kv_spans))
        except ProvenanceError as error:
            return NotReproduced(position=None, reason=f"its labels cannot be true: {error}")
        if self.named_versions is not None and (unnamed := question.versions - self.named_versions):
            return Unauditable(reason=f"nothing names the digest of version {min(unnamed)}")
        return question

    def _answer(self, question: Question, answer: Recomputed | EngineError) -> tuple[Verdict, Recomputed | None]:
        if isinstance(answer, EngineError):
            return Unauditable(reason=str(answer)), None
        record = question.record
        finish = check_finish(record, self.eos_token_ids, self.max_sequence_len)
        verdict = judge(
            record,
            answer,
            machine_differences=(*self.machine_differences, *_label_differences(record)),
            epsilon=self.epsilon,
            finish_unchecked=finish.unchecked,
        )
        contradiction = _contradiction(record, finish)
        if contradiction is not None and not isinstance(verdict, NotReproduced):
            verdict = NotReproduced(position=None, reason=contradiction)
        return verdict, answer

    def _load(self, versions: Iterable[int]) -> tuple[dict[int, DecoderWeights], dict[int, EngineError]]:
        weights: dict[int, DecoderWeights] = {}
        errors: dict[int, EngineError] = {}
        for version in sorted(versions):
            try:
                weights[version] = self.weights_of(version)
            except EngineError as error:
                errors[version] = error
        return weights, errors

    def _compute(self, questions: Sequence[Question], weights: dict[int, DecoderWeights]) -> list[Recomputed]:
        if not weights:
            return [nothing_drawn(len(question.record.token_ids)) for question in questions]
        if self._decoder is None:
            self._decoder = Decoder(self.spec, next(iter(weights.values())), self.max_sequence_len)
        return redraw(self._decoder, questions, weights, self.eos_token_ids)


def _contradiction(record: SampleRecord, finish: FinishCheck) -> str | None:
    """What the record says against itself."""
    if finish.wrong is not None:
        return f"its end is not that of its parameters: {finish.wrong}"
    if record.params.seed not in (None, record.seed):
        return f"its seed {record.seed} is not that of its parameters, {record.params.seed}"
    return None


def _label_differences(record: SampleRecord) -> tuple[str, ...]:
    return () if record.numerics == "invariant" else (f"numerics {record.numerics}, which promises no bits",)


def _batches(questions: Sequence[Question]) -> Iterator[list[int]]:
    """Places of the questions to compute together: as many as memory allows, in order."""
    batch: list[int] = []
    positions, versions = 0, frozenset[int]()
    for place, question in enumerate(questions):
        together = versions | question.versions
        if batch and (
            positions + question.num_positions > POSITIONS_AT_ONCE
            or len(together) > max(VERSIONS_AT_ONCE, len(question.versions))
        ):
            yield batch
            batch, positions, together = [], 0, question.versions
        batch.append(place)
        positions, versions = positions + question.num_positions, together
    if batch:
        yield batch


def _complaint(record: SampleRecord, vocab_size: int, max_sequence_len: int) -> str | None:
    """Why the record cannot be computed at all."""
    ids = [*record.prompt_token_ids, *record.token_ids]
    if not record.prompt_token_ids:
        return "it has no prompt"
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        return f"token id {wrong[0]} is outside the vocabulary of {vocab_size}"
    if len(ids) > max_sequence_len:
        return f"it has {len(ids)} tokens, prompt included; at most {max_sequence_len} are possible"
    if not len(record.token_ids) == len(record.logprobs) == len(record.raw_logprobs):
        counts = f"{len(record.token_ids)}, {len(record.logprobs)}, {len(record.raw_logprobs)}"
        return f"token_ids, logprobs and raw_logprobs differ in length: {counts}"
    if not 0 <= record.seed < 2**64 or not 0 <= record.index < 2**32:
        return f"seed {record.seed} or index {record.index} is out of range"
    try:
        record.params.check_vocabulary(vocab_size)
    except SamplingParamsError as error:
        return f"its parameters do not go with the model: {error}"
    return None
