"""Where new weights come from: a state dict, a module, a checkpoint, files, or a stream of tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from torch import Tensor, nn

from aengine.model.checkpoint import Checkpoint
from aengine.model.tensor_files import read_file, read_safetensors
from aengine.policy.pending import Tensors

__all__ = ["WeightSource", "closing", "collect", "read_source"]

WeightSource = Mapping[str, Tensor] | nn.Module | Checkpoint | str | Path | AsyncIterable[tuple[str, Tensor]]


def read_source(source: WeightSource) -> Tensors:
    """The tensors by name, or the stream they come in; nothing is copied yet, and files are mapped, not read.

    A path names a safetensors file or a directory with some. Raises `CheckpointError` for files that cannot be read
    and `TypeError` for anything that is not a source.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        return read_safetensors(path) if path.is_dir() else read_file(path)
    if isinstance(source, Checkpoint):
        return source.tensors
    if isinstance(source, nn.Module):
        return source.state_dict()
    if isinstance(source, Mapping | AsyncIterable):
        return source
    raise TypeError(
        "weights come from a state dict, a module, a checkpoint, a path or an async iterator of (name, tensor), "
        f"not from {type(source).__name__}"
    )


async def collect(tensors: Tensors) -> Mapping[str, Tensor]:
    """All tensors of a source by name. Those of a stream are copied as they come, since its buffers may be reused;
    reading it is never shielded, so it can be cancelled at each tensor."""
    if isinstance(tensors, Mapping):
        return tensors
    collected: dict[str, Tensor] = {}
    async with closing(tensors) as stream:
        async for name, tensor in stream:
            if name in collected:
                raise ValueError(f"the stream of weights has {name!r} twice")
            collected[name] = tensor.detach().clone()
    return collected


@asynccontextmanager
async def closing(stream: AsyncIterable[tuple[str, Tensor]]) -> AsyncIterator[AsyncIterable[tuple[str, Tensor]]]:
    """Close a stream that is given up before its end, if it can be closed."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
