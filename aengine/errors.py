"""Every error the engine raises on purpose.

One base, `EngineError`; names end in `Error`; the offending value is in the message and in an attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from statemachines.policy import IllegalTransitionError

if TYPE_CHECKING:
    from aengine.outputs import RequestOutput

__all__ = [
    "AttributionError",
    "AuditError",
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineError",
    "EngineInvalidatedError",
    "EventLoopRunningError",
    "GrammarError",
    "IllegalTransitionError",
    "InsideWeightUpdateError",
    "LedgerError",
    "ModelUnavailableError",
    "NonFiniteLogitsError",
    "OutOfPagesError",
    "OutOfRowsError",
    "PageAccountingError",
    "PromptError",
    "PromptsFileError",
    "ProvenanceError",
    "QueueFullError",
    "RequestFailedError",
    "RequestIdInUseError",
    "RolloutBatchError",
    "RolloutFileError",
    "SamplingParamsError",
    "SnapshotError",
    "StaleLeaseError",
    "StaleVersionError",
    "TokenMaskError",
    "TokenizerMissingError",
    "UnknownVersionError",
    "UnsupportedModelError",
    "VerificationError",
    "WeightUpdateError",
    "WeightsMismatchError",
]


class EngineError(Exception):
    """Base of all errors of this package."""


class ConfigError(EngineError, ValueError):
    """A field of `EngineConfig` has a value that cannot work."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"EngineConfig.{field} = {value!r}: {reason}")
        self.field, self.value, self.reason = field, value, reason


class SamplingParamsError(EngineError, ValueError):
    """A field of `SamplingParams` has a value that cannot work."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"SamplingParams.{field} = {value!r}: {reason}")
        self.field, self.value, self.reason = field, value, reason


class PromptError(EngineError, ValueError):
    """A prompt was refused at submit; nothing of it reached the scheduler."""


class TokenizerMissingError(EngineError):
    """Text was given or asked for, and the model has no tokenizer."""


class GrammarError(EngineError, ValueError):
    """A schema, pattern or grammar cannot be enforced, or an output has left it."""


class TokenMaskError(EngineError):
    """A token mask raised (the cause is chained), gave something that is not a mask, or allowed no token."""


class RequestIdInUseError(EngineError, ValueError):
    """A request with this id is still alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"a request with id {request_id!r} is still alive; ids may be used again once it has finished")
        self.request_id = request_id


class QueueFullError(EngineError):
    """`max_num_queued_reqs` requests are waiting already."""


class RequestFailedError(EngineError):
    """A request ended with reason `"error"`; the cause is chained.

    `outputs` holds what the call would have returned, in order: the failed request with the tokens it had, and those
    submitted with it, which ran to their end.
    """

    def __init__(self, request_id: str, reason: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(f"request {request_id!r} failed: {reason}")
        self.request_id, self.reason, self.outputs = request_id, reason, tuple(outputs)


class RolloutBatchError(EngineError, ValueError):
    """Samples, rewards or tensors made from them do not fit together."""


class NonFiniteLogitsError(EngineError):
    """The model produced NaN or infinite logits for a row; no token was made up from them."""


class OutOfPagesError(EngineError):
    """The page pool cannot serve an allocation now; nothing was taken."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV pages needed, {available} available")
        self.needed, self.available = needed, available


class OutOfRowsError(OutOfPagesError):
    """Every row of the request table is taken, so no pages can be given to one more task now; nothing was taken."""

    def __init__(self, num_rows: int) -> None:
        EngineError.__init__(self, f"all {num_rows} rows of the request table are taken (max_num_seqs)")
        self.needed, self.available = 1, 0


class PageAccountingError(EngineError):
    """A page was used against its state (freed twice, shared while free); no count was changed."""


class StaleLeaseError(EngineError):
    """An operation was tried with a lease that has ended, or in a state that does not permit it."""


class EngineClosedError(EngineError):
    """The engine is closed, or not open yet."""


class EngineDeadError(EngineError):
    """The scheduler loop died; the cause is chained. The engine must be closed."""


class EngineInvalidatedError(EngineError):
    """The engine is fenced: its weights are unknown, and only a committed full update ends that."""


class EventLoopRunningError(EngineError, RuntimeError):
    """A call that blocks was made where an event loop runs, which it would stop."""


class WeightUpdateError(EngineError):
    """An update was not committed.

    `stage` is `"stage"`, `"drain"`, `"swap"` or `"commit"`; `engine_state` is the state the engine is in afterwards.
    """

    def __init__(self, stage: str, engine_state: str, reason: str) -> None:
        super().__init__(f"weight update failed in {stage}, engine is {engine_state}: {reason}")
        self.stage, self.engine_state, self.reason = stage, engine_state, reason


class WeightsMismatchError(EngineError, ValueError):
    """Tensors do not fit the model; found before anything was written."""

    def __init__(
        self, *, missing: Sequence[str] = (), unexpected: Sequence[str] = (), wrong: Sequence[str] = ()
    ) -> None:
        parts = [
            f"{label} ({len(names)}): {', '.join(list(names)[:8])}{', …' if len(names) > 8 else ''}"
            for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong", wrong))
            if names
        ]
        super().__init__("weights do not fit the model; " + "; ".join(parts))
        self.missing, self.unexpected, self.wrong = tuple(missing), tuple(unexpected), tuple(wrong)


class AttributionError(EngineError):
    """Weights shared with a trainer were changed outside of `weight_update()`, so no token can be attributed."""


class InsideWeightUpdateError(EngineError):
    """The engine was called from inside a `weight_update()` body, where the call could never return."""


class StaleVersionError(EngineError, ValueError):
    """An update's version is not greater than the current one, or `expected_version` is not the current one."""


class LedgerError(EngineError):
    """A ledger is damaged (`line` says where), cannot be continued, or cannot be written (`OSError` as cause)."""

    def __init__(self, path: Path, reason: str, line: int | None = None) -> None:
        super().__init__(f"ledger {path}{'' if line is None else f', line {line}'}: {reason}")
        self.path, self.reason, self.line = path, reason, line


class CheckpointError(EngineError):
    """A checkpoint is missing, truncated, or does not agree with its config."""


class UnsupportedModelError(CheckpointError):
    """The config names an architecture or feature the decoder does not implement."""


class ModelUnavailableError(EngineError):
    """A known model is not in the cache and could not be fetched."""


class PromptsFileError(EngineError, ValueError):
    """Lines of a prompts file cannot be used; each is named with its number."""


class RolloutFileError(EngineError, ValueError):
    """A rollouts file is damaged, belongs to another run, or is being written by one."""


class SnapshotError(EngineError):
    """A snapshot store is missing, damaged or cannot be used; `path` says which of its files."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"snapshots: {path}: {reason}")
        self.path, self.reason = path, reason


class VerificationError(EngineError):
    """A sample is not what its label says: the labelled weights give its tokens other log-probabilities."""


class ProvenanceError(EngineError, ValueError):
    """The spans of a sample contradict its tokens or each other, so that nobody can say what made it."""


class UnknownVersionError(EngineError, LookupError):
    """The weights of a policy version are not at hand."""

    def __init__(self, version: int, known: Sequence[int]) -> None:
        known_ones = ", ".join(map(str, known)) or "none"
        super().__init__(f"the weights of policy version {version} are not at hand (known: {known_ones})")
        self.version, self.known = version, tuple(known)


class AuditError(EngineError, ValueError):
    """An audit cannot be made as asked, or the report that it is to go on with is damaged or of another one."""
