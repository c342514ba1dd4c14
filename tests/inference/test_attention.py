"""Attention of a chunk against a cache: equal to a dense mask, without one."""

from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from replayssm_eval import attach
from replayssm_eval.inference.attention import _blockwise, _folded, _mask, _merged, chunked_causal_attention
from replayssm_eval.inference.forward import hidden_states
from tests.helpers.models import nemotron_h, token_ids

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 1), (1, 50), (7, 7), (20, 53), (64, 300), (300, 513)]


def inputs(
    tokens: int, keys: int, dtype: torch.dtype, rows=2, heads=6, kv_heads=3, width=16, width_v=None
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (rows, heads, tokens, width), (rows, kv_heads, keys, width), (rows, kv_heads, keys, width_v or width)
    return [torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes]


def assert_close_to_dense(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    """Against a dense mask in float64, element by element relative to Σ p|v|, the sum of the sizes of what is averaged.

    With 16-bit inputs the weights, the parts and their merge are each rounded once: 3u. The rest is in fp32 at least,
    with unit roundoff u₃₂. A score has d products and a sum has S. Their roundings add up like a random walk, and
    8·√(d+S)·u₃₂ leaves room for the exponential.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).double() for x in (k, v))
    tokens, keys = q.shape[2], k.shape[2]
    mask = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
    weights = torch.softmax((q.double() @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf), -1)
    u, u_work = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, torch.promote_types(q.dtype, torch.float32)))
    bound = (3 * u if u > u_work else 0) + 8 * (q.shape[3] + keys) ** 0.5 * u_work
    assert got.dtype == q.dtype
    assert ((got.double() - weights @ v).abs() / (weights @ v.abs())).max() <= bound


@pytest.mark.parametrize(("tokens", "keys"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_a_dense_mask_in_float64(tokens, keys, dtype) -> None:
    q, k, v = inputs(tokens, keys, dtype)
    assert_close_to_dense(chunked_causal_attention(q, k, v, 0.3), q, k, v, 0.3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "width_v"),
    [(4, 4, 16, 16), (5, 1, 20, 20), (4, 2, 24, 16), (2, 1, 16, 40), (4, 1, 320, 320)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_heads_and_widths(heads, kv_heads, width, width_v, dtype) -> None:
    q, k, v = inputs(20, 53, dtype, 2, heads, kv_heads, width, width_v)
    assert_close_to_dense(chunked_causal_attention(q, k, v, width**-0.5), q, k, v, width**-0.5)


@pytest.mark.parametrize(("tokens", "keys"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", [_merged, _blockwise], ids=["merged", "blockwise"])
def test_paths_that_a_kernel_may_leave_unused(path, tokens, keys, dtype) -> None:
    q, k, v = inputs(tokens, keys, dtype)
    got = path(*_folded(q, k, v), 0.3).unflatten(0, (2, 3)).flatten(1, 2)
    assert_close_to_dense(got, q, k, v, 0.3)


@pytest.fixture(params=[1, 2, 3, 4, 8])
def threads(request):
    """Threads that torch works with."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 300), (1, 7), (64, 64), (20, 300), (7, 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_rows_give_equal_bits(tokens, keys, dtype, threads) -> None:
    q, k, v = (x.repeat(5, 1, 1, 1) for x in inputs(tokens, keys, dtype, rows=1))
    out = chunked_causal_attention(q, k, v, 0.3)
    assert torch.equal(out, out[:1].expand_as(out))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU kernel gives a block to one row")
@pytest.mark.parametrize("keys", [300, 7])
def test_rows_of_a_cpu_are_equal_by_construction(keys, threads, monkeypatch) -> None:
    """Every call of the kernel sees one row, at the same alignment and strides: it cannot tell equal rows apart."""
    from replayssm_eval.inference import attention

    seen = []
    original = attention._attend

    def attend(*args):
        seen.append([(len(x), x.data_ptr() % 64, x.stride()) for x in args[:3]])
        return original(*args)

    monkeypatch.setattr(attention, "_attend", attend)
    q, k, v = (x.repeat(5, 1, 1, 1) for x in inputs(1, keys, torch.float32, rows=1, width=20))
    chunked_causal_attention(q, k, v, 0.3)
    assert len(seen) == 5
    assert all(one == seen[0] for one in seen)


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an op inside returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_a_mask_nor_repeated_keys_in_memory(dtype) -> None:
    q, k, v = inputs(1000, 4000, dtype, rows=1, heads=4, kv_heads=1)
    with LargestAllocation() as seen:
        chunked_causal_attention(q, k, v, 0.3)
    # Parts are merged in fp32. Keys repeated for every head would take 4 times k; a mask of bytes, 31 times k in bf16.
    assert 0 < seen.bytes <= max(k.nbytes, 4 * q.numel()) < min(4 * k.nbytes, 1000 * 4000)


def test_no_mask_is_made_and_the_model_is_put_back(monkeypatch) -> None:
    model = deepcopy(nemotron_h("M-M*")).to(DEVICE)  # other tests share the original
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **k: seen.append(k.get("attn_mask")) or original(*a, **k),
    )
    ids = token_ids(60).to(DEVICE)
    # TF32 would make of a difference in the last bit one in the eleventh.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        cache = DynamicCache(config=model.config)
        expected = torch.cat(
            [hidden_states(model, ids[:, :35], cache, 0), hidden_states(model, ids[:, 35:], cache, 35)], dim=1
        )
        assert any(mask is not None for mask in seen)
        seen.clear()
        with attach(model, ["fp32"], follow_hf_clamp=True, probe=False):
            cache = DynamicCache(config=model.config)
            got = torch.cat(
                [hidden_states(model, ids[:, :35], cache, 0), hidden_states(model, ids[:, 35:], cache, 35)], dim=1
            )
        assert not seen
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert model.config._attn_implementation == "sdpa"


def test_padding_still_masks() -> None:
    """Left padding must not leak into the answer."""
    model = deepcopy(nemotron_h("M-M*")).to(DEVICE)
    ids = token_ids(20).to(DEVICE)
    padded = torch.cat([torch.zeros_like(ids[:, :5]), ids], dim=1)
    mask = torch.cat([torch.zeros_like(ids[:, :5]), torch.ones_like(ids)], dim=1)
    with torch.no_grad(), attach(model, ["fp32"], probe=False):
        alone = model(input_ids=ids, use_cache=False).logits
        beside = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 5:]
    assert (alone - beside).abs().max() <= 1e-4


def test_only_a_causal_rule_goes_without_its_mask() -> None:
    chunk = {"batch_size": 1, "q_length": 2, "kv_length": 5, "q_offset": 3, "attention_mask": None}
    assert _mask(**chunk, mask_function=causal_mask_function) is None
    sliding = _mask(**chunk, mask_function=sliding_window_causal_mask_function(2))
    assert sliding.squeeze().tolist() == [[False, False, True, True, False], [False, False, False, True, True]]
