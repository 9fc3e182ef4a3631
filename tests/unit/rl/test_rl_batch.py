"""From request outputs to padded tensors, and to a trainer's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.errors import RolloutBatchError
from aengine.outputs import CompletionOutput, RequestOutput, VersionSpan
from aengine.rl.batch import RolloutBatch

PAD = 99
SIDES: list[Literal["left", "right"]] = ["left", "right"]


def completion(token_ids: Sequence[int], index: int = 0, **fields: Any) -> CompletionOutput:
    length = len(token_ids)
    given: dict[str, Any] = {
        "index": index,
        "token_ids": tuple(token_ids),
        "text": None,
        "logprobs": tuple(-0.5 - token / 8 for token in token_ids),
        "raw_logprobs": tuple(-1.5 - token / 8 for token in token_ids),
        "finish_reason": "stop",
        "stop_reason": None,
        "version_spans": (VersionSpan(3, 0, length),) if length else (),
        "kv_spans": (),
        "seed": 0,
    }
    return CompletionOutput(**{**given, **fields})


def request(name: str, prompt: Sequence[int], *samples: CompletionOutput) -> RequestOutput:
    return RequestOutput(name, tuple(prompt), samples, True, 0, 0)


def two_groups() -> list[RequestOutput]:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    return [
        request("a", [1, 2, 3], completion([10, 11]), completion([12, 13, 14], 1, version_spans=spans)),
        request("b", [4], completion([15], finish_reason="length")),
    ]


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD)
    assert batch.shape == (2, 2, 3, 3)
    assert batch.prompt_ids.tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert batch.prompt_mask.tolist() == [[True, True, True], [False, False, True]]
    assert batch.response_ids.tolist() == [[[10, 11, PAD], [12, 13, 14]], [[15, PAD, PAD], [PAD, PAD, PAD]]]
    assert batch.response_mask.sum(-1).tolist() == [[2, 3], [1, 0]]
    assert batch.logprobs[0].tolist() == [[-1.75, -1.875, 0.0], [-2.0, -2.125, -2.25]]
    assert batch.raw_logprobs[1, 0].tolist() == [-3.375, 0.0, 0.0]
    assert batch.versions.tolist() == [[[3, 3, -1], [4, 5, 5]], [[3, -1, -1], [-1, -1, -1]]]


def test_what_is_known_of_each_sample_is_kept_and_ragged_groups_are_filled_up() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD)
    assert batch.rewards.tolist() == [[1.0, 0.0], [0.5, 0.0]]
    assert batch.sample_mask.tolist() == [[True, True], [True, False]]
    assert batch.truncated.tolist() == [[False, False], [True, False]]
    assert batch.finish_reasons == (("stop", "stop"), ("length", None))
    assert batch.group_ids == ("a", "b")


def test_types_are_those_of_the_contract() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD)
    assert {batch.prompt_ids.dtype, batch.response_ids.dtype, batch.versions.dtype} == {torch.int64}
    assert {batch.logprobs.dtype, batch.raw_logprobs.dtype, batch.rewards.dtype} == {torch.float32}
    masks = (batch.prompt_mask, batch.response_mask, batch.sample_mask, batch.truncated)
    assert {mask.dtype for mask in masks} == {torch.bool}


def test_a_sample_without_tokens_is_a_sample() -> None:
    outputs = [request("a", [1], completion([], finish_reason="abort"), completion([5], 1))]
    batch = RolloutBatch.from_outputs(outputs, [[0.0, 1.0]], pad_token_id=PAD)
    assert batch.sample_mask.tolist() == [[True, True]]
    assert batch.response_mask.tolist() == [[[False], [True]]]


def test_rewards_may_come_as_a_tensor() -> None:
    outputs = [request("a", [1], completion([5]), completion([6], 1))]
    batch = RolloutBatch.from_outputs(outputs, torch.tensor([[0.25, 1.0]]), pad_token_id=PAD)  # type: ignore[arg-type]
    assert batch.rewards.tolist() == [[0.25, 1.0]]


def test_trainer_inputs_put_each_sample_behind_its_prompt() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD)
    assert batch.input_ids().tolist() == [
        [1, 2, 3, 10, 11, PAD],
        [1, 2, 3, 12, 13, 14],
        [PAD, PAD, 4, 15, PAD, PAD],
        [PAD, PAD, 4, PAD, PAD, PAD],
    ]
    assert batch.attention_mask().sum(-1).tolist() == [5, 6, 2, 1]
    assert batch.position_ids().tolist()[:3] == [[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]]


def test_right_padded_prompts_leave_no_gap_in_the_positions() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD, padding_side="right")
    assert batch.input_ids()[2].tolist() == [4, PAD, PAD, 15, PAD, PAD]
    mask, positions = batch.attention_mask()[2], batch.position_ids()[2]
    assert positions[mask].tolist() == [0, 1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_response_logprobs_are_those_of_an_unpadded_forward_pass(
    side: Literal["left", "right"], temperature: float
) -> None:
    outputs = two_groups()
    batch = RolloutBatch.from_outputs(outputs, [[1.0, 0.0], [0.5]], pad_token_id=15, padding_side=side)
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

    def forward(ids: Tensor) -> Tensor:
        return table[ids].clone()  # a model whose logits depend on the last token only

    actual = batch.response_logprobs(forward(batch.input_ids()), temperature=temperature)
    assert actual.shape == (2, 2, 3)
    for b, output in enumerate(outputs):
        for g, sample in enumerate(output.outputs):
            ids = torch.tensor([*output.prompt_token_ids, *sample.token_ids])
            logprobs = (forward(ids)[:-1] / temperature).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(actual[b, g, : len(sample.token_ids)], logprobs[-len(sample.token_ids) :])
    assert (actual[~batch.response_mask] == 0).all()


@pytest.mark.parametrize("side", SIDES)
def test_response_logprobs_give_gradients_to_the_predicting_positions_only(side: Literal["left", "right"]) -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD, padding_side=side)
    logits = torch.randn(4, 6, 100, requires_grad=True)
    batch.response_logprobs(logits).sum().backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum(-1) > 0
    third = [2, 3] if side == "left" else [0, 3]
    assert touched[0].nonzero().flatten().tolist() == [2, 3]
    assert touched[1].nonzero().flatten().tolist() == [2, 3, 4]
    assert touched[2].nonzero().flatten().tolist() == third[:1]
    assert not touched[3].any()


def test_logits_of_another_shape_are_refused() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD)
    with pytest.raises(RolloutBatchError, match=r"\[4, 5, 100\], expected \[4, 6, vocabulary\]"):
        batch.response_logprobs(torch.zeros(4, 5, 100))


def test_a_batch_moves_to_a_device_whole() -> None:
    batch = RolloutBatch.from_outputs(two_groups(), [[1.0, 0.0], [0.5]], pad_token_id=PAD).to("meta")
    assert {
        getattr(batch, field.name).device.type for field in attrs.fields(RolloutBatch) if field.type == "Tensor"
    } == {"meta"}
    assert batch.group_ids == ("a", "b")


def refusal(sample: CompletionOutput, rewards: Sequence[Sequence[float]] = ((1.0, 1.0),)) -> str:
    outputs = [request("req-7", [1], completion([4, 5]), attrs.evolve(sample, index=1))]
    with pytest.raises(RolloutBatchError) as caught:
        RolloutBatch.from_outputs(outputs, rewards, pad_token_id=PAD)
    return str(caught.value)


@pytest.mark.parametrize("name", ["logprobs", "raw_logprobs"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logprobs_that_are_not_finite_are_refused_by_request_sample_and_place(name: str, value: float) -> None:
    message = refusal(completion([4, 5, 6], **{name: (-1.0, -1.0, value)}))
    assert f"request 'req-7', sample 1: {name}[2]" in message


@pytest.mark.parametrize("name", ["logprobs", "raw_logprobs"])
def test_fields_of_different_length_are_refused(name: str) -> None:
    assert f"request 'req-7', sample 1: 3 token_ids but 2 {name}" in refusal(
        completion([4, 5, 6], **{name: (-1.0, -1.0)})
    )


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan(1, 0, 2),),
        (VersionSpan(1, 0, 4),),
        (VersionSpan(1, 1, 3),),
        (VersionSpan(1, 0, 2), VersionSpan(2, 1, 3)),
        (VersionSpan(1, 0, 1), VersionSpan(2, 2, 3)),
    ],
)
def test_version_spans_that_do_not_tile_the_tokens_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    assert "request 'req-7', sample 1: version_spans do not" in refusal(completion([4, 5, 6], version_spans=spans))


def test_wrong_rewards_are_refused() -> None:
    whole = completion([4])
    assert "sample 1: its reward is nan" in refusal(whole, [[1.0, float("nan")]])
    assert "'req-7' has 2 samples but 1 rewards" in refusal(whole, [[1.0]])
    assert "1 outputs but 2 groups" in refusal(whole, [[1.0, 1.0], [1.0]])


def test_batches_without_samples_or_prompts_and_unknown_sides_are_refused() -> None:
    with pytest.raises(RolloutBatchError, match="at least one sample"):
        RolloutBatch.from_outputs([], [], pad_token_id=PAD)
    with pytest.raises(RolloutBatchError, match="'a' has an empty prompt"):
        RolloutBatch.from_outputs([request("a", [], completion([1]))], [[1.0]], pad_token_id=PAD)
    with pytest.raises(RolloutBatchError, match="padding_side is 'middle'"):
        RolloutBatch.from_outputs(two_groups(), [[1.0], [1.0]], pad_token_id=PAD, padding_side="middle")  # type: ignore[arg-type]


@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.integers(0, 90), min_size=1, max_size=5),
            st.lists(st.lists(st.integers(0, 90), max_size=6), max_size=4),
        ),
        min_size=1,
        max_size=4,
    ).filter(lambda groups: any(samples for _, samples in groups)),
    side=st.sampled_from(SIDES),
)
def test_nothing_is_lost_or_moved_by_padding(
    groups: list[tuple[list[int], list[list[int]]]], side: Literal["left", "right"]
) -> None:
    outputs = [
        request(str(b), prompt, *(completion(ids, g) for g, ids in enumerate(samples)))
        for b, (prompt, samples) in enumerate(groups)
    ]
    rewards = [[float(b + g) for g in range(len(samples))] for b, (_, samples) in enumerate(groups)]
    batch = RolloutBatch.from_outputs(outputs, rewards, pad_token_id=PAD, padding_side=side)
    for b, output in enumerate(outputs):
        assert batch.prompt_ids[b][batch.prompt_mask[b]].tolist() == list(output.prompt_token_ids)
        assert batch.rewards[b][batch.sample_mask[b]].tolist() == rewards[b]
        for g, sample in enumerate(output.outputs):
            mask = batch.response_mask[b, g]
            assert batch.response_ids[b, g][mask].tolist() == list(sample.token_ids)
            assert batch.logprobs[b, g][mask].tolist() == list(sample.logprobs)
            assert batch.versions[b, g][mask].tolist() == list(sample.token_versions)
