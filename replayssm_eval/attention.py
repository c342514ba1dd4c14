"""Causal attention of a chunk against a long cache without a [chunk × context] mask.

transformers hands such a mask to torch, 1 GB in fp32 for a chunk of 2,048 tokens against 131,072. Here the chunk attends
to the past without a mask and to itself causally, and the two are joined by their log-sum-exp, as in split-key decoding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "replayssm_chunked"


def chunked_causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Token i of the T queries sees keys 0 .. S-T+i.

    query: `[B, H, T, d]`; key, value: `[B, H, S, d]`, S >= T, on the CPU. scale: of the scores, usually d^-1/2.
    Returns `[B, H, T, d]`. The maths is the merge of partial softmaxes of FlashAttention (Dao et al., 2022):
    o = o₁ + (o₂ - o₁)·σ(l₂ - l₁) with l the log-sum-exp of the scores of each part.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past = key.shape[2] - query.shape[2]
    own, own_lse = flash(query, key[:, :, past:], value[:, :, past:], 0.0, True, scale=scale)
    if past == 0:
        return own
    earlier, earlier_lse = flash(query, key[:, :, :past], value[:, :, :past], 0.0, False, scale=scale)
    share = torch.sigmoid(own_lse - earlier_lse).unsqueeze(-1)
    return (earlier.float() + (own.float() - earlier.float()) * share).to(query.dtype)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any):
    """The transformers attention interface: `[B, H, T, d]` in, `[B, T, H, d]` out; padding still needs its mask."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    if attention_mask is None:
        out = chunked_causal_attention(query, key, value, scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _mask(**kwargs: Any) -> Tensor | None:
    """No mask unless there is padding; called by keyword, as `sdpa_mask` is."""
    padding = kwargs.get("attention_mask")
    if padding is None or bool(padding.all()):
        return None
    return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def without_dense_masks(model: Any) -> Iterator[None]:
    """Inside the block the attention layers of `model` use `chunked_causal_attention`; on a CPU, and if they used SDPA."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if model.device.type != "cpu" or before != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
