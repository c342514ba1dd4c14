"""The plain recurrence in torch: windows of many rows side by side.

The arithmetic is the window form of `replayssm_emulation.recurrence`. Only the fold is sequential. Everything that does
not depend on the state (step 1 below) and the readout (step 3) are batched over all windows of a block.

    1. ΔS = Σ_j u_j (exp(G_L - G_j) k_j)ᵀ and the attention of a window's tokens to its records
    2. per window: fold = exp(G_L) S + ΔS, then every copy is cast from the fold
    3. o_i = exp(G_i) S_read q_i + attention;  the flushing token reads the fold
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..state import BatchRow, Group


def plain_block(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, group: Group, rows: Sequence[BatchRow],
    folds: int, length: Tensor, write: Callable[[int, Tensor], None],
) -> Tensor:  # fmt: skip
    """Outputs `[rows, W, L, H, d_v]` of windows `[rows, W, L, ...]` in order. The first `folds` windows end in a fold.

    length: real tokens of every window; the rest is empty (β = 0, log α = 0).
    write(w, fold) casts the copies of the group.
    """
    count, windows, longest, heads, d_v = v.shape
    groups, d_k = k.shape[3:]
    share = heads // groups
    g = log_decay.cumsum(2)
    u = beta.unsqueeze(-1) * v
    q, k = (x.transpose(2, 3) for x in (q, k))  # [rows, W, G, L, d_k]

    def by_group(x: Tensor) -> Tensor:
        """[rows, W, L, H, d_v] -> [rows, W, G, share * d_v, L]: the heads of a group share its keys."""
        return x.movedim(2, -1).reshape(count, windows, groups, share * d_v, longest)

    # 1. what does not depend on the state
    to_end = (g[:, :, -1:] - g).exp().unsqueeze(-1)
    delta = (by_group(u * to_end) @ k).view(count, windows, heads, d_v, d_k)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    between = (
        (g.transpose(2, 3).unsqueeze(-1) - g.transpose(2, 3).unsqueeze(-2)).masked_fill_(~causal, -torch.inf).exp_()
    )
    scores = (q @ k.transpose(-1, -2)).repeat_interleave(share, dim=2) * between  # [rows, W, H, i, j]
    o = scores @ u.transpose(2, 3)  # [rows, W, H, L, d_v]

    # 2. fold and cast, window after window
    decay = g[:, :, -1].exp()[..., None, None]
    reads = torch.empty_like(delta)
    for w in range(windows):
        reads[:, w] = group.read
        if w >= folds:
            break
        fold = torch.addcmul(delta[:, w], group.recurrence, decay[:, w], out=delta[:, w])
        write(w, fold)

    # 3. readout
    read = reads.view(count, windows, groups, share * d_v, d_k) @ q.transpose(-1, -2)
    o = o + read.view(count, windows, heads, d_v, longest).transpose(-1, -2) * g.transpose(2, 3).exp().unsqueeze(-1)
    flushed = torch.arange(folds, device=q.device)
    last = length[:folds].to(q.device) - 1
    q_last = q.transpose(2, 3)[:, flushed, last]  # [rows, F, G, d_k]
    folded = delta[:, :folds].reshape(count, folds, groups, share * d_v, d_k)
    from_fold = (folded @ q_last.unsqueeze(-1)).view(count, folds, heads, d_v)
    reads_fold = torch.tensor([row.scheme.flush_reads == "fold" for row in rows], device=q.device).view(-1, 1, 1, 1)
    o = o.transpose(2, 3).contiguous()  # [rows, W, L, H, d_v]
    o[:, flushed, last] = torch.where(reads_fold, from_fold, o[:, flushed, last])
    return o


def plain_read_only(q: Tensor, group: Group) -> Tensor:
    """o `[rows, T, H, d_v]` of the T newest records, with queries q `[rows, T, G, d_k]`: decoding between folds."""
    k, v, beta, log_decay = group.records
    count, tokens, groups, d_k = q.shape
    seen, heads, d_v = v.shape[1:]
    share = heads // groups
    g = log_decay.cumsum(1).transpose(1, 2)  # [rows, H, seen]
    new = g[:, :, seen - tokens :]
    q = q.transpose(1, 2)  # [rows, G, tokens, d_k]
    earlier = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).tril(seen - tokens)
    between = (new.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill_(~earlier, -torch.inf).exp_()
    scores = (q @ k.permute(0, 2, 3, 1)).repeat_interleave(share, dim=1) * between  # [rows, H, tokens, seen]
    o = scores @ (beta.unsqueeze(-1) * v).transpose(1, 2)
    read = group.read.view(count, groups, share * d_v, d_k) @ q.transpose(-1, -2)
    o += read.view(count, heads, d_v, tokens).transpose(-1, -2) * new.exp().unsqueeze(-1)
    return o.transpose(1, 2)
