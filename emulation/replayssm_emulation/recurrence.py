"""The reference recurrence: what decoding with low-precision copies computes, in two forms that check each other.

    S_t = S_{t-1} diag(α_t) + u_t k_tᵀ        o_t = S_t q_t
    u_t = β_t v_t                             plain (Mamba-2: v = x, β = Δ, k = B, q = C; lightning: β = 1)
    u_t = β_t (v_t - S_{t-1} diag(α_t) k_t)   delta (GDN, KDA: decay first, then the error)

The step form walks the tokens one by one; the window form treats a window as matrices, as a fast kernel would (the
chunked form of Mamba-2's SSD, Dao & Gu 2024, and of the delta rule, Yang et al. 2024). Both work in the dtype of v, so
float64 gives the oracle. Casts always see fp32.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import UsageError
from .formats import get_format
from .philox import READ, RECURRENCE, state_noise
from .quantizer import quantize_with_noise
from .schedule import segments
from .scheme import Copy, Scheme


@dataclass(frozen=True)
class NoiseKey:
    """The part of a state's noise key that a whole run of the recurrence shares."""

    seed: int = 0
    document: int = 0
    layer: int = 0


@dataclass
class Trace:
    """o: `[T, H, d_v]`. copies: after each flush (position, recurrence copy, read copy), each copy `[H, d_v, d_k]`."""

    o: Tensor
    copies: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


def cast_copy(state: Tensor, copy: Copy, which: int, position: int, key: NoiseKey, noise_bits: int = 32) -> Tensor:
    """`state` `[H, d_v, d_k]` as it reads back from `copy`; `which` is RECURRENCE or READ. Keeps the dtype."""
    if not copy.lossy:
        return state
    noise = None
    if copy.rounding == "stochastic":
        heads, d_v, d_k = state.shape
        where = torch.tensor([position], device=state.device)
        noise = state_noise(
            key.seed, document=key.document, layer=key.layer, heads=heads, copy=which, positions=where, d_v=d_v, d_k=d_k
        )[0]
    return quantize_with_noise(state.float(), copy.format, noise, noise_bits).to(state.dtype)


def cast_copies(fold: Tensor, scheme: Scheme, position: int, key: NoiseKey) -> tuple[Tensor, Tensor]:
    """(recurrence copy, read copy) written from one unrounded fold."""
    recurrence = cast_copy(fold, scheme.recurrence, RECURRENCE, position, key, scheme.noise_bits)
    if scheme.read is None:
        return recurrence, recurrence
    source = recurrence if scheme.cast == "chained" else fold
    return recurrence, cast_copy(source, scheme.read, READ, position, key, scheme.noise_bits)


def round_records(x: Tensor, scheme: Scheme, prompt: int = 0) -> Tensor:
    """v or k `[T, ...]` in the scheme's record format (nearest even), from token `prompt` on.

    "model" keeps what the model supplies; a prompt is processed at once and keeps no records.
    """
    if scheme.records in ("model", "fp32"):
        return x
    recorded = quantize_with_noise(x[prompt:].float(), get_format(scheme.records), None).to(x.dtype)
    return torch.cat([x[:prompt], recorded])


def _advance(state, k, v, beta, log_decay, delta, u=None):
    """One token: (new state, u). `u` replaces the computed one when given."""
    alpha = log_decay.exp().unsqueeze(-1)  # [H, 1], or [H, d_k, 1] for a decay per channel
    state = state * (alpha.unsqueeze(-1) if alpha.ndim == 2 else alpha.transpose(-1, -2))
    if u is None:
        error = v - torch.einsum("hvk,hk->hv", state, k) if delta else v
        u = beta.unsqueeze(-1) * error
    return state + u.unsqueeze(-1) * k.unsqueeze(-2), u


def _begin(q, k, v, beta, log_decay, scheme, flushes, delta, state, prompt, key):
    """What both forms start from: (k, v as recorded, windows of the schedule, outputs of the prompt, both copies).

    Checks the shapes of one sequence; the prompt runs in full precision and is rounded at its end (hand-over).
    """
    tokens, heads, d_k = q.shape
    if k.shape != q.shape or v.shape[:2] != (tokens, heads) or beta.shape != (tokens, heads):
        raise UsageError(
            f"shapes do not agree: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, beta {tuple(beta.shape)}"
        )
    if log_decay.shape not in ((tokens, heads), (tokens, heads, d_k)):
        raise UsageError(f"log_decay has shape {tuple(log_decay.shape)}: use [T, H] or [T, H, d_k]")
    k, v = round_records(k, scheme, prompt), round_records(v, scheme, prompt)
    windows = segments(flushes, prompt, tokens)
    state = v.new_zeros(heads, v.shape[-1], d_k) if state is None else state
    outputs = []
    for t in range(prompt):
        state, _ = _advance(state, k[t], v[t], beta[t], log_decay[t], delta)
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    handed_over = prompt and scheme.handover == "on"
    return k, v, windows, outputs, *(cast_copies(state, scheme, prompt - 1, key) if handed_over else (state, state))


def recurrence_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    scheme: Scheme,
    flushes: list[int],
    *,
    delta: bool = False,
    state: Tensor | None = None,
    prompt: int = 0,
    key: NoiseKey = NoiseKey(),
) -> Trace:
    """Token by token: one running state per copy, both advanced by every token, the read one answering.

    q, k: `[T, H, d_k]`; v: `[T, H, d_v]`; beta: `[T, H]`; log_decay: log α, `[T, H]` or per channel `[T, H, d_k]`;
    state: `[H, d_v, d_k]` before the first token, default 0; flushes: sorted positions in [prompt, T).
    The first `prompt` tokens run in full precision. Position t is the noise position of a flush after token t.
    """
    begun = _begin(q, k, v, beta, log_decay, scheme, flushes, delta, state, prompt, key)
    k, v, windows, outputs, recurrence, read = begun
    trace = Trace(v)
    for first, stop, ends_in_flush in windows:
        from_recurrence, from_read = recurrence, read
        for t in range(first, stop):
            flush = ends_in_flush and t == stop - 1
            from_read, u = _advance(from_read, k[t], v[t], beta[t], log_decay[t], delta)
            stored = u if delta and scheme.fold == "stored" and not flush else None
            from_recurrence, _ = _advance(from_recurrence, k[t], v[t], beta[t], log_decay[t], delta, stored)
            answer = from_recurrence if flush and scheme.flush_reads == "fold" else from_read
            outputs.append(torch.einsum("hvk,hk->hv", answer, q[t]))
        if ends_in_flush:
            recurrence, read = cast_copies(from_recurrence, scheme, stop - 1, key)
            trace.copies.append((stop - 1, recurrence, read))
    trace.o = torch.stack(outputs)
    return trace


def _solve(
    copy: Tensor, keys: Tensor, overlap: Tensor | None, v: Tensor, beta: Tensor, known: Tensor | None = None
) -> Tensor:
    """u `[H, L, d_v]` of a window that starts from `copy` (step 2 below); overlap None is the plain recurrence.

    known: u of all but the last token, when they were stored.
    """
    beta = beta.unsqueeze(-1)
    if overlap is None:
        return beta * v
    error = v - torch.einsum("hvk,hik->hiv", copy, keys)
    if known is not None:
        return torch.cat([known, beta[:, -1:] * (error[:, -1:] - overlap[:, -1:, :-1] @ known)], dim=1)
    system = torch.eye(v.shape[1], dtype=v.dtype, device=v.device) + beta * overlap
    return torch.linalg.solve_triangular(system, beta * error, upper=False, unitriangular=True)


def recurrence_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    scheme: Scheme,
    flushes: list[int],
    *,
    delta: bool = False,
    state: Tensor | None = None,
    prompt: int = 0,
    key: NoiseKey = NoiseKey(),
) -> Trace:
    """Window by window; arguments and result as in `recurrence_steps`.

    With G_i the cumulative log-decay of the window and S the copy it starts from:

        1. M_ij = Σ_c k_ic exp(G_ic - G_jc) k_jc        overlap of token i's key with record j
        2. u = β (v - S exp(G) k - Σ_{j<i} M_ij u_j)    a unit lower triangular system (delta), or β v (plain)
        3. o_i = S exp(G_i) q_i + Σ_{j≤i} (q_i exp(G_i - G_j) k_j) u_j
        4. fold = S diag(exp(G_L)) + Σ_j u_j (exp(G_L - G_j) k_j)ᵀ
    """
    begun = _begin(q, k, v, beta, log_decay, scheme, flushes, delta, state, prompt, key)
    k, v, windows, outputs, recurrence, read = begun
    trace = Trace(v)
    for first, stop, ends_in_flush in windows:
        wq, wk, wv, wb, g = (x[first:stop].transpose(0, 1) for x in (q, k, v, beta, log_decay))  # [H, L, ...]
        g = (g.unsqueeze(-1) if g.ndim == 2 else g).expand_as(wk).cumsum(1)
        length = stop - first
        causal = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
        # exp of a difference, never a quotient of exps: strong gates would overflow.
        decay = (g.unsqueeze(2) - g.unsqueeze(1)).masked_fill(~causal[..., None], -torch.inf).exp()  # [H, i, j, d_k]

        overlap = torch.einsum("hic,hijc,hjc->hij", wk, decay, wk).tril(-1) if delta else None
        keys = g.exp() * wk  # what a token's key meets of the copy
        u_read = _solve(read, keys, overlap, wv, wb)
        attention = torch.einsum("hic,hijc,hjc->hij", wq, decay, wk)
        o = torch.einsum("hvk,hik->hiv", read, g.exp() * wq) + attention @ u_read
        if ends_in_flush:
            known = u_read[:, :-1] if scheme.fold == "stored" else None
            u_fold = _solve(recurrence, keys, overlap, wv, wb, known)
            fold = recurrence * g[:, -1:].exp() + torch.einsum("hiv,hik->hvk", u_fold, decay[:, -1] * wk)
            if scheme.flush_reads == "fold":
                o[:, -1] = torch.einsum("hvk,hk->hv", fold, wq[:, -1])
            recurrence, read = cast_copies(fold, scheme, stop - 1, key)
            trace.copies.append((stop - 1, recurrence, read))
        outputs.extend(o.unbind(1))
    trace.o = torch.stack(outputs)
    return trace
