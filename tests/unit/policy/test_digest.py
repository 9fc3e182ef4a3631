"""The digest names bits: of every tensor, of its name, its type and its shape."""

from __future__ import annotations

import hashlib

import pytest
import torch

from aengine.policy.digest import HashedTensor, combine_digests, digest_each, digest_tensor, digest_tensors

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1.0, -0.0], dtype=torch.bfloat16)}


def test_it_is_the_hash_of_the_tensors_hashes_in_order_of_name() -> None:
    header = b"b\0float32\0" + b"2,3\0"
    assert digest_tensor("b", TENSORS["b"]) == hashlib.sha256(header + TENSORS["b"].numpy().tobytes()).digest()
    parts = [digest_tensor(name, TENSORS[name]) for name in ("a", "b")]
    assert digest_tensors(TENSORS.items()) == hashlib.sha256(b"".join(parts)).hexdigest()
    assert digest_tensors(reversed(TENSORS.items())) == digest_tensors(TENSORS.items())


@pytest.mark.parametrize(
    "other",
    [
        {"b": TENSORS["b"] + 1},
        {"b": TENSORS["b"].view(3, 2)},
        {"b": TENSORS["b"].double()},
        {"c": TENSORS["b"]},
        {"a": TENSORS["a"].abs()},  # minus zero became zero
    ],
)
def test_any_other_bit_name_type_or_shape_gives_another_digest(other: dict[str, torch.Tensor]) -> None:
    changed = {**{name: TENSORS[name] for name in TENSORS if name not in other and "c" not in other}, **other}
    assert digest_tensors(changed.items()) != digest_tensors(TENSORS.items())


def test_the_layout_in_memory_does_not_count() -> None:
    transposed = TENSORS["b"].T.contiguous().T
    assert not transposed.is_contiguous()
    assert digest_tensor("b", transposed) == digest_tensor("b", TENSORS["b"])


def test_a_known_digest_is_taken_for_equal_bits_and_only_for_them() -> None:
    marker = b"known"
    known = {name: HashedTensor(tensor, marker) for name, tensor in TENSORS.items()}
    same = {name: tensor.clone() for name, tensor in TENSORS.items()}
    assert set(digest_each(same.items(), known).values()) == {marker}
    same["a"] = same["a"].abs()
    assert digest_each(same.items(), known) == {"b": marker, "a": digest_tensor("a", same["a"])}
    nan = torch.tensor([torch.nan])
    assert HashedTensor(nan, marker).has_bits_of(nan.clone())
    assert not HashedTensor(nan, marker).has_bits_of(nan.double())


def test_combining_does_not_depend_on_order() -> None:
    parts = digest_each(TENSORS.items())
    assert combine_digests(dict(reversed(parts.items()))) == combine_digests(parts)
