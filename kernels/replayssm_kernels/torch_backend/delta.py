"""The delta rule in plain torch: windows of many rows side by side (GDN: one decay a head; KDA: one a channel).

A window is a unit lower triangular system, as in `replayssm_emulation.recurrence`: the chunked form of Yang et al.,
2024.

    1. M_ij = Σ_c k_ic exp(G_ic - G_jc) k_jc            overlap of token i's key with record j < i
    2. (1 + β M) u = β (v - S exp(G) k)                 S: the read copy for answers, the recurrence copy for the fold
    3. o_i = S_read exp(G_i) q_i + Σ_{j≤i} (q_i exp(G_i - G_j) k_j) u_j
    4. fold = S diag(exp(G_L)) + Σ_j u_j (exp(G_L - G_j) k_j)ᵀ

Only differences of cumulative log-decays are exponentiated, and they are negative: strong gates cannot overflow.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..state import BatchRow, Group


class _Window(NamedTuple):
    """What a window has before it meets a state: `[rows, H, L, ...]`; g cumulative, its last axis 1 or d_k."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    overlap: Tensor
    attention: Tensor


def _window(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> _Window:
    """Step 1. q, k `[rows, L, G, d_k]`, v `[rows, L, H, d_v]`, beta `[rows, L, H]`, log_decay also `[.., d_k]`."""
    share = v.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = (x.repeat_interleave(share, dim=1) for x in (q, k))
    g = (log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(-1)).transpose(1, 2).cumsum(2)
    length = v.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=v.device).triu(1)
    decay = (
        (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill_(later[..., None], -torch.inf).exp_()
    )  # [rows, H, i, j, 1 or d_k]
    if decay.shape[-1] == 1:
        overlap, attention = ((x @ k.transpose(-1, -2)) * decay[..., 0] for x in (k, q))
    else:
        overlap, attention = (torch.einsum("rhic,rhijc,rhjc->rhij", x, decay, k) for x in (k, q))
    return _Window(q, k, v, beta.transpose(1, 2).unsqueeze(-1), g, overlap.tril(-1), attention)


def _solve(w: _Window, state: Tensor) -> Tensor:
    """Step 2: u `[rows, H, L, d_v]`."""
    error = w.v - (w.g.exp() * w.k) @ state.transpose(-1, -2)
    system = torch.eye(w.v.shape[2], device=state.device) + w.beta * w.overlap
    return torch.linalg.solve_triangular(system, w.beta * error, upper=False, unitriangular=True)


def _outputs(w: _Window, read: Tensor, u: Tensor) -> Tensor:
    """Step 3: `[rows, H, L, d_v]`."""
    return (w.g.exp() * w.q) @ read.transpose(-1, -2) + w.attention @ u


def _fold(w: _Window, recurrence: Tensor, u_read: Tensor, last: int, stored: Tensor) -> Tensor:
    """Steps 2 and 4. Rows with stored `[rows, 1, 1, 1]` fold the u of their answers, except for token `last`."""
    u = _solve(w, recurrence)
    if stored.any():
        error = w.v[:, :, last] - torch.einsum("rhvc,rhc->rhv", recurrence, w.g[:, :, last].exp() * w.k[:, :, last])
        known = torch.einsum("rhj,rhjv->rhv", w.overlap[:, :, last, :last], u_read[:, :, :last])
        kept = u_read.clone()
        kept[:, :, last] = w.beta[:, :, last] * (error - known)
        u = torch.where(stored, kept, u)
    to_end = (w.g[:, :, -1:] - w.g).exp() * w.k
    return recurrence * w.g[:, :, -1:].exp() + u.transpose(-1, -2) @ to_end


def delta_block(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, group: Group, rows: Sequence[BatchRow],
    folds: int, length: Tensor, write: Callable[[int, Tensor], None],
) -> Tensor:  # fmt: skip
    """Outputs `[rows, W, L, H, d_v]` of windows `[rows, W, L, ...]` in order. The first `folds` windows end in a fold.

    length: real tokens of every window; the rest is empty (β = 0, log α = 0).
    write(w, fold) casts the copies of the group.
    """
    stored = torch.tensor([row.scheme.fold == "stored" for row in rows], device=v.device).view(-1, 1, 1, 1)
    reads_fold = torch.tensor([row.scheme.flush_reads == "fold" for row in rows], device=v.device).view(-1, 1, 1)
    outputs = []
    for index in range(v.shape[1]):
        w = _window(*(x[:, index] for x in (q, k, v, beta, log_decay)))
        u_read = _solve(w, group.read)
        o = _outputs(w, group.read, u_read)
        if index < folds:
            last = int(length[index]) - 1
            fold = _fold(w, group.recurrence, u_read, last, stored)
            from_fold = torch.einsum("rhvc,rhc->rhv", fold, w.q[:, :, last])
            o[:, :, last] = torch.where(reads_fold, from_fold, o[:, :, last])
            write(index, fold)
        outputs.append(o.transpose(1, 2))
    return torch.stack(outputs, dim=1)


def delta_read_only(q: Tensor, group: Group) -> Tensor:
    """o `[rows, T, H, d_v]` of the T newest records, with queries q `[rows, T, G, d_k]`: decoding between folds."""
    k, v, beta, log_decay = group.records
    tokens, seen = q.shape[1], k.shape[1]
    w = _window(torch.cat([q.new_zeros(len(q), seen - tokens, *q.shape[2:]), q], dim=1), k, v, beta, log_decay)
    return _outputs(w, group.read, _solve(w, group.read)).transpose(1, 2)[:, seen - tokens :]
