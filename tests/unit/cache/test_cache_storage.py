"""Pages are copied whole, in every layer and in order."""

from __future__ import annotations

import pytest
import torch

from aengine.cache.storage import KVStorage


def storage(**settings: object) -> KVStorage:
    shape = {"num_layers": 2, "num_pages": 5, "num_kv_heads": 3, "head_dim": 4, "page_size": 2}
    return KVStorage(**{**shape, **settings})  # type: ignore[arg-type]


def numbered() -> KVStorage:
    """Every value of page p in layer l is 10 l + p."""
    kv = storage()
    for at, layer in enumerate(kv.layers):
        layer[:] = 10 * at + torch.arange(5).view(5, 1, 1)
    return kv


def contents(kv: KVStorage) -> list[list[float]]:
    for layer in kv.layers:
        assert bool((layer == layer[:, :1, :1]).all()), "a page was copied in part"
    return [layer[:, 0, 0].tolist() for layer in kv.layers]


def test_layers_have_the_agreed_shape() -> None:
    kv = storage()
    assert [tuple(layer.shape) for layer in kv.layers] == [(5, 3, 16), (5, 3, 16)]
    assert all(layer.is_contiguous() and layer.dtype == torch.float32 for layer in kv.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_page_is_known_before_anything_is_made(dtype: torch.dtype) -> None:
    page = KVStorage.page_bytes(num_layers=2, num_kv_heads=3, head_dim=4, page_size=2, dtype=dtype)
    assert storage(dtype=dtype).num_bytes == 5 * page == 5 * 2 * 3 * 16 * dtype.itemsize


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([(0, 3), (1, 4)], [0, 1, 2, 0, 1]),
        ([(0, 3), (0, 4)], [0, 1, 2, 0, 0]),
        ([(0, 3), (3, 4)], [0, 1, 2, 0, 0]),
        ([(3, 4), (0, 3)], [0, 1, 2, 0, 3]),
        ([(0, 4), (1, 4)], [0, 1, 2, 3, 1]),
    ],
)
def test_pairs_are_copied_as_if_one_after_the_other(pairs: list[tuple[int, int]], expected: list[int]) -> None:
    kv = numbered()
    kv.copy_pages(pairs)
    assert contents(kv) == [expected, [10 + page for page in expected]]


def test_storage_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        kv = storage()
    kv.layers[0][0] = 1.0
    kv.copy_pages([(0, 1)])
    assert not kv.layers[0].requires_grad
    assert bool((kv.layers[0][1] == 1.0).all())
