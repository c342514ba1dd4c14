"""Per-token comparison of every row's next-token distribution with the reference row's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from replayssm_kernels import choose_backend
from torch import Tensor

# Logits per block, rows x tokens x vocabulary: peak extra memory follows it, whatever the context (in float64 a dozen
# temporaries of 8 bytes each). A CPU works best inside its caches, a GPU on large products.
BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
KERNEL_BLOCK_BYTES = 1 << 30  # the kernel has no temporaries: a block of logits on a GPU, in the head's own dtype


@dataclass
class TokenMetrics:
    """Arrays `[R, T]`, natural-log units; row 0 is the reference.

    kl: KL(reference ‖ row) over the full vocabulary. It is +inf where the row excludes a token that the reference
    allows, and NaN where either distribution is undefined.
    same_top1: whether the most likely token agrees (False where KL is NaN).
    nll: negative log-likelihood of the text's next token, NaN where the text ends.
    entropy: entropy of the row's own distribution.
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
    return _on_host([_compare_float64(logits, targets)])


@torch.inference_mode()
def compare_hidden(hidden: Tensor, head: Any, targets: Tensor, backend: str = "torch") -> TokenMetrics:
    """Metrics from last hidden states `[R, T, hidden]` and the output head, in blocks: whole logits never exist.

    backend: one of `replayssm_kernels.BACKENDS`. "torch" is `compare_logits`. "triton" is one kernel with fp32 sums,
    see `replayssm_kernels.triton_backend.logits`. Nothing leaves the device before everything is computed.
    """
    kernel = choose_backend(backend, hidden.device) == "triton"
    limit = BLOCK_ELEMENTS.get(hidden.device.type, 1 << 21)
    if kernel and hidden.device.type == "cuda":
        limit = KERNEL_BLOCK_BYTES // head.weight.element_size()
    block = max(1, limit // (len(hidden) * head.weight.shape[0]))
    parts: list[Tensor] = []
    for a, logits in _logit_blocks(hidden, head, min(block, hidden.shape[1]), None if kernel else torch.float32):
        targets = targets.to(logits.device)
        compare = _compare_triton if kernel else _compare_float64
        parts.append(compare(logits, targets[a : a + block]))
    return _on_host(parts)


def _logit_blocks(hidden: Tensor, head: Any, block: int, dtype: torch.dtype | None) -> Iterator[tuple[int, Tensor]]:
    """(first token, contiguous logits `[R, T, V]`) per block of tokens, all in the same memory; dtype None: the head's.

    Every row is a product of its own, from a copy of its own. So equal rows have equal logits, whatever the shape or
    the place in memory does to the order of sums.
    """
    memory = torch.empty(0)
    for a in range(0, hidden.shape[1], block):
        for r in range(len(hidden)):
            z = head(hidden[r : r + 1, a : a + block].to(head.weight.dtype, copy=True))
            if not len(memory):
                memory = z.new_empty(len(hidden) * z.numel(), dtype=dtype)
            logits = memory[: len(hidden) * z.numel()].view(len(hidden), *z.shape[1:])
            logits[r] = z[0]
        yield a, logits


def _compare_float64(logits: Tensor, targets: Tensor) -> Tensor:
    """fp32 `[4, R, T]`, the fields of `TokenMetrics`, on the device of the logits."""
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
    return torch.stack([x.float() for x in (kl, same, nll, entropy)])


def _compare_triton(logits: Tensor, targets: Tensor) -> Tensor:
    """`_compare_float64` by the kernel."""
    from replayssm_kernels.triton_backend.logits import compare_logits_triton

    kl, top, nll, entropy = compare_logits_triton(logits, targets)
    same = (top == top[:1]) & ~kl.isnan()
    return torch.stack([kl, same.float(), nll, entropy])


def _on_host(parts: list[Tensor]) -> TokenMetrics:
    """Blocks `[4, R, T]` as one: the only copy from the device."""
    kl, same, nll, entropy = torch.cat(parts, dim=-1).cpu().numpy()
    return TokenMetrics(kl, same > 0, nll, entropy)
