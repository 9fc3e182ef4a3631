"""Verdicts follow from what differs, by how much, and whether the machine is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from audit_support import new_record

from aengine.audit.finish import check_finish
from aengine.audit.record import SampleRecord
from aengine.audit.verdict import (
    Comparison,
    Consistent,
    NotReproduced,
    OtherBits,
    Recomputed,
    Reproduced,
    judge,
)
from aengine.params import SamplingParams

ELSEWHERE = ("processor: another",)


def found_for(record: SampleRecord, **changes: dict[int, Any]) -> Recomputed:
    """What would reproduce the record, changed at single positions."""
    found = Recomputed(
        np.array(record.token_ids, dtype=np.int64),
        np.array(record.logprobs, dtype=np.float32),
        np.array(record.raw_logprobs, dtype=np.float32),
        {},
    )
    for name, values in changes.items():
        for position, value in values.items():
            getattr(found, name)[position] = value
    return found


def test_equal_bits_are_reproduced() -> None:
    record = new_record()
    assert judge(record, found_for(record)) == Reproduced(num_tokens=4)


def test_one_other_bit_is_seen() -> None:
    record = new_record()
    other = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    verdict = judge(record, found_for(record, logprobs={2: other}))
    assert verdict == OtherBits(position=2, num_differing=1, largest_difference=other + 0.5)


def test_minus_zero_is_another_bit() -> None:
    record = new_record(logprobs=(0.0, -0.5, -0.5, -0.5))
    assert isinstance(judge(record, found_for(record, logprobs={0: -0.0})), OtherBits)


def test_far_log_probabilities_are_not_reproduced_though_the_tokens_are() -> None:
    record = new_record()
    verdict = judge(record, found_for(record, raw_logprobs={1: -0.3}))
    assert isinstance(verdict, NotReproduced)
    assert (verdict.position, "-0.25" in verdict.reason, "-0.3" in verdict.reason) == (1, True, True)


def test_another_draw_is_not_reproduced() -> None:
    record = new_record()
    verdict = judge(record, found_for(record, redrawn={3: 9}))
    assert verdict == NotReproduced(
        position=3, reason="token 3: the record has 4, seed 1 draws 9", largest_difference=0.0
    )


def test_a_failure_is_named() -> None:
    record = new_record()
    found = found_for(record, logprobs={1: np.nan}, raw_logprobs={1: np.nan}, redrawn={1: -1})
    found.failures[1] = "non-finite logits"
    assert judge(record, found) == NotReproduced(position=1, reason="token 1: non-finite logits")


@pytest.mark.parametrize(("redrawn", "is_consistent"), [({}, True), ({5: 9}, True), ({5: 9, 6: 9, 7: 9}, False)])
def test_another_machine_may_round_otherwise_and_draw_otherwise_at_a_border(
    redrawn: dict[int, int], is_consistent: bool
) -> None:
    record = new_record(tokens=tuple(range(20)))
    found = found_for(record, redrawn=redrawn, logprobs={3: -0.50001})
    verdict = judge(record, found, machine_differences=ELSEWHERE)
    assert isinstance(verdict, Consistent if is_consistent else NotReproduced)
    if isinstance(verdict, Consistent):
        assert verdict.redraw_agreement == 1 - len(redrawn) / 20
        assert verdict.machine_differences == ELSEWHERE


def test_another_machine_must_still_be_near() -> None:
    record = new_record()
    verdict = judge(record, found_for(record, logprobs={3: -0.6}), machine_differences=ELSEWHERE)
    assert isinstance(verdict, NotReproduced)
    nearer = judge(record, found_for(record, logprobs={3: -0.6}), machine_differences=ELSEWHERE, epsilon=0.2)
    assert isinstance(nearer, Consistent)


def test_under_a_mask_only_raw_log_probabilities_count() -> None:
    record = new_record(has_token_mask=True)
    scored = found_for(record, logprobs={0: -9.0}, redrawn={2: 9})
    assert judge(record, scored) == Reproduced(num_tokens=4, is_redrawn=False)
    assert isinstance(judge(record, found_for(record, raw_logprobs={0: -9.0})), NotReproduced)


def test_a_missing_number_is_infinitely_far() -> None:
    record = new_record()
    comparison = Comparison.of(record, found_for(record, logprobs={0: np.nan}), epsilon=1.0)
    assert (comparison.first_difference, comparison.largest_difference) == (0, np.inf)
    unlikely = Comparison.of(record, found_for(record, logprobs={0: -np.inf}))
    assert unlikely.largest_difference == np.inf


ENDS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "by length": ({}, None, None),
    "by EOS": ({"tokens": (1, 2, 7), "finish_reason": "stop", "stop_reason": 7}, None, None),
    "by a stop token": (
        {"finish_reason": "stop", "stop_reason": 4, "params": SamplingParams(stop_token_ids=(4,))},
        None,
        None,
    ),
    "by the context": ({"params": SamplingParams(), "num_prompt": 16}, None, None),
    "by length too early": ({"params": SamplingParams(max_tokens=5)}, "goes on", None),
    "by length too late": ({"params": SamplingParams(max_tokens=3)}, "may have 3", None),
    "behind EOS": ({"tokens": (1, 7, 3, 4)}, "goes on after token 1", None),
    "behind EOS, which it may ignore": (
        {"tokens": (1, 7), "params": SamplingParams(max_tokens=2, ignore_eos=True)},
        None,
        None,
    ),
    "behind EOS, before the minimum": (
        {"tokens": (1, 7, 3), "params": SamplingParams(max_tokens=3, min_tokens=2)},
        None,
        None,
    ),
    "by a token that ends nothing": ({"finish_reason": "stop", "stop_reason": 4}, "ends by length", None),
    "by length where EOS ended it": ({"tokens": (1, 7)}, "ends by stop", None),
    "by a stop string": (
        {"finish_reason": "stop", "stop_reason": "x", "params": SamplingParams(stop=("x",))},
        None,
        "the stop string",
    ),
    "by a string that it does not stop at": (
        {"finish_reason": "stop", "stop_reason": "y", "params": SamplingParams(stop=("x",))},
        "'y'",
        None,
    ),
    "by a string where no string stops it": ({"finish_reason": "stop", "stop_reason": "y"}, "'y'", None),
    "by length at a string": ({"stop_reason": "y"}, "ends by length", None),
    "by an abort where its length ended it": ({"finish_reason": "abort"}, "its last token ended it", None),
    "by nothing where EOS ended it": ({"tokens": (1, 7), "finish_reason": None}, "its last token ended it", None),
    "by an abort": ({"finish_reason": "abort", "params": SamplingParams(max_tokens=9)}, None, "why it ended early"),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_is_held_against_the_stop_rule(how: str) -> None:
    fields, wrong, unchecked = ENDS[how]
    check = check_finish(new_record(**fields), eos_token_ids=(7,), max_sequence_len=20)
    assert check.unchecked == unchecked
    assert (check.wrong is None) if wrong is None else (wrong in str(check.wrong))
