"""Keys and values that stay where they are, beside transformers' own layers."""

from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from replayssm_eval.inference.kv_cache import make_room


def parts(*lengths: int):
    """Keys and values of different widths."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 2, n, 4, generator=g), torch.randn(3, 2, n, 6, generator=g)) for n in lengths]


def same(layer, peer) -> None:
    assert torch.equal(layer.keys, peer.keys)
    assert torch.equal(layer.values, peer.values)
    assert layer.get_seq_length() == peer.get_seq_length()


@pytest.mark.parametrize("kind", [DynamicLayer, LinearAttentionAndFullAttentionLayer])
@pytest.mark.parametrize("room", [0, 9, 12, 40])
def test_what_it_holds_is_what_concatenation_holds(kind, room) -> None:
    """Whether the tokens fit or not; as long as they fit nothing moves."""
    cache = SimpleNamespace(layers=[kind()])
    make_room(cache, room)
    layer, peer, places = cache.layers[0], kind(), set()
    for keys, values in parts(5, 1, 6):
        got = layer.update(keys, values)
        assert all(map(torch.equal, got, peer.update(keys, values)))
        places.add((layer.keys.data_ptr(), layer.values.data_ptr()))
        same(layer, peer)
    assert (len(places) == 1) == (room >= 12)


@pytest.mark.parametrize("change", ["reorder", "crop", "reset", "fewer rows", "every other"])
def test_rows_that_were_moved_or_cut_off(change) -> None:
    """What is appended after such a change stands behind what the change left, not behind what was there before."""
    cache = SimpleNamespace(layers=[DynamicLayer()])
    make_room(cache, 20)
    layers = [cache.layers[0], DynamicLayer()]
    before, after = parts(5, 4)
    for layer in layers:
        layer.update(*before)
        rows = torch.arange(3)
        if change == "reorder":
            layer.reorder_cache(torch.tensor([2, 0, 0]))
        elif change == "crop":
            layer.crop(-2)
        elif change == "every other":
            layer.keys, layer.values = (x[:, :, ::2] for x in (layer.keys, layer.values))
        elif change == "reset":
            layer.reset()
        else:
            rows = torch.tensor([0, 1])
            layer.batch_select_indices(rows)
        layer.update(*(x[rows] for x in after))
    same(*layers)


def test_layers_of_other_kinds_stay() -> None:
    layers = [LinearAttentionLayer(), DummyLayer()]
    cache = SimpleNamespace(layers=list(layers))
    make_room(cache, 20)
    assert all(a is b for a, b in zip(cache.layers, layers, strict=True))
