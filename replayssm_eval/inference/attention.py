"""Causal attention of a chunk against a long cache without a [chunk × context] mask.

transformers gives torch such a mask: 1 GB in fp32 for a chunk of 2,048 tokens against 131,072. A GPU needs no mask in
bf16 and fp16, because flash attention aligns its diagonal to the last key. Elsewhere the chunk attends to the past
without a mask and to itself causally. The two results are joined by their log-sum-exp, as in split-key decoding.
Neither path repeats keys or values per query head in memory.

Equal batch rows of one call get equal bits. The control's KL of exactly 0 rests on it. On a GPU a block of a kernel
belongs to one row, and no kernel adds with atomics. With few queries, flash attention splits the keys and adds the
parts in order. The number of parts depends on the number of rows, so a call with 1 row and a call with 9 may differ.
Only `_blockwise` uses matrix products, which promise no equal bits. On a CPU every row is a call of its own (see
`equal_rows`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from ..models.families import family_of
from .equal_rows import rows_alike

NAME = "replayssm_chunked"


def chunked_causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Token i of the T queries sees keys 0 .. S-T+i.

    query: `[B, H, T, d]`; key: `[B, H_kv, S, d]`; value: `[B, H_kv, S, d_v]`; S >= T, and query head h reads key head
    h // (H / H_kv). scale: of the scores, usually d^-1/2. Returns `[B, H, T, d_v]`.
    """
    if query.device.type == "cpu" and len(query) > 1:
        rows = zip(*(rows_alike(x) for x in (query, key, value)), strict=True)
        return torch.cat([chunked_causal_attention(q, k, v, scale) for q, k, v in rows])
    width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    # NVIDIA only: AMD's meaning of causal for T < S is not checked.
    # The question says `causal=False` because torch would refuse T < S otherwise.
    if (
        query.is_cuda
        and not torch.version.hip
        and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))
    ):
        # Aligned to the last key since FlashAttention 2.1 (torch.nn.attention.bias relies on it). Takes H_kv < H.
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, query.shape[2] > 1, scale=scale
        )[0]
    else:
        folded = _folded(query, key, value)
        fused = query.device.type == "cpu" or (
            query.is_cuda and can_use_efficient_attention(SDPAParams(*folded, None, 0.0, False, False))
        )
        out = (_merged if fused else _blockwise)(*folded, scale)
        out = out.unflatten(0, (len(query), -1)).flatten(1, 2)
    return out[..., :width]


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad with zeros to a common width, a multiple of 8, which every kernel takes. No copy if the width is right."""
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _folded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[B·H_kv, H/H_kv, T, d]` and keys and values that repeat for the heads of a group by a stride of 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (key, value))
    return query.unflatten(1, (-1, group)).flatten(0, 1), key, value


def _merged(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Past and own tokens apart: o = o₁ + (o₂ - o₁) / (1 + exp(l₁ - l₂)); l is the log-sum-exp of a part's scores.

    The maths is the merge of partial softmaxes of FlashAttention (Dao et al., 2022). H_kv = H, as `_folded` makes it.
    """
    tokens = query.shape[2]
    past = key.shape[2] - tokens
    if past == 0 or tokens == 1:
        return _attend(query, key, value, tokens > 1, scale)[0]
    own, own_lse = _attend(query, key[:, :, past:], value[:, :, past:], True, scale)
    earlier, earlier_lse = _attend(query, key[:, :, :past], value[:, :, :past], False, scale)
    # Not torch.sigmoid: a CPU computes its last few elements one by one, with other bits than the vectors before them.
    share = (1 / (1 + torch.exp(earlier_lse - own_lse))).unsqueeze(-1)
    earlier, own = earlier.to(share.dtype), own.to(share.dtype)
    return (earlier + (own - earlier) * share).to(query.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp `[B, H, T]`). causal: only for S = T, where all kernels agree on its meaning."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]  # it comes padded to a multiple of 32


def _blockwise(query: Tensor, key: Tensor, value: Tensor, scale: float, block: int = 256) -> Tensor:
    """Plain torch, a block of keys at a time, for inputs that no kernel takes (fp64 on a GPU, old GPUs).

    The maths is the online softmax of Milakov & Gimelshein (2018). H_kv = H and d_v = d: `_folded` and `_same_width`
    make them so.
    """
    tokens, keys = query.shape[2], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(dtype) * scale
    last = torch.arange(keys - tokens, keys, device=query.device).unsqueeze(-1)  # key that each query still sees
    peak = torch.full_like(scaled[..., :1], -torch.inf)
    total, out = torch.zeros_like(peak), torch.zeros_like(scaled)
    for start in range(0, keys, block):
        k, v = (x[:, :, start : start + block].to(dtype) for x in (key, value))
        index = torch.arange(start, start + k.shape[2], device=query.device)
        scores = (scaled @ k.transpose(-1, -2)).masked_fill(index > last, -torch.inf)
        before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))  # finite: all see key 0
        weights, shrink = torch.exp(scores - peak), torch.exp(before - peak)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v
    return (out / total).to(query.dtype)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
):
    """The transformers attention interface: `[B, H, T, d]` in, `[B, T, H, d]` out; padding still needs its mask."""
    if attention_mask is None:
        out = chunked_causal_attention(query, key, value, scaling)
    else:
        heads, tokens = query.shape[1:3]
        if tokens == 1:  # all heads of a group see the same keys: treat them as queries, and copy no key
            query = query.reshape(len(query), key.shape[1], -1, query.shape[3])
        else:
            key, value = (x.repeat_interleave(heads // key.shape[1], dim=1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
        out = out.reshape(len(out), heads, tokens, -1)
    return out.transpose(1, 2).contiguous(), None


def _mask(**kwargs: Any) -> Tensor | None:
    """No mask for plain causality without padding; otherwise `sdpa_mask`, which is called by keyword too."""
    padding = kwargs.get("attention_mask")
    if kwargs.get("mask_function", causal_mask_function) is causal_mask_function and (
        padding is None or bool(padding.all())
    ):
        return None
    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def without_dense_masks(model: Any) -> Iterator[None]:
    """Inside the block, attention layers of `model` that used SDPA use `chunked_causal_attention`, on CPUs and GPUs."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    # accelerate leaves offloaded weights on "meta"; their layers run on a GPU all the same.
    devices = {parameter.device.type for parameter in model.parameters()}
    if before != "sdpa" or family_of(config).chooses_keys or not devices <= {"cpu", "cuda", "meta"}:
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
