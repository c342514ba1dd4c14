"""One group of rows in torch: cut the tokens into windows, scan them in blocks, cast the copies after every fold."""

from collections.abc import Callable, Sequence

import torch
from replayssm_emulation import Rule, quantize_with_noise
from replayssm_emulation.philox import READ, RECURRENCE
from torch import Tensor

from ..state import BatchRow, Group
from .casts import FoldNoise, RowCast, plan_casts
from .delta import delta_block, delta_read_only
from .plain import plain_block, plain_read_only

_BLOCK_ELEMENTS = 1 << 24  # of the per-window states held at once: bounds memory, changes no result
_FEW = 4  # tokens up to which a call that folds nothing is answered from the copy and the records alone


def scan_group(
    q: Tensor,
    inputs: tuple[Tensor, ...],
    group: Group,
    rows: Sequence[BatchRow],
    start: int,
    stop: int,
    layer: int,
    rule: Rule,
) -> Tensor:
    """Outputs `[rows, T, H, d_v]` of one group; updates its copies and records in place."""
    tokens, heads, d_v, d_k = stop - start, *group.recurrence.shape[1:]
    pending = group.records[0].shape[1]
    first = start - pending  # position of the first record
    cuts = rows[0].folds(start, stop)
    if not cuts and tokens <= _FEW:
        group.records = tuple(torch.cat([old, x], dim=1) for old, x in zip(group.records, inputs, strict=True))
        return delta_read_only(q, group) if rule.delta else plain_read_only(q, group)
    # Windows as index rows into [records, new tokens, one empty token]; short windows end in the empty token.
    edges = [first] + [p + 1 for p, _ in cuts]
    lengths = [b - a for a, b in zip(edges, [*edges[1:], stop], strict=True)]
    if lengths[-1] == 0:
        lengths.pop()
    longest = max(lengths)
    offsets = torch.arange(longest)
    starts = torch.tensor(edges[: len(lengths)]) - first
    length = torch.tensor(lengths)
    index = torch.where(offsets < length[:, None], starts[:, None] + offsets, pending + tokens).to(q.device)
    with_records = [
        torch.cat([old, new, torch.zeros_like(new[:, :1])], dim=1)
        for old, new in zip(group.records, inputs, strict=True)
    ]
    q = torch.cat([q.new_zeros(len(rows), pending, *q.shape[2:]), q, torch.zeros_like(q[:, :1])], dim=1)

    noise = FoldNoise(torch.tensor([p for p, _ in cuts], device=q.device), (heads, d_v, d_k), layer)
    per_window = max(group.recurrence.numel(), len(rows) * heads * longest * longest)
    block = max(1, _BLOCK_ELEMENTS // per_window)
    outputs = []
    for a in range(0, len(lengths), block):
        window = index[a : a + block]
        k, v, beta, log_decay = (x[:, window] for x in with_records)
        ends = cuts[a : a + block]
        write = _writer(group, rows, ends, a, noise)
        scan_block = delta_block if rule.delta else plain_block
        outputs.append(
            scan_block(q[:, window], k, v, beta, log_decay, group, rows, len(ends), length[a : a + block], write)
        )
    flat = torch.cat([o.flatten(1, 2) for o in outputs], dim=1)
    real = (offsets < length[:, None]).flatten().nonzero().flatten().to(q.device)
    tail = tokens + pending - (edges[-1] - first)
    group.records = tuple(x[:, pending + tokens - tail : pending + tokens].clone() for x in with_records)
    return flat[:, real[pending:]]


def _writer(
    group: Group, rows: Sequence[BatchRow], cuts: Sequence[tuple[int, bool]], fold_index: int, noise: FoldNoise
) -> Callable[[int, Tensor], None]:
    """write(w, fold): the copies of a group after the fold cuts[w], which is the (fold_index + w)-th of `noise`."""
    recurrence_casts, read_casts = plan_casts(rows, RECURRENCE), plan_casts(rows, READ)
    last_rounded = max((w for w, (_, rounded) in enumerate(cuts) if rounded), default=-1)
    shared = [i for i, row in enumerate(rows) if row.scheme.read is None]
    chained = [i for i, row in enumerate(rows) if row.scheme.cast == "chained"]

    def cast(which: int, casts: list[RowCast], source: Tensor, target: Tensor, index: int) -> None:
        for c in casts:
            words = noise.words(c, index)
            exact = source[c.where]
            stored = quantize_with_noise(exact, c.copy.format, words, c.noise_bits)
            group.changed[c.where, which] += (stored != exact).flatten(1).any(1)
            target[c.where] = stored

    def write(w: int, fold: Tensor) -> None:
        group.recurrence = fold.clone()
        group.read = fold.clone()
        if not cuts[w][1]:
            return
        cast(RECURRENCE, recurrence_casts, fold, group.recurrence, fold_index + w)
        source = fold
        if chained:
            source = fold.clone()
            source[chained] = group.recurrence[chained]
            group.read = source.clone()  # also where the read copy itself rounds nothing
        cast(READ, read_casts, source, group.read, fold_index + w)
        group.read[shared] = group.recurrence[shared]
        group.flushes += 1
        if w == last_rounded:
            held = fold != 0
            group.zeroed = (held & (group.read == 0)).flatten(1).sum(1) / held.flatten(1).sum(1).clamp(min=1)

    return write
