"""The replay scan in plain torch: many rows side by side, a chunk of tokens at a time, rounded where decoding rounds.

The arithmetic is the window form of `replayssm_emulation.recurrence`. Only the fold is sequential; what does not depend
on the state (step 1 below) and the readout (step 3) are batched over all windows of a block.

    1. ΔS = Σ_j u_j (exp(G_L - G_j) k_j)ᵀ and the attention of a window's tokens to its records
    2. per window: fold = exp(G_L) S + ΔS, then every copy is cast from the fold
    3. o_i = exp(G_i) S_read q_i + attention;  the flushing token reads the fold
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from replayssm_emulation import Rule, Scheme, UsageError, fixed_window, quantize_with_noise, state_noise
from replayssm_emulation.formats import get_format
from replayssm_emulation.philox import READ, RECURRENCE
from replayssm_emulation.schedule import folds, segments
from replayssm_emulation.scheme import Copy
from torch import Tensor

from ..dispatch import check_rows
from .delta import delta_block, delta_read_only

# Elements of the per-window states held at once: bounds memory, changes no result.
_BLOCK_ELEMENTS = 1 << 24
_NOISE_ELEMENTS = 1 << 22
_FEW = 4  # tokens up to which a call that folds nothing is answered from the copy and the records alone
_NARROW = ("bf16", "fp16")  # records that are rounded


@dataclass(frozen=True)
class BatchRow:
    """One batch row: a scheme, the seed and document of its noise, and the length of its prompt in tokens.

    padding: tokens before the text that only fill the batch; part of the prompt's length, not of the noise's positions.
    flushes: the schedule as positions; None follows the scheme's window from the end of the prompt.
    Raises UsageError for positions that are not increasing or lie inside the prompt, for a seed or document that the key of
    the noise cannot hold, and for padding that is not shorter than the prompt.
    """

    scheme: Scheme
    seed: int = 0
    document: int = 0
    prompt: int = 0
    flushes: tuple[int, ...] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.seed < 1 << 64 and 0 <= self.document < 1 << 32):
            raise UsageError(f"noise key out of range: seed {self.seed} (of 2^64), document {self.document} (of 2^32)")
        if self.padding and not 0 <= self.padding < self.prompt:
            raise UsageError(
                f"padding of {self.padding} tokens in a prompt of {self.prompt}: a sequence needs a token of its own"
            )
        if self.flushes:
            segments(list(self.flushes), self.prompt, self.flushes[-1] + 1)

    def folds(self, start: int, stop: int) -> tuple[tuple[int, bool], ...]:
        """(position, rounded) of every fold in [start, stop)."""
        if self.flushes is not None:
            flushes = list(self.flushes)
        else:
            first = self.prompt + max(0, start - self.prompt) // self.scheme.window * self.scheme.window
            flushes = fixed_window(self.scheme.window, first, stop)
        return tuple(folds(flushes, self.prompt, self.scheme.handover == "on", start, stop))


@dataclass
class Group:
    """Rows that fold at the same positions: their copies `[rows, H, d_v, d_k]` and the records since the last fold.

    records: k, v, beta and log_decay, each `[rows, pending, ...]`. flushes: rounded folds so far. changed `[rows, 2]`: in
    how many of those looked at (all, or the newest of every chunk) the cast of the recurrence and of the read copy changed
    anything. zeroed `[rows]`: share of the non-zero elements that the newest read copy holds as zero.
    lag: int32 `[rows]` on the device, or None for each row's padding: what the Triton scan takes off a position to get the
    noise's. Launches that are replayed cannot be told a new position, but find another lag there.
    """

    rows: list[int]
    recurrence: Tensor
    read: Tensor
    records: tuple[Tensor, ...]
    changed: Tensor
    zeroed: Tensor
    flushes: int = 0
    lag: Tensor | None = None


@dataclass
class Carry:
    """What a state layer keeps between chunks. position: tokens seen."""

    position: int = 0
    groups: list[Group] = field(default_factory=list)

    def reorder(self, rows: Sequence[int]) -> None:
        """Batch row i becomes what row rows[i] was; rows may be left out or repeated."""
        for group in self.groups:
            # By place in the group, so that rows that are cast alike stay neighbours.
            moved = sorted((group.rows.index(old), new) for new, old in enumerate(rows) if old in group.rows)
            group.rows = [new for _, new in moved]
            places = torch.tensor([place for place, _ in moved], dtype=torch.int64, device=group.read.device)
            group.recurrence, group.read, group.changed, group.zeroed = (
                x[places] for x in (group.recurrence, group.read, group.changed, group.zeroed)
            )
            group.records = tuple(x[places] for x in group.records)
        self.groups = [group for group in self.groups if group.rows]

    def by_row(self, attribute: str) -> list[Any]:
        """A per-row fact of the groups (flushes, changed, zeroed) in the order of the batch."""
        found = {}
        for group in self.groups:
            value = getattr(group, attribute)
            for place, row in enumerate(group.rows):
                found[row] = value if isinstance(value, int) else value[place].tolist()
        return [found[row] for row in sorted(found)]


@dataclass(frozen=True)
class _Cast:
    """Consecutive rows of a group that are cast alike. seed: of their noise, None for nearest; which: RECURRENCE or READ.

    sources: (document, padding) of every row, or of all where they agree: those share their noise.
    """

    where: slice
    copy: Copy
    noise_bits: int
    seed: int | None
    which: int
    sources: tuple[tuple[int, int], ...]


def replay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    rows: Sequence[BatchRow],
    carry: Carry | None,
    *,
    layer: int,
    rule: Rule = Rule.PLAIN,
    backend: str = "torch",
) -> tuple[Tensor, Carry]:
    """Outputs of the next T tokens and the carry after them: of the plain recurrence, or of the delta rule.

    q, k: `[R, T, G, d_k]`, each group shared by H / G heads; v: `[R, T, H, d_v]`; beta: `[R, T, H]` write strength;
    log_decay: `[R, T, H]` log α, or with delta `[R, T, H, d_k]` for a decay per channel; R = len(rows). carry: None before the first token (zero state). layer: part of the
    noise key. Inputs of any float dtype are worked on in fp32. Returns o fp32 `[R, T, H, d_v]`.
    backend: "torch", or "triton" (see `choose_backend`): the same rounding of the same folds.
    Cutting the tokens into other chunks, or the rows into another order, changes no rounding.
    """
    count, tokens, heads, d_v = v.shape
    d_k = k.shape[-1]
    if count != len(rows) or heads % k.shape[2]:
        raise UsageError(f"{count} batch rows for {len(rows)} schemes, {heads} heads for {k.shape[2]} groups")
    if not (0 <= layer < 1 << 15 and heads <= 1 << 16):
        raise UsageError(f"noise key out of range: layer {layer} (of 2^15), {heads} heads (of 2^16)")
    beta, log_decay = beta.float(), log_decay.float()
    if backend == "torch" or not v.is_cuda or any(row.scheme.records in _NARROW for row in rows):
        q, k, v = q.float(), k.float(), v.float()  # the Triton kernel converts as it loads
    k, v = (_round_records(x, rows, 0 if carry is None else carry.position) for x in (k, v))
    if carry is None:
        carry = _first_carry(rows, k, v, beta, log_decay)
    start, stop = carry.position, carry.position + tokens
    o = torch.full(v.shape, torch.nan, device=v.device)  # poison: every element must be written
    if backend == "triton":
        from ..triton_backend.launch import scan_groups

        check_rows(rows, d_v, d_k)
        scan_groups(q, k, v, beta, log_decay, o, carry.groups, rows, start, layer, rule.delta)
    else:
        for group in carry.groups:
            inputs = tuple(x[group.rows] for x in (k, v, beta, log_decay))
            members = [rows[r] for r in group.rows]
            o[group.rows] = _scan_group(q[group.rows], inputs, group, members, start, stop, layer, rule.delta)
    carry.position = stop
    return o, carry


def _first_carry(rows: Sequence[BatchRow], k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Carry:
    """Zero states. Rows share a group when they fold alike; inside one, rows that are cast alike are neighbours."""
    schedules: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        key = (
            row.scheme.window if row.flushes is None else row.flushes,
            row.prompt,
            row.scheme.handover if row.prompt else "",
        )
        schedules.setdefault(key, []).append(index)
    carry = Carry()
    for members in schedules.values():
        members.sort(key=lambda r: (str(rows[r].scheme), rows[r].seed, rows[r].document))
        heads, d_v = v.shape[2:]
        state = torch.zeros(len(members), heads, d_v, k.shape[3], device=v.device)
        empty = [x.new_zeros(len(members), 0, *x.shape[2:]) for x in (k, v, beta, log_decay)]
        changed = torch.zeros(len(members), 2, dtype=torch.int64, device=v.device)
        carry.groups.append(Group(members, state, state.clone(), tuple(empty), changed, state.new_zeros(len(members))))
    return carry


def _round_records(x: Tensor, rows: Sequence[BatchRow], position: int) -> Tensor:
    """v or k `[R, T, ...]` with the rows that record in a narrower format rounded to it, from the end of their prompt on."""
    rounded = {i: row for i, row in enumerate(rows) if row.scheme.records in _NARROW}
    if rounded:
        x = x.clone()
    for index, row in rounded.items():
        decoded = max(0, row.prompt - position)
        x[index, decoded:] = quantize_with_noise(x[index, decoded:], get_format(row.scheme.records), None)
    return x


def _casts(rows: Sequence[BatchRow], which: int) -> list[_Cast]:
    """How a group's recurrence or read copies are cast, neighbours with one cast merged. Shared rows have no READ."""
    casts: list[_Cast] = []
    for index, row in enumerate(rows):
        copy = row.scheme.recurrence if which == RECURRENCE else row.scheme.read
        if copy is None or not copy.lossy:
            continue
        seed = row.seed if copy.rounding == "stochastic" else None
        cast = _Cast(slice(index, index + 1), copy, row.scheme.noise_bits, seed, which, ((row.document, row.padding),))
        last = casts[-1] if casts else None
        if last and last.where.stop == index and replace(cast, where=last.where, sources=last.sources) == last:
            casts[-1] = replace(last, where=slice(last.where.start, index + 1), sources=last.sources + cast.sources)
        else:
            casts.append(cast)
    return [replace(cast, sources=cast.sources[:1]) if len(set(cast.sources)) == 1 else cast for cast in casts]


class _Noise:
    """Noise words of a group's folds; those of one document are drawn for several positions at a time."""

    def __init__(self, positions: Tensor, shape: tuple[int, int, int], layer: int):
        self.positions, self.shape, self.layer = positions, shape, layer
        heads, d_v, d_k = shape
        self.ahead = max(1, _NOISE_ELEMENTS // (heads * d_v * d_k))
        self.drawn: dict[tuple, tuple[int, Tensor]] = {}

    def words(self, cast: _Cast, index: int) -> Tensor | None:
        """int64 of the index-th fold: `[H, d_v, d_k]` for rows that share it, `[rows, H, d_v, d_k]` for others."""
        if cast.seed is None:
            return None
        documents, paddings = torch.tensor(cast.sources, device=self.positions.device).T
        if len(cast.sources) > 1:
            return self._draw(cast, documents, self.positions[index] - paddings)
        key = (cast.seed, cast.which, cast.sources)
        first, words = self.drawn.get(key, (-self.ahead, self.positions))
        if not first <= index < first + self.ahead:
            words = self._draw(cast, cast.sources[0][0], self.positions[index : index + self.ahead] - paddings)
            first, self.drawn[key] = index, (index, words)
        return words[index - first]

    def _draw(self, cast: _Cast, documents: int | Tensor, positions: Tensor) -> Tensor:
        assert cast.seed is not None
        heads, d_v, d_k = self.shape
        return state_noise(
            cast.seed, document=documents, layer=self.layer, heads=heads, copy=cast.which, positions=positions, d_v=d_v, d_k=d_k
        )  # fmt: skip


def _scan_group(
    q: Tensor,
    inputs: tuple[Tensor, ...],
    group: Group,
    rows: Sequence[BatchRow],
    start: int,
    stop: int,
    layer: int,
    delta: bool,
) -> Tensor:
    """Outputs `[rows, T, H, d_v]` of one group; updates its copies and records in place."""
    tokens, heads, d_v, d_k = stop - start, *group.recurrence.shape[1:]
    pending = group.records[0].shape[1]
    first = start - pending  # position of the first record
    cuts = rows[0].folds(start, stop)
    if not cuts and tokens <= _FEW:
        group.records = tuple(torch.cat([old, x], dim=1) for old, x in zip(group.records, inputs, strict=True))
        return delta_read_only(q, group) if delta else _read_only(q, group)
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

    noise = _Noise(torch.tensor([p for p, _ in cuts], device=q.device), (heads, d_v, d_k), layer)
    per_window = max(group.recurrence.numel(), len(rows) * heads * longest * longest)
    block = max(1, _BLOCK_ELEMENTS // per_window)
    outputs = []
    for a in range(0, len(lengths), block):
        window = index[a : a + block]
        k, v, beta, log_decay = (x[:, window] for x in with_records)
        members = (group, rows, cuts[a : a + block])
        write = _writer(*members, a, noise)
        if delta:
            outputs.append(
                delta_block(
                    q[:, window], k, v, beta, log_decay, group, rows, len(members[2]), length[a : a + block], write
                )
            )
        else:
            outputs.append(_scan_block(q[:, window], k, v, beta, log_decay, *members, length[a : a + block], write))
    flat = torch.cat([o.flatten(1, 2) for o in outputs], dim=1)
    real = (offsets < length[:, None]).flatten().nonzero().flatten().to(q.device)
    tail = tokens + pending - (edges[-1] - first)
    group.records = tuple(x[:, pending + tokens - tail : pending + tokens].clone() for x in with_records)
    return flat[:, real[pending:]]


def _read_only(q: Tensor, group: Group) -> Tensor:
    """`_scan_group` for the group's newest records, before the next fold, as in decoding: only their own outputs are computed."""
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


def _writer(
    group: Group, rows: Sequence[BatchRow], cuts: Sequence[tuple[int, bool]], fold_index: int, noise: _Noise
) -> Callable[[int, Tensor], None]:
    """write(w, fold): the copies of a group after the fold cuts[w], which is the (fold_index + w)-th of `noise`."""
    recurrence_casts, read_casts = _casts(rows, RECURRENCE), _casts(rows, READ)
    last_rounded = max((w for w, (_, rounded) in enumerate(cuts) if rounded), default=-1)
    shared = [i for i, row in enumerate(rows) if row.scheme.read is None]
    chained = [i for i, row in enumerate(rows) if row.scheme.cast == "chained"]

    def cast(which: int, casts: list[_Cast], source: Tensor, target: Tensor, index: int) -> None:
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


def _scan_block(
    q, k, v, beta, log_decay, group: Group, rows, cuts, length, write: Callable[[int, Tensor], None]
) -> Tensor:
    """Windows `[rows, W, L, ...]` of a group in order; `cuts` has one entry per window that ends in a fold."""
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
        if w >= len(cuts):
            break
        fold = torch.addcmul(delta[:, w], group.recurrence, decay[:, w], out=delta[:, w])
        write(w, fold)

    # 3. readout
    read = reads.view(count, windows, groups, share * d_v, d_k) @ q.transpose(-1, -2)
    o = o + read.view(count, windows, heads, d_v, longest).transpose(-1, -2) * g.transpose(2, 3).exp().unsqueeze(-1)
    flushed = torch.arange(len(cuts), device=q.device)
    last = length[: len(cuts)].to(q.device) - 1
    q_last = q.transpose(2, 3)[:, flushed, last]  # [rows, F, G, d_k]
    folds = delta[:, : len(cuts)].reshape(count, len(cuts), groups, share * d_v, d_k)
    from_fold = (folds @ q_last.unsqueeze(-1)).view(count, len(cuts), heads, d_v)
    reads_fold = torch.tensor([row.scheme.flush_reads == "fold" for row in rows], device=q.device).view(-1, 1, 1, 1)
    o = o.transpose(2, 3).contiguous()  # [rows, W, L, H, d_v]
    o[:, flushed, last] = torch.where(reads_fold, from_fold, o[:, flushed, last])
    return o
