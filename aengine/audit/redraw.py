"""Teacher forcing and redraws: what the tokens of a record would be, and their log-probabilities, in a given context.

Only `Decoder` and the sampler are shared with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from aengine.audit.context import Context
from aengine.audit.forcing import Passage, force
from aengine.audit.record import SampleRecord
from aengine.audit.verdict import Recomputed
from aengine.errors import EngineError
from aengine.model.decoder import Decoder
from aengine.model.weights import DecoderWeights
from aengine.sampling.history import TokenHistory
from aengine.sampling.sampler import Draw, sample

__all__ = ["Question", "nothing_drawn", "redraw"]

LOGIT_ROWS = 256
NOTHING_DRAWN = -1


@frozen(eq=False)
class Question:
    """What would the tokens of `record` be, and their log-probabilities, if `contexts` were what made them?"""

    record: SampleRecord
    contexts: tuple[Context, ...]

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(version for context in self.contexts for version in context.versions)

    @property
    def num_positions(self) -> int:
        return sum(context.stretches[-1].end for context in self.contexts)


def redraw(
    decoder: Decoder,
    questions: Sequence[Question],
    weights: Mapping[int, DecoderWeights],
    eos_token_ids: tuple[int, ...] = (),
) -> list[Recomputed]:
    """Answers all questions together; `weights` holds every version they name. Changes `decoder.weights`."""
    found = [nothing_drawn(len(question.record.token_ids)) for question in questions]
    rows = _rows(questions, decoder, weights)
    histories = [_history(question.record) for question in questions]
    for version in sorted({row.version for row in rows}):
        decoder.weights = weights[version]
        drawn_under = [row for row in rows if row.version == version]
        for first in range(0, len(drawn_under), LOGIT_ROWS):
            turn = drawn_under[first : first + LOGIT_ROWS]
            logits = decoder.logits(torch.stack([row.hidden for row in turn]))  # [L, V]
            _Turn(questions, histories, turn, logits, eos_token_ids).fill(found)
    return found


@frozen(eq=False)
class _Row:
    """One output token whose logits follow from one hidden state."""

    question: int
    position: int
    version: int
    hidden: Tensor  # [hidden]


def _rows(questions: Sequence[Question], decoder: Decoder, weights: Mapping[int, DecoderWeights]) -> list[_Row]:
    """The hidden state before every token of every question, by one batch of passages."""
    asked = [(number, context) for number, question in enumerate(questions) for context in question.contexts]
    passages = []
    for number, context in asked:
        record = questions[number].record
        tokens = np.array([*record.prompt_token_ids, *record.token_ids], dtype=np.int64)
        first_row = len(record.prompt_token_ids) + context.first_token - 1
        passages.append(Passage(tokens[: context.stretches[-1].end], context.stretches, first_row))
    rows = []
    for (number, context), hidden in zip(asked, force(decoder, weights, passages), strict=True):
        first = len(questions[number].record.prompt_token_ids) - 1
        for token, state in zip(range(context.first_token, context.last_token), hidden, strict=True):
            rows.append(_Row(number, token, context.version_at(first + token), state))
    return rows


@frozen(eq=False)
class _Turn:
    """Some rows of logits, on each of which a token is drawn again, and the recorded one scored where that differs."""

    questions: Sequence[Question]
    histories: Sequence[TokenHistory]
    rows: Sequence[_Row]
    logits: Tensor
    eos_token_ids: tuple[int, ...]

    def fill(self, found: Sequence[Recomputed]) -> None:
        redraws = [n for n, row in enumerate(self.rows) if not self._record(row).has_token_mask]
        drawn = sample(self.logits, [self._draw(n, None) for n in redraws], self.eos_token_ids)
        to_score = set(range(len(self.rows))) - set(redraws)
        for n, result in zip(redraws, drawn, strict=True):
            row = self.rows[n]
            if isinstance(result, EngineError):
                found[row.question].failures[row.position] = str(result)
                continue
            found[row.question].redrawn[row.position] = result.token_id
            if result.top is not None:
                found[row.question].top_logprobs[row.position] = result.top
            if result.token_id == self._token(row):
                self._note(found, row, result.logprob, result.raw_logprob)
            else:
                to_score.add(n)
        self._score(sorted(to_score), found)

    def _score(self, rows: Sequence[int], found: Sequence[Recomputed]) -> None:
        scored = sample(self.logits, [self._draw(n, self._token(self.rows[n])) for n in rows], self.eos_token_ids)
        for n, result in zip(rows, scored, strict=True):
            if isinstance(result, EngineError):
                found[self.rows[n].question].failures[self.rows[n].position] = str(result)
            else:
                self._note(found, self.rows[n], result.logprob, result.raw_logprob)

    def _draw(self, n: int, token: int | None) -> Draw:
        row = self.rows[n]
        record, history = self._record(row), self.histories[row.question]
        params = record.params
        if params.logprobs is not None and record.top_logprobs is None:
            params = attrs.evolve(params, logprobs=None)  # nothing to compare them with
        return Draw(n, params, record.seed, record.index, row.position, history, token=token)

    def _record(self, row: _Row) -> SampleRecord:
        return self.questions[row.question].record

    def _token(self, row: _Row) -> int:
        return self._record(row).token_ids[row.position]

    def _note(self, found: Sequence[Recomputed], row: _Row, logprob: float, raw_logprob: float) -> None:
        found[row.question].logprobs[row.position] = logprob
        found[row.question].raw_logprobs[row.position] = raw_logprob


def _history(record: SampleRecord) -> TokenHistory:
    return TokenHistory([*record.prompt_token_ids, *record.token_ids], len(record.prompt_token_ids))


def nothing_drawn(num_tokens: int) -> Recomputed:
    """The answer before anything was computed."""
    nothing = np.full(num_tokens, np.nan, dtype=np.float32)
    return Recomputed(np.full(num_tokens, NOTHING_DRAWN, dtype=np.int64), nothing, nothing.copy(), {})
