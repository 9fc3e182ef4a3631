"""Whether a sample ended where its parameters say it must, as far as a record can show."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from aengine.audit.record import SampleRecord
from aengine.sampling.stop import StopRule

__all__ = ["FinishCheck", "check_finish"]


@frozen
class FinishCheck:
    """`wrong` says what contradicts the record's end, `unchecked` what could not be looked at; None for nothing."""

    wrong: str | None = None
    unchecked: str | None = None


def check_finish(record: SampleRecord, eos_token_ids: Iterable[int], max_sequence_len: int) -> FinishCheck:
    """Holds the recorded end against the stop rule.

    `max_sequence_len` is the most tokens that context and page pool allowed. Not seen: stop strings, as a record has
    no tokenizer.
    """
    room = max_sequence_len - len(record.prompt_token_ids)
    rule = StopRule.of(record.params, eos_token_ids, room)
    num_tokens = len(record.token_ids)
    if num_tokens > rule.max_tokens:
        return FinishCheck(f"it has {num_tokens} tokens, and may have {rule.max_tokens}")
    for count, token in enumerate(record.token_ids[:-1], 1):
        if (due := rule.check(token, count)) is not None:
            return FinishCheck(f"it goes on after token {count - 1}, where it had to end ({due.finish_reason})")
    return _check_last(record, rule)


def _check_last(record: SampleRecord, rule: StopRule) -> FinishCheck:
    due = rule.check(record.token_ids[-1], len(record.token_ids)) if record.token_ids else None
    reason, stop_reason = record.finish_reason, record.stop_reason
    if reason in (None, "abort", "error"):
        if due is None:
            return FinishCheck(unchecked="why it ended early")
        return FinishCheck(f"the record says {reason}, but its last token ended it ({due.finish_reason})")
    if isinstance(stop_reason, str) and reason == "stop":
        if stop_reason not in record.params.stop:
            return FinishCheck(f"it ended at the stop string {stop_reason!r}, which its parameters do not name")
        return FinishCheck(unchecked="the stop string")
    if due is None or (due.finish_reason, due.stop_reason) != (reason, stop_reason):
        says = f"{reason} ({stop_reason})" if stop_reason is not None else str(reason)
        rather = "goes on" if due is None else f"ends by {due.finish_reason} ({due.stop_reason})"
        return FinishCheck(f"the record says it ended by {says}; by its parameters it {rather}")
    return FinishCheck()
