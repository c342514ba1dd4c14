"""The replay scan as one Triton kernel: a program per row and head walks the windows with the copies in registers.

Arithmetic and rounding are those of `scan`; only the order of fp32 sums inside a product may differ. A window is read in
pieces of up to 16 tokens; both copies run on unrounded between the pieces of a longer window and in an unfinished one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from replayssm_emulation import Scheme
from replayssm_emulation.scheme import Copy
from torch import Tensor

if TYPE_CHECKING:
    from .scan import Group, Row

from .rounding import cast_constants, cast_tile, tile_noise

PIECE = 16  # tokens per piece: the smallest operand of a tensor-core product
_WIDEST = 256


def specialisation(scheme: Scheme, d_v: int, d_k: int) -> tuple | None:
    """What a kernel is compiled for, or None when it cannot run this scheme or head size."""

    def constants(copy: Copy) -> tuple | None:
        return cast_constants(copy.format, d_k, copy.rounding == "stochastic", scheme.noise_bits)

    recurrence = constants(scheme.recurrence)
    read = constants(scheme.read) if scheme.read is not None else (False,) * 13
    if recurrence is None or read is None or max(d_v, d_k) > _WIDEST:
        return None
    return recurrence, read, scheme.read is None, scheme.cast == "chained", scheme.flush_reads == "fold"


@triton.jit
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, o_ptr, recurrence_ptr, read_ptr, count_ptr,
    row_ptr, seed_ptr, document_ptr, start_ptr, kind_ptr, windows, tokens, layer,
    heads, groups, d_v, d_k,
    D_V: tl.constexpr, D_K: tl.constexpr, L: tl.constexpr, SINGLE: tl.constexpr,
    RECURRENCE_CAST: tl.constexpr, READ_CAST: tl.constexpr, SHARED: tl.constexpr, CHAINED: tl.constexpr, READS_FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Inputs contiguous: q, k `[R, T, G, d_k]`, v, o `[R, T, H, d_v]`, beta, decay `[R, T, H]`, copies `[R, H, d_v, d_k]`.

    start `[windows + 1]`: first token of each window; kind `[windows, 2]`: (0 unfinished, 1 unrounded fold, 2 rounded
    fold; position). count `[R, H, 4]`: casts that changed the recurrence copy, the read copy, non-zero elements of the
    newest fold, zeros among what the read copy holds of them. SINGLE: every window is one token that reads its fold.
    """
    row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    group = head // (heads // groups)
    seed = tl.load(seed_ptr + row)
    document = tl.load(document_ptr + row)
    key = (layer << 17) | (head << 1)
    quads = (d_k + 3) // 4

    i, j, t = tl.arange(0, D_V), tl.arange(0, D_K), tl.arange(0, L)
    in_v, in_k = i < d_v, j < d_k
    inside = in_v[:, None] & in_k[None, :]
    state = ((row * heads + head) * d_v + i[:, None]) * d_k + j[None, :]
    recurrence = tl.load(recurrence_ptr + state, mask=inside, other=0.0)
    read = tl.load(read_ptr + state, mask=inside, other=0.0)
    zero = tl.program_id(1) * 0  # a number that the loop can replace
    changed_recurrence, changed_read, held, zeroed = zero, zero, zero, zero

    for w in range(windows):
        first, stop = tl.load(start_ptr + w), tl.load(start_ptr + w + 1)
        kind, position = tl.load(kind_ptr + 2 * w), tl.load(kind_ptr + 2 * w + 1)
        if kind == 0:
            # The unfinished window is computed again with the next chunk: keep the copies that it starts from.
            tl.store(recurrence_ptr + state, recurrence, mask=inside)
            tl.store(read_ptr + state, read, mask=inside)
        for piece in range(first, stop, L):
            token = (row * tokens + piece + t).to(tl.int64)
            live = piece + t < stop
            at_head = token * heads + head
            at_group = token * groups + group
            g = tl.load(decay_ptr + at_head, mask=live, other=0.0)
            beta = tl.load(beta_ptr + at_head, mask=live, other=0.0)
            k = tl.load(k_ptr + at_group[:, None] * d_k + j[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
            q = tl.load(q_ptr + at_group[:, None] * d_k + j[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
            v = tl.load(v_ptr + at_head[:, None] * d_v + i[None, :], mask=live[:, None] & in_v[None, :], other=0.0)
            u = beta[:, None] * v
            ends = (piece + L >= stop) & (kind > 0)
            if SINGLE:
                gate = tl.exp(tl.sum(g, axis=0))
                fold = gate * recurrence + tl.sum(u, axis=0)[:, None] * tl.sum(k, axis=0)[None, :]
                o = tl.sum(fold * tl.sum(q, axis=0)[None, :], axis=1)[None, :] + tl.zeros_like(v)
            else:
                g = tl.cumsum(g, axis=0)
                last = tl.sum(tl.where(t == L - 1, g, 0.0), axis=0)
                causal = t[:, None] >= t[None, :]
                between = tl.exp(tl.where(causal, g[:, None] - g[None, :], float("-inf")))
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
                o = tl.dot(scores, u, input_precision=PRECISION)
                o += tl.exp(g)[:, None] * tl.dot(q, tl.trans(read), input_precision=PRECISION)
                delta = tl.dot(tl.trans(u * tl.exp(last - g)[:, None]), k, input_precision=PRECISION)
                gate = tl.exp(last)
                fold = gate * recurrence + delta
                if ends:
                    if READS_FOLD:
                        final = t == stop - piece - 1
                        from_fold = tl.sum(fold * tl.sum(tl.where(final[:, None], q, 0.0), axis=0)[None, :], axis=1)
                        o = tl.where(final[:, None], from_fold[None, :], o)
                else:
                    read = fold if SHARED else gate * read + delta
            tl.store(o_ptr + at_head[:, None] * d_v + i[None, :], o, mask=live[:, None] & in_v[None, :])
            recurrence = fold
            if ends:
                read = fold
                if kind == 2:
                    recurrence = cast_tile(
                        fold, _noise(seed, position, key | 0, document, quads, D_V, D_K, RECURRENCE_CAST), RECURRENCE_CAST
                    )
                    if SHARED:
                        read = recurrence
                    else:
                        source = recurrence if CHAINED else fold
                        read = cast_tile(source, _noise(seed, position, key | 1, document, quads, D_V, D_K, READ_CAST), READ_CAST)
                        changed_read += tl.max(tl.max((read != source).to(tl.int32), axis=1), axis=0)
                    changed_recurrence += tl.max(tl.max((recurrence != fold).to(tl.int32), axis=1), axis=0)
                    held = tl.sum(tl.sum((fold != 0.0).to(tl.int32), axis=1), axis=0)
                    zeroed = tl.sum(tl.sum(((fold != 0.0) & (read == 0.0)).to(tl.int32), axis=1), axis=0)
        if kind > 0:
            if w == windows - 1:
                tl.store(recurrence_ptr + state, recurrence, mask=inside)
                tl.store(read_ptr + state, read, mask=inside)
    counts = count_ptr + (row * heads + head) * 4
    tl.store(counts, changed_recurrence)
    tl.store(counts + 1, changed_read)
    tl.store(counts + 2, held)
    tl.store(counts + 3, zeroed)


@triton.jit
def _noise(seed, position, key, document, quads, D_V: tl.constexpr, D_K: tl.constexpr, CAST: tl.constexpr):
    """Noise words where the cast is stochastic, anything of the right shape where it is not."""
    if CAST[12] == 0:
        return tl.zeros((D_V, D_K), dtype=tl.uint32)
    return tile_noise(seed, position, key, document, quads, D_V, D_K)


def scan_windows(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, recurrence: Tensor, read: Tensor,
    starts: list[int], kinds: list[tuple[int, int]], schemes: list[Scheme], seeds: list[int], documents: list[int], layer: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of rows that share windows; the copies are replaced in place.

    q, k: fp32 `[R, T, G, d_k]`; v: `[R, T, H, d_v]`; beta, log_decay: `[R, T, H]`; recurrence, read: fp32
    `[R, H, d_v, d_k]`, contiguous. starts: first token of every window, and T. kinds: (kind, position) of each, see
    `_scan_kernel`. Every scheme must have a `specialisation`. Rows that are compiled alike are one launch.
    Returns o `[R, T, H, d_v]` and int32 counts `[R, H, 4]`.
    """
    rows, tokens, heads, d_v = v.shape
    groups, d_k = k.shape[2:]
    q, k, v, beta, log_decay = (x.contiguous() for x in (q, k, v, beta, log_decay))
    device = v.device
    o = torch.full_like(v, torch.nan)  # poison: every element must be written
    counts = torch.zeros(rows, heads, 4, dtype=torch.int32, device=device)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    kind = torch.tensor(kinds, dtype=torch.int32, device=device).view(-1, 2)
    # A 64-bit seed fits int64 by its bit pattern.
    seed = torch.tensor([s - (1 << 64) if s >= 1 << 63 else s for s in seeds], dtype=torch.int64, device=device)
    document = torch.tensor(documents, dtype=torch.int64, device=device)
    single = all(b - a == 1 and kind[0] > 0 for a, b, kind in zip(starts, starts[1:], kinds, strict=False))
    launches: dict[tuple, list[int]] = {}
    for row, scheme in enumerate(schemes):
        found = specialisation(scheme, d_v, d_k)
        assert found is not None, scheme
        launches.setdefault(found, []).append(row)
    for (recurrence_cast, read_cast, shared, chained, reads_fold), members in launches.items():
        one = single and reads_fold
        _scan_kernel[(len(members), heads)](
            q, k, v, beta, log_decay, o, recurrence, read, counts,
            torch.tensor(members, dtype=torch.int32, device=device), seed, document, start, kind, len(kinds), tokens, layer,
            heads, groups, d_v, d_k,
            D_V=max(16, triton.next_power_of_2(d_v)), D_K=max(16, triton.next_power_of_2(d_k)), L=1 if one else PIECE, SINGLE=one,
            RECURRENCE_CAST=recurrence_cast, READ_CAST=read_cast, SHARED=shared, CHAINED=chained, READS_FOLD=reads_fold,
            PRECISION="ieee" if device.type == "cpu" else "tf32x3", enable_fp_fusion=False,
            num_warps=8 if d_v * d_k > 4096 else 4,
        )  # fmt: skip
    return o, counts


def scan_group(q: Tensor, inputs: tuple[Tensor, ...], group: "Group", rows: "Sequence[Row]", start: int, stop: int, layer: int) -> Tensor:
    """Outputs `[rows, T, H, d_v]` of one group; updates its copies, records and counts: `scan._scan_group` on the device."""
    pending = group.records[0].shape[1]
    first = start - pending
    cuts = rows[0].folds(start, stop)
    starts = [0] + [position + 1 - first for position, _ in cuts]
    kinds = [(2 if rounded else 1, position) for position, rounded in cuts]
    tail = stop - first - starts[-1]
    if tail:
        starts.append(stop - first)
        kinds.append((0, 0))
    with_records = [torch.cat([old, new], dim=1) for old, new in zip(group.records, inputs, strict=True)]
    q = torch.cat([q.new_zeros(len(rows), pending, *q.shape[2:]), q], dim=1)
    k, v, beta, log_decay = with_records
    schemes, seeds, documents = [r.scheme for r in rows], [r.seed for r in rows], [r.document for r in rows]
    o, counts = scan_windows(q, k, v, beta, log_decay, group.recurrence, group.read, starts, kinds, schemes, seeds, documents, layer)
    group.records = tuple(x[:, x.shape[1] - tail :].clone() for x in with_records)
    if rounded := sum(r for _, r in cuts):
        group.flushes += rounded
        # A cast of a row changed something when it did so in any head: at least as often as in the busiest head.
        group.changed += counts[:, :, :2].amax(1)
        group.zeroed = counts[:, :, 3].sum(1) / counts[:, :, 2].sum(1).clamp(min=1)
    return o[:, pending:]
