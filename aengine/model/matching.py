"""Checks a state dict against a spec before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aengine.errors import WeightsMismatchError
from aengine.model.spec import ModelSpec

__all__ = ["match_tensors"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def match_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors the spec names, in its order; they alias the input and keep its dtypes.

    Rotary frequency buffers are left out, and so is a head that repeats a tied embedding. Anything else that is
    missing, unexpected, of another shape, not of a float dtype or without data raises `WeightsMismatchError`, with
    every such name in it.
    """
    shapes = spec.tensor_shapes()
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith(FREQUENCIES)}
    wrong = [
        f"{name}: {complaint}"
        for name, shape in shapes.items()
        if name in given and (complaint := complaint_about(given[name], shape))
    ]
    missing = [name for name in shapes if name not in given]
    if spec.tie_word_embeddings and HEAD in given:
        head = given.pop(HEAD)
        if not missing and not wrong and not is_same(head, given[EMBEDDING]):
            wrong.append(f"{HEAD}: expected a repetition of {EMBEDDING}, as the spec ties them, got another tensor")
    unexpected = [name for name in given if name not in shapes]
    if missing or unexpected or wrong:
        raise WeightsMismatchError(missing=missing, unexpected=unexpected, wrong=wrong)
    return {name: given[name].detach() for name in shapes}


def complaint_about(tensor: object, shape: tuple[int, ...]) -> str:
    if not isinstance(tensor, Tensor):
        return f"expected a tensor, got {type(tensor).__name__}"
    if tuple(tensor.shape) != shape:
        return f"expected {list(shape)}, got {list(tensor.shape)}"
    if tensor.dtype not in FLOAT_DTYPES:
        return f"expected a float tensor, got {tensor.dtype}"
    if tensor.is_meta:
        return "has no data (it is on the meta device)"
    return ""


def is_ignored(spec: ModelSpec, name: str, tensor: Tensor, known: Mapping[str, Tensor]) -> bool:
    """Whether `match_tensors` would leave out this tensor, given the embedding among those already `known`."""
    return name.endswith(FREQUENCIES) or (
        name == HEAD and spec.tie_word_embeddings and is_same(tensor, known[EMBEDDING])
    )


def is_same(head: object, embedding: Tensor) -> bool:
    """Storages are compared first: a tied module lists one tensor twice, and NaN is not equal to itself."""
    if complaint_about(head, tuple(embedding.shape)) or not isinstance(head, Tensor):
        return False
    if head.data_ptr() == embedding.data_ptr() and head.dtype == embedding.dtype:
        return True
    return torch.equal(head.to(embedding), embedding)
