"""The audit of a rollouts file: which samples, in which order, and how what was found is put down."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import define, field

from aengine.audit.context import contexts_of
from aengine.audit.forensics import Forensics, needs_explanation
from aengine.audit.machine import differing_facts, machine_facts
from aengine.audit.oracle import oracle_logprobs
from aengine.audit.policies import PolicyWeights
from aengine.audit.record import PolicyRecord, RolloutHeader, SampleRecord, encode_record
from aengine.audit.replay import EPSILONS, Replay, Replayer
from aengine.audit.report import AuditHeader, AuditLine, AuditSummary, ReportFile, fingerprint
from aengine.audit.rollout_file import read_rollouts
from aengine.audit.verdict import Unauditable
from aengine.errors import ProvenanceError, RolloutFileError
from aengine.kernels.warmup import warm_up_torch

__all__ = ["AuditPlan", "plan_audit", "run_audit"]

BATCH = 32
"""Samples between two looks at the report file."""
ORACLE_EVERY = 100
NUM_RELATIVES = 64
Progress = Callable[[AuditSummary], None]
"""Called now and then with what the samples add up to so far."""


@define
class AuditPlan:
    """What a first reading of the file found."""

    path: Path
    header: RolloutHeader
    digests: dict[int, str]
    """Of every version that the file names a digest of."""
    draws: list[tuple[int, int]] = field(factory=list, repr=False)
    """(seed, index) of every sample in the file."""
    places: list[int] = field(factory=list, repr=False)
    """The samples to audit."""
    oracle_places: frozenset[int] = field(factory=frozenset, repr=False)

    @property
    def subject(self) -> str:
        """A digest of all that the samples have in common: the header, and the weights of every version."""
        parts = [encode_record(self.header), *(f"{number}:{self.digests[number]}".encode() for number in self.digests)]
        return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]

    @property
    def machine_differences(self) -> tuple[str, ...]:
        return differing_facts(self.header.machine, machine_facts())

    def relatives(self, place: int) -> list[tuple[int, int]]:
        """The draws of the samples around one, the nearest first."""
        first = max(0, place - NUM_RELATIVES // 2)
        around = range(first, min(len(self.draws), place + NUM_RELATIVES // 2))
        return [self.draws[other] for other in sorted(around, key=lambda other: abs(other - place))]


def plan_audit(path: Path, share: float = 1.0) -> AuditPlan:
    """Read a file once and choose a `share` of its samples, by their prompt ids and indices alone; at least one.

    Raises `RolloutFileError`, and `OSError`.
    """
    plan: AuditPlan | None = None
    single: list[int] = []
    for record in read_rollouts(path):
        if isinstance(record, RolloutHeader):
            plan = AuditPlan(path, record, {record.policy.number: record.policy.digest})
        elif plan is not None and isinstance(record, PolicyRecord):
            known = plan.digests.setdefault(record.policy.number, record.policy.digest)
            if known != record.policy.digest:
                raise RolloutFileError(f"{path} has two digests for version {record.policy.number}")
        elif plan is not None and isinstance(record, SampleRecord):
            place = len(plan.draws)
            plan.draws.append((record.seed, record.index))
            is_chosen = _is_chosen(record, share)
            if is_chosen:
                plan.places.append(place)
            if (is_chosen or place == 0) and _version_of(record) is not None:
                single.append(place)
    if plan is None or not plan.draws:
        raise RolloutFileError(f"{path} holds no samples")
    plan.places = plan.places or [0]
    chosen = set(plan.places)
    plan.oracle_places = frozenset([place for place in single if place in chosen][::ORACLE_EVERY])
    return plan


def run_audit(
    plan: AuditPlan,
    policies: PolicyWeights,
    *,
    report: Path | None = None,
    explain: int = 20,
    progress: Progress | None = None,
) -> AuditSummary:
    """Audit what was planned, going on with `report` where it has lines already.

    `explain` is how many of the samples that do not reproduce are looked into; each may take minutes.
    """
    warm_up_torch()  # for the oracle
    started, summary = time.perf_counter(), AuditSummary(left_out=len(plan.draws) - len(plan.places))
    audit = _Audit.of(plan, policies, explain)
    if report is None:
        audit.run({}, summary, lambda lines: None, progress)
    else:
        header = AuditHeader(
            rollouts=plan.path.name,
            subject=plan.subject,
            machine=machine_facts(),
            machine_differences=plan.machine_differences,
        )
        with ReportFile(report, header) as file:
            audit.run(file.done, summary, file.append, progress)
    summary.seconds = time.perf_counter() - started
    return summary


@define(eq=False)
class _Audit:
    plan: AuditPlan
    policies: PolicyWeights
    replayer: Replayer
    forensics: Forensics
    to_explain: int

    @classmethod
    def of(cls, plan: AuditPlan, policies: PolicyWeights, explain: int) -> _Audit:
        header = plan.header
        replayer = Replayer(
            header.spec,
            policies,
            header.max_sequence_len,
            header.eos_token_ids,
            machine_differences=plan.machine_differences,
            epsilon=EPSILONS[policies.dtype],
            named_versions=frozenset(plan.digests),
        )
        return cls(plan, policies, replayer, Forensics(replayer, policies.versions), explain)

    def run(
        self,
        done: dict[int, AuditLine],
        summary: AuditSummary,
        write: Callable[[Sequence[AuditLine]], None],
        progress: Progress | None,
    ) -> None:
        for batch in self._batches():
            todo = []
            for place, record in batch:
                line = done.get(place)
                if line is not None and line.is_final and line.fingerprint == fingerprint(record):
                    summary.add(line)
                else:
                    todo.append((place, record))
            lines = self._lines(todo)
            write(lines)
            for line in lines:
                summary.add(line)
            if progress is not None:
                progress(summary)

    def _batches(self) -> Iterator[list[tuple[int, SampleRecord]]]:
        wanted, batch = set(self.plan.places), []
        samples = (record for record in read_rollouts(self.plan.path) if isinstance(record, SampleRecord))
        for place, record in enumerate(samples):
            if place in wanted:
                batch.append((place, record))
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def _lines(self, batch: Sequence[tuple[int, SampleRecord]]) -> list[AuditLine]:
        replays = self.replayer.replay([record for _, record in batch])
        return [self._line(place, replay) for (place, _), replay in zip(batch, replays, strict=True)]

    def _line(self, place: int, replay: Replay) -> AuditLine:
        record, explanation = replay.record, None
        if needs_explanation(replay) and self.to_explain > 0:
            self.to_explain -= 1
            explanation = self.forensics.explain(replay, self.plan.relatives(place))
        difference = None
        if place in self.plan.oracle_places and not isinstance(replay.verdict, Unauditable):
            difference = self._oracle_difference(record)
        return AuditLine(
            place=place,
            fingerprint=fingerprint(record),
            prompt_id=record.prompt_id,
            index=record.index,
            verdict=replay.verdict,
            explanation=explanation,
            oracle_difference=difference,
            oracle_agrees=difference is None or difference <= self.replayer.epsilon,
        )

    def _oracle_difference(self, record: SampleRecord) -> float:
        """From the recorded numbers: plain torch in float64, which shares no kernel with engine and replay."""
        version = _version_of(record)
        assert version is not None
        tensors = self.policies.load(version)
        expected = oracle_logprobs(
            self.plan.header.spec, tensors, record.prompt_token_ids, record.token_ids, dtype=torch.float64
        )
        return float(np.abs(expected.numpy() - np.array(record.raw_logprobs)).max(initial=0.0))


def _version_of(record: SampleRecord) -> int | None:
    """The one version that made a sample with tokens; None where there are several, or the labels are at odds."""
    try:
        contexts = contexts_of(
            len(record.prompt_token_ids), len(record.token_ids), record.version_spans, record.kv_spans
        )
    except ProvenanceError:
        return None
    versions = {version for context in contexts for version in context.versions}
    return versions.pop() if len(versions) == 1 else None


def _is_chosen(record: SampleRecord, share: float) -> bool:
    """The same samples whenever the same file is audited."""
    digest = hashlib.sha256(f"{record.prompt_id}\0{record.index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64
