"""Per-token comparison of every row's next-token distribution with the reference row's."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Tokens per block: peak extra memory is rows x block x vocabulary x 8 bytes, whatever the context.
# (a dozen temporaries of it). A CPU works best inside its caches, a GPU on large products.
BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}


@dataclass
class TokenMetrics:
    """Arrays `[R, T]`, natural-log units; row 0 is the reference.

    kl: KL(reference ‖ row) over the full vocabulary, +inf where the row excludes a token that the reference does not,
    NaN where either distribution is undefined. same_top1: whether the most likely token agrees (False where KL is NaN). nll: of the next token
    of the text, NaN where the text ends. entropy: of the row's own distribution.
    """

    kl: np.ndarray
    same_top1: np.ndarray
    nll: np.ndarray
    entropy: np.ndarray


@torch.inference_mode()
def compare_logits(logits: Tensor, targets: Tensor) -> TokenMetrics:
    """Metrics of raw logits `[R, T, V]` of any float dtype; targets `[T]`, -1 where there is no next token.

    Log-softmax and sums are float64: identical rows give exactly 0, and the noise of the comparison (1e-15) is far
    below any drift. A token excluded by both rows (-inf) contributes nothing.
    """
    log_p = torch.log_softmax(logits.double(), dim=-1)
    p = log_p.exp()
    # 0·(-inf) is 0 here: a token that the reference excludes cannot contribute. NaN stays NaN.
    excluded = p[:1] == 0
    kl = torch.where(excluded, 0.0, p[:1] * (log_p[:1] - log_p)).sum(-1)
    entropy = torch.where(p == 0, 0.0, -p * log_p).sum(-1)
    known = targets.clamp(min=0).expand(len(logits), -1).unsqueeze(-1)
    nll = torch.where(targets >= 0, -log_p.gather(-1, known).squeeze(-1), torch.nan)
    undefined = torch.isnan(log_p).any(-1) | torch.isposinf(logits).any(-1)
    undefined |= undefined[:1].clone()
    kl = torch.where(undefined, torch.nan, kl)
    top = logits.argmax(-1)
    same = (top == top[:1]) & ~undefined
    return TokenMetrics(*(x.cpu().numpy() for x in (kl.float(), same, nll.float(), entropy.float())))


@torch.inference_mode()
def compare_hidden(hidden: Tensor, head: Any, targets: Tensor) -> TokenMetrics:
    """Metrics from last hidden states `[R, T, hidden]` and the output head, in blocks: whole logits never exist."""
    vocab = head.weight.shape[0]
    block = max(1, BLOCK_ELEMENTS.get(hidden.device.type, 1 << 21) // (len(hidden) * vocab))
    parts = []
    for a in range(0, hidden.shape[1], block):
        logits = head(hidden[:, a : a + block].to(head.weight.dtype)).float()
        parts.append(compare_logits(logits, targets[a : a + block].to(logits.device)))
    return TokenMetrics(*(np.concatenate([getattr(p, f) for p in parts], axis=1) for f in TokenMetrics.__dataclass_fields__))
