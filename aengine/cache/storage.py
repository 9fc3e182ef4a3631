"""The key and value tensors. What lies in a page, and nothing about who holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["KVStorage"]


class KVStorage:
    """One tensor a layer, [num_pages, num_kv_heads, 2 * head_dim * page_size], never initialised.

    For one page and head, first K as [head_dim, page_size] (so scores vectorise over a page's tokens), then V as
    [page_size, head_dim]. Only what a task's own forward passes wrote, or `copy_pages` brought, may be read.

    A page is contiguous in each layer and everything about its content is in these tensors, so moving KV elsewhere
    (host offload, another process) is moving `layer[page]` for every layer, beside `copy_pages`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (num_pages, num_kv_heads, 2 * head_dim * page_size)
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            self.layers = [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]

    @staticmethod
    def page_bytes(
        *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Bytes of one page over all layers."""
        return num_layers * num_kv_heads * 2 * head_dim * page_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) in every layer, in order: a later pair may read what an earlier one wrote."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        if set(sources).isdisjoint(targets) and len(set(targets)) == len(targets):
            source, target = torch.tensor(sources), torch.tensor(targets)
            for layer in self.layers:
                layer[target] = layer[source]
            return
        for layer in self.layers:
            for one, other in pairs:
                layer[other] = layer[one]
