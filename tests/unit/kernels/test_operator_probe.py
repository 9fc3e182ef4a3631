"""The probe of everything but products: it passes what holds, and finds out what does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from aengine.errors import EngineError
from aengine.kernels import cpu
from aengine.kernels.formats import FLOAT_TYPES
from aengine.kernels.interface import HeadShape
from aengine.kernels.operator_probe import OPERATORS, DecoderShape, probe_operators
from aengine.kernels.trial import OperatorFinding, Trial, examine, thread_counts, torch_threads
from aengine.kernels.warmup import FUNCTIONS, warm_up_torch
from aengine.sampling import sampler_probe
from aengine.sampling.sampler import Draw, Drawn, sample

TINY = DecoderShape(32, 64, HeadShape(4, 2, 8, 4), 1e-5, 512, has_head_norms=True)
SHAPES = [
    TINY,
    DecoderShape(50, 35, HeadShape(3, 1, 10, 16), 1e-6, 20, has_head_norms=True),
    DecoderShape(576, 1536, HeadShape(9, 3, 64, 16), 1e-5, 8192),
]


def probe_with(operator: str, broken: Callable[..., Any]) -> OperatorFinding:
    """The probe's word on one operator, replaced by `broken`, which gets the true one and its arguments."""
    kernels = SimpleNamespace(**{name: getattr(cpu, name) for name in OPERATORS})
    setattr(kernels, operator, lambda *arguments: broken(getattr(cpu, operator), *arguments))
    findings = {finding.name: finding for finding in probe_operators(TINY, kernels)}
    assert {name for name, finding in findings.items() if not finding.holds} <= {operator}
    return findings[operator]


def spoil(true: Callable[..., Any], arguments: tuple[Any, ...], factor: float) -> Any:
    """The operator with its result, or what it does in place, a little off."""
    result = true(*arguments)
    (arguments[0] if result is None else result).mul_(factor)
    return result


@pytest.mark.parametrize("dtype", FLOAT_TYPES.values(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["tiny", "odd", "smollm2"])
def test_every_operator_holds_here(shape: DecoderShape, dtype: torch.dtype) -> None:
    findings = probe_operators(evolve(shape, dtype=dtype))
    assert [finding for finding in findings if not finding.holds] == []
    assert [finding.name for finding in findings] == [
        name for name in OPERATORS if name != "norm_heads" or shape.has_head_norms
    ]
    assert all(0 < finding.worst_error < 2 * torch.finfo(dtype).eps + 1e-5 for finding in findings)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_an_operator_whose_bits_change_with_the_number_of_rows_is_found_out(name: str, num_rows: int) -> None:
    finding = probe_with(
        name, lambda true, *arguments: spoil(true, arguments, 1 + 1e-6 * (len(arguments[0]) == num_rows))
    )
    assert not finding.holds
    assert finding.complaint.startswith(f"bits change ({num_rows} rows")


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_whose_bits_change_with_the_number_of_threads_is_found_out(name: str) -> None:
    finding = probe_with(
        name, lambda true, *arguments: spoil(true, arguments, 1 + 1e-6 * (torch.get_num_threads() > 1))
    )
    assert f"{thread_counts()[0]} threads" in finding.complaint


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_with_wrong_values_is_found_out(name: str) -> None:
    finding = probe_with(name, lambda true, *arguments: spoil(true, arguments, 1.001))
    assert not finding.holds
    assert finding.complaint.startswith("values are off by")
    assert finding.worst_error == pytest.approx(1e-3, rel=0.1)


def test_a_row_that_sees_its_neighbour_is_found_out() -> None:
    def leak(true: Callable[..., Tensor], x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return true(x, weight, eps) + 1e-7 * x.roll(1, 0)

    assert "bits change" in probe_with("rms_norm", leak).complaint


def test_attention_that_depends_on_the_page_size_is_found_out() -> None:
    def by_page(true: Callable[..., Tensor], qkv: Tensor, rows: Any, kv: Tensor, heads: HeadShape) -> Tensor:
        return true(qkv, rows, kv, heads) * (1 + 1e-6 * (heads.page_size != TINY.heads.page_size))

    assert "arrangement 1" in probe_with("paged_attention", by_page).complaint


def test_a_key_that_is_not_written_is_found_out() -> None:
    def forget(true: Callable[..., None], qkv: Tensor, rotary: Any, rows: Any, kv: Tensor, heads: HeadShape) -> None:
        page = rows.page_tables[rows.sequences[-1], rows.positions[-1] // heads.page_size]
        before = kv[page].clone()
        true(qkv, rotary, rows, kv, heads)
        kv[page] = before

    assert probe_with("rotate_and_write", forget).complaint.startswith("values are off by inf")


def test_the_sign_of_zero_is_a_bit() -> None:
    def signed(rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), 1) * (-1 if len(rows) == 2 else 1)

    trial = Trial("zero", "torch", signed, 100, (lambda operator, pick: operator(pick),), lambda pick, got: 0.0, 0.0)
    assert "2 rows" in examine(trial, (1,)).complaint


def test_the_probe_leaves_thread_count_and_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    with torch_threads(2):
        probe_operators(evolve(TINY, eps=2e-5))
        sampler_probe.probe_sampler(61)
        assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("vocab_size", [5, 64, 50_000])
def test_the_sampler_holds_here(vocab_size: int) -> None:
    finding = sampler_probe.probe_sampler(vocab_size)
    assert finding.holds, finding.complaint
    assert finding.worst_error < 1e-5


def sampler_finding(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., list[Drawn]]) -> OperatorFinding:
    monkeypatch.setattr(sampler_probe.sampler, "sample", broken)
    return sampler_probe.probe_sampler(64)


def drawn(results: list[Drawn | EngineError], **changes: Callable[[Drawn], Any]) -> list[Drawn]:
    return [
        evolve(one, **{name: change(one) for name, change in changes.items()})
        for one in results
        if isinstance(one, Drawn)
    ]


def test_a_sampler_that_looks_at_its_batch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
        return drawn(sample(logits, draws), logprob=lambda one: one.logprob + 1e-6 * (len(draws) == 3))

    assert sampler_finding(monkeypatch, broken).complaint.startswith("bits change (3 rows")


@pytest.mark.parametrize("name", ["logprob", "raw_logprob"])
def test_a_sampler_with_wrong_logprobs_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
        return drawn(sample(logits, draws), **{name: lambda one: getattr(one, name) + 0.01})

    assert sampler_finding(monkeypatch, broken).worst_error == pytest.approx(0.01, rel=0.01)


def test_a_sampler_that_draws_the_wrong_token_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
        return drawn(sample(logits, [evolve(draw, position=draw.position + 1) for draw in draws]))

    assert sampler_finding(monkeypatch, broken).complaint.startswith("values are off by")


def test_elementary_functions_of_torch_are_right_after_the_warm_up() -> None:
    warm_up_torch()
    x = torch.linspace(0.01, 0.99, 200_001)
    for function in FUNCTIONS:
        exact = function(x.double())
        assert float(((function(x).double() - exact).abs() / (1 + exact.abs())).max()) < 1e-6, function
