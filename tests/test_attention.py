"""Attention of a chunk against a cache: equal to a dense mask, without one."""

import pytest
import torch
from models import nemotron_h, token_ids
from transformers import DynamicCache

from replayssm_eval import attach
from replayssm_eval.attention import chunked_causal_attention
from replayssm_eval.session import hidden_states


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 50), (7, 7), (20, 53), (64, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_dense_mask_in_float64(tokens, keys, dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=g).to(dtype) for n in (tokens, keys, keys))
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    expected = torch.softmax(scores, -1) @ v.double()
    got = chunked_causal_attention(q, k, v, 0.3)
    assert got.dtype == dtype
    # Outputs are averages of v: a few roundings of numbers up to max|v|.
    assert (got.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps * v.abs().max().double()


def test_no_mask_is_made_and_the_model_is_put_back(monkeypatch) -> None:
    model = nemotron_h("M-M*")
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: seen.append(k.get("attn_mask")) or original(*a, **k)
    )
    ids = token_ids(60)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        expected = torch.cat([hidden_states(model, ids[:, :35], cache, 0), hidden_states(model, ids[:, 35:], cache, 35)], dim=1)
        assert any(mask is not None for mask in seen)
        seen.clear()
        with attach(model, ["fp32"], follow_hf_clamp=True, probe=False):
            cache = DynamicCache(config=model.config)
            got = torch.cat([hidden_states(model, ids[:, :35], cache, 0), hidden_states(model, ids[:, 35:], cache, 35)], dim=1)
        assert not seen
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert model.config._attn_implementation == "sdpa"


def test_padding_still_masks() -> None:
    """Left padding must not leak into the answer."""
    model = nemotron_h("M-M*")
    ids = token_ids(20)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 20, dtype=torch.long)], dim=1)
    with torch.no_grad(), attach(model, ["fp32"], probe=False):
        alone = model(input_ids=ids, use_cache=False).logits
        beside = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 5:]
    assert (alone - beside).abs().max() <= 1e-4
