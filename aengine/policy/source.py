"""Where new weights come from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["read_source"]


def read_source(source: Mapping[str, Tensor] | nn.Module) -> Mapping[str, Tensor]:
    """The tensors of a state dict or of a module, by name; nothing is copied. Raises `TypeError` for anything else."""
    tensors = source.state_dict() if isinstance(source, nn.Module) else source
    if not isinstance(tensors, Mapping):
        raise TypeError(f"weights come from a state dict or a torch module, not from {type(source).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"entry {name!r} of the weights is a {type(tensor).__name__}, not a tensor")
    return tensors
