"""The replay scan on a GPU: which rows run as one launch, on which tables, and one launcher per kernel.

Arithmetic and rounding are those of the torch scan. Only the order of fp32 sums inside a product may differ.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from replayssm_emulation import Rule
from torch import Tensor

from ..state import BatchRow, Group
from .delta_kernels import delta_prepare_kernel, delta_window_kernel
from .plain_kernels import prepare_kernel, window_kernel
from .tiles import Specialisation, Tiles, delta_tiles, specialisation, token_tiles, window_tiles
from .token_kernels import token_kernel

PIECE = 16  # tokens per piece: the smallest operand of a tensor-core product
VARIANTS: set[tuple] = set()  # what was asked of the compiler


class Piece(NamedTuple):
    """A row of the table of pieces, in the order of `state_tiles.FIRST` to `ORIGIN`.

    first, stop: tokens, counted from the first record. kind: 0 the window goes on, 1 unrounded fold, 2 rounded fold.
    position: of the fold. slot: place of the fold and its copies, -1 if they are not kept. origin: 0, unknown to the
    compiler.
    """

    first: int
    stop: int
    kind: int = 0
    position: int = 0
    slot: int = -1
    origin: int = 0


@lru_cache(maxsize=1024)
def _pieces(first: int, cuts: tuple[tuple[int, bool], ...], stop: int, device: torch.device) -> tuple[Tensor, bool]:
    """(table, LONG) of `window_kernel` for folds `cuts` in tokens [first, stop). The last fold is kept."""
    table: list[Piece] = []
    start, long = first, False
    for position, rounded in cuts:
        edges = [*range(start, position + 1, PIECE), position + 1]
        long |= len(edges) > 2
        table += [Piece(a - first, b - first) for a, b in pairwise(edges)]
        slot = 0 if position == cuts[-1][0] else -1
        table[-1] = table[-1]._replace(kind=2 if rounded else 1, position=position, slot=slot)
        start = position + 1
    edges = [*range(start, stop, PIECE), stop]
    table += [Piece(a - first, b - first) for a, b in pairwise(edges)]
    return torch.tensor(table, dtype=torch.int32, device=device), long or len(edges) > 2


@lru_cache(maxsize=4096)
def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor, copied once. A 64-bit seed fits int64 by its bit pattern."""
    return torch.tensor([v - (1 << 64) if v >= 1 << 63 else v for v in values], dtype=dtype, device=device)


def _select_rows(x: Tensor, index: Sequence[int]) -> Tensor:
    """Rows of x. Returns x itself if all are selected. The index stays on the device: a CUDA graph can capture it."""
    return x if list(index) == list(range(len(x))) else x[_on_device(tuple(index), torch.int64, x.device)]


def _contiguous_tokens(x: Tensor) -> Tensor:
    """x `[R, T, a, b]` with its last two axes contiguous. Kernels take any stride of the others."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


@dataclass(frozen=True)
class Shape:
    """Sizes of one scan: H heads of `[d_v, d_k]`, their keys shared in groups, over some tokens."""

    tokens: int
    heads: int
    groups: int
    d_v: int
    d_k: int

    @property
    def padded_d_k(self) -> int:
        return max(16, triton.next_power_of_2(self.d_k))


@dataclass(frozen=True)
class GroupScan:
    """The inputs that all launches of one group share.

    q, k `[R, T, G, d_k]`, v `[R, T, H, d_v]` of any float dtype; beta fp32 `[R, T, H]`; decay like beta (log α), or α
    `[R, T, H, d_k]` with channels; o fp32 `[R, T, H, d_v]`. Row index[n] of these tensors belongs to rows[n] and to the
    n-th copies of the group. fold: `[rows, H, d_v, d_k]`, written. pieces: table of `_pieces`. single: every token
    folds. exact: 16-bit inputs, which fit one TF32 operand.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    o: Tensor
    fold: Tensor
    group: Group
    rows: Sequence[BatchRow]
    index: list[int]
    pieces: Tensor
    long: bool
    single: bool
    layer: int
    delta: bool
    channels: bool
    exact: bool

    @property
    def device(self) -> torch.device:
        return self.v.device

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, device=self.device)


class Alike(NamedTuple):
    """Rows of a group that are compiled alike. stored: the fold takes the u that the answers were made with."""

    wanted: Specialisation
    stored: bool
    members: tuple[int, ...]


def _precision() -> str:
    return "ieee" if triton.knobs.runtime.interpret else "tf32x2"


def _scan_group(
    inputs: tuple[Tensor, ...], o: Tensor, group: Group, rows: Sequence[BatchRow], index: list[int], first: int,
    cuts: tuple[tuple[int, bool], ...], layer: int, rule: Rule,
) -> GroupScan:  # fmt: skip
    """inputs: q, k, v, beta and log_decay. first: position of token 0. cuts: (position, rounded) of the folds."""
    q, k, v = (_contiguous_tokens(x) for x in inputs[:3])
    beta, log_decay = (x.contiguous() for x in inputs[3:])
    tokens, heads, d_v = v.shape[1:]
    channels = log_decay.ndim == 4
    narrow = (q, k) if rule.delta else (q, k, v)
    assert o.is_contiguous()
    pieces, long = _pieces(first, cuts, first + tokens, v.device)
    return GroupScan(
        shape=Shape(tokens, heads, k.shape[2], d_v, k.shape[3]),
        q=q, k=k, v=v, beta=beta, o=o,
        decay=log_decay.exp() if channels else log_decay,  # once, not in every program that reads it
        fold=torch.empty_like(group.recurrence),
        group=group, rows=rows, index=index, pieces=pieces, long=long,
        single=len(cuts) == tokens and all(rounded for _, rounded in cuts),
        layer=layer, delta=rule.delta, channels=channels,
        exact=all(x.dtype in (torch.bfloat16, torch.float16) for x in narrow),
    )  # fmt: skip


def _launches(scan: GroupScan) -> list[tuple[bool, Callable[[], None]]]:
    """The launches of a group, one for rows that are compiled alike. True marks the slow ones, of single tokens.

    A launch writes its rows of o, replaces their copies and, if there are cuts, writes the newest fold.
    Every scheme must have a `specialisation`.
    """
    alike: dict[tuple[Specialisation, bool], list[int]] = {}
    for place, row in enumerate(scan.rows):
        wanted = specialisation(row.scheme, scan.shape.d_v, scan.shape.d_k)
        assert wanted is not None, row.scheme
        stored = scan.delta and row.scheme.read is not None and row.scheme.fold == "stored"
        alike.setdefault((wanted, stored), []).append(place)
    # Single tokens read q and k for every part of d_v: converting them here spares that kernel a sixteenth of its work.
    full = (scan.q.float(), scan.k.float()) if scan.single else (scan.q, scan.k)
    launches: list[tuple[bool, Callable[[], None]]] = []
    for (wanted, stored), members in alike.items():
        rows = Alike(wanted, stored, tuple(members))
        if scan.single and wanted.reads_fold:
            launches.append((True, partial(_launch_tokens, scan, rows, *full)))
        else:
            windows = _launch_delta_windows if scan.delta else _launch_plain_windows
            launches.append((False, partial(windows, scan, rows)))
    return launches


def _strides(q: Tensor, k: Tensor) -> dict[str, int]:
    return {"q_row": q.stride(0), "q_token": q.stride(1), "k_row": k.stride(0), "k_token": k.stride(1)}


def _at(scan: GroupScan, members: tuple[int, ...]) -> Tensor:
    """The batch row of every member."""
    return _on_device(tuple(scan.index[m] for m in members), torch.int32, scan.device)


def _walk(scan: GroupScan, alike: Alike, tiles: Tiles, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The arguments of every kernel that walks along the tokens with the copies in registers."""
    members, group, shape, wanted = alike.members, scan.group, scan.shape, alike.wanted
    rows = [scan.rows[m] for m in members]

    def numbers(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return _on_device(tuple(values), dtype, scan.device)

    if group.lag is None:
        padding = numbers([row.padding for row in rows], torch.int32)
    else:
        padding = _select_rows(group.lag, members)
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": scan.v, "o_ptr": scan.o,
        "recurrence_ptr": group.recurrence, "read_ptr": group.read, "fold_ptr": scan.fold,
        "row_ptr": _at(scan, members), "place_ptr": numbers(members, torch.int32),
        "seed_ptr": numbers([row.seed for row in rows], torch.int64),
        "document_ptr": numbers([row.document for row in rows], torch.int64), "padding_ptr": padding,
        "piece_ptr": scan.pieces, "pieces": len(scan.pieces),
        **_strides(q, k), "v_row": scan.v.stride(0), "v_token": scan.v.stride(1),
        "tokens": shape.tokens, "layer": scan.layer, "heads": shape.heads, "groups": shape.groups,
        "d_v": shape.d_v, "d_k": shape.d_k, "D_V": tiles.height, "N": tiles.width, "SLICES": tiles.slices,
        "RECURRENCE_CAST": wanted.recurrence, "READ_CAST": wanted.read,
        "SHARED": wanted.shared, "CHAINED": wanted.chained,
        "num_warps": tiles.warps, "maxnreg": tiles.registers, "num_stages": 1 if scan.long else tiles.stages,
        "enable_fp_fusion": False,
    }  # fmt: skip


def _grid(scan: GroupScan, alike: Alike, tiles: Tiles) -> tuple[int, int, int]:
    return scan.shape.heads, len(alike.members), tiles.parts


def _launch_tokens(scan: GroupScan, alike: Alike, q: Tensor, k: Tensor) -> None:
    shape = scan.shape
    tiles = token_tiles(alike.wanted, shape.d_v, shape.d_k)
    VARIANTS.add(("token", alike.wanted, shape.d_v, shape.d_k, scan.v.dtype, scan.delta, scan.channels))
    _start(
        token_kernel, _grid(scan, alike, tiles), **_walk(scan, alike, tiles, q, k), beta_ptr=scan.beta,
        decay_ptr=scan.decay, BY_COLUMN=tiles.by_column, DELTA=scan.delta, CHANNELS=scan.channels,
    )  # fmt: skip


def _prepare(scan: GroupScan, members: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of both kernels that prepare the pieces."""
    shape = scan.shape
    return {
        "q_ptr": scan.q, "k_ptr": scan.k, "beta_ptr": scan.beta, "decay_ptr": scan.decay,
        "row_ptr": _at(scan, members), "piece_ptr": scan.pieces, **_strides(scan.q, scan.k),
        "tokens": shape.tokens, "heads": shape.heads, "groups": shape.groups, "d_k": shape.d_k, "D_K": shape.padded_d_k,
        "L": PIECE, "EXACT": scan.exact, "PRECISION": _precision(), "enable_fp_fusion": False,
    }  # fmt: skip


def _launch_plain_windows(scan: GroupScan, alike: Alike) -> None:
    shape, members = scan.shape, alike.members
    dtype = scan.v.dtype
    VARIANTS.update(
        {("prepare", shape.d_k, scan.q.dtype), ("window", alike.wanted, shape.d_v, shape.d_k, dtype, scan.long)}
    )
    made = _launch_prepare(scan, members)
    tiles = window_tiles(alike.wanted, shape.d_v, shape.d_k)
    _start(
        window_kernel, _grid(scan, alike, tiles), **_walk(scan, alike, tiles, scan.q, scan.k), **made, L=PIECE,
        READS_FOLD=alike.wanted.reads_fold, LONG=scan.long, EXACT=scan.exact, PRECISION=_precision(),
    )  # fmt: skip


def _launch_prepare(scan: GroupScan, members: tuple[int, ...]) -> dict[str, Tensor]:
    """What `prepare_kernel` makes for `window_kernel`, by the names of their arguments."""
    pieces, heads = len(scan.pieces), scan.shape.heads
    made = {
        "mix_ptr": scan.empty(len(members), pieces, heads, PIECE, PIECE),
        "from_start_ptr": scan.empty(len(members), pieces, heads, PIECE),
        "to_end_ptr": scan.empty(len(members), pieces, heads, PIECE),
    }
    _start(prepare_kernel, (pieces, len(members), scan.shape.groups), **_prepare(scan, members), **made)
    return made


def _launch_delta_windows(scan: GroupScan, alike: Alike) -> None:
    shape, members, channels = scan.shape, alike.members, scan.channels
    window = (alike.wanted, alike.stored, channels, shape.d_v, shape.d_k, scan.q.dtype, scan.v.dtype, scan.long)
    VARIANTS.update({("delta prepare", channels, shape.d_k, scan.q.dtype), ("delta window", *window)})
    made = _launch_delta_prepare(scan, members)
    tiles = delta_tiles(alike.wanted, shape.d_v, shape.d_k)
    _start(
        delta_window_kernel, _grid(scan, alike, tiles), **_walk(scan, alike, tiles, scan.q, scan.k), **made, L=PIECE,
        READS_FOLD=alike.wanted.reads_fold, STORED=alike.stored, CHANNELS=channels, LONG=scan.long,
        EXACT=scan.exact and not channels, PRECISION=_precision(),
    )  # fmt: skip


def _launch_delta_prepare(scan: GroupScan, members: tuple[int, ...]) -> dict[str, Tensor | None]:
    """What `delta_prepare_kernel` makes for `delta_window_kernel`, by the names of their arguments."""
    count, pieces, heads, d_k = len(members), len(scan.pieces), scan.shape.heads, scan.shape.d_k
    made: dict[str, Tensor | None] = {
        name: scan.empty(count, pieces, heads, PIECE, PIECE) for name in ("solve_ptr", "mix_ptr")
    }
    for name in ("from_start_ptr", "to_end_ptr"):
        made[name] = None if scan.channels else scan.empty(count, pieces, heads, PIECE)
    for name in ("start_q_ptr", "start_k_ptr", "end_k_ptr"):
        made[name] = scan.empty(count, heads, pieces, PIECE, d_k) if scan.channels else None
    made["gate_ptr"] = scan.empty(count, heads, pieces, 2, d_k) if scan.channels else None
    _start(
        delta_prepare_kernel, (pieces, count, scan.shape.groups), **_prepare(scan, members), **made,
        N=min(scan.shape.padded_d_k, 32), CHANNELS=scan.channels, num_warps=1, num_stages=1, maxnreg=168,
    )  # fmt: skip
    return made


_compile_only = False


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    if _compile_only:
        kernel.warmup(*args, grid=grid, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside the block launches compute nothing: they compile what they would run, side by side on all processors."""
    global _compile_only
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        _compile_only = True
        try:
            yield
        finally:
            _compile_only = False


_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


def _run_side_by_side(launches: list[tuple[bool, Callable[[], None]]], device: torch.device) -> None:
    """Each launch on a stream of its own: one alone rarely fills the GPU. Slow ones start first."""
    ordered = [work for _, work in sorted(launches, key=lambda launch: not launch[0])]
    if device.type != "cuda":
        for work in ordered:
            work()
        return
    with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
        streams = _STREAMS.setdefault(device, [])
        streams += [torch.cuda.Stream(device) for _ in range(len(ordered) - len(streams))]
        here = torch.cuda.current_stream(device)
        try:
            for work, stream in zip(ordered, streams, strict=False):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    work()
        finally:
            for stream in streams[: len(ordered)]:
                here.wait_stream(stream)


def scan_groups(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, o: Tensor, groups: Sequence[Group],
    rows: Sequence[BatchRow], start: int, layer: int, rule: Rule,
) -> None:  # fmt: skip
    """The next T tokens of every group, from position `start`: the device's form of `torch_backend.groups.scan_group`.

    Shapes as in `replay_scan`. Writes o; updates copies, records and counts of the groups.
    """
    stop = start + v.shape[1]
    launches: list[tuple[bool, Callable[[], None]]] = []
    finish = []
    for group in groups:
        members = [rows[r] for r in group.rows]
        pending = group.records[0].shape[1]
        cuts = members[0].folds(start, stop)
        first, index, target = start - pending, group.rows, o
        inputs: tuple[Tensor, ...] = (q, k, v, beta, log_decay)
        if pending:
            records = (q.new_zeros(len(index), pending, *q.shape[2:]), *group.records)
            inputs = tuple(
                torch.cat([old, _select_rows(x, index).to(old.dtype)], dim=1)
                for old, x in zip(records, inputs, strict=True)
            )
            index, target = list(range(len(index))), torch.full(inputs[2].shape, torch.nan, device=o.device)
        scan = _scan_group(inputs, target, group, members, index, first, cuts, layer, rule)
        launches += _launches(scan)
        tail = stop - (cuts[-1][0] + 1 if cuts else first)
        finish.append((scan, inputs, cuts, pending, tail))
    _run_side_by_side(launches, v.device)
    for scan, inputs, cuts, pending, tail in finish:
        group = scan.group
        if pending:
            o[_on_device(tuple(group.rows), torch.int64, o.device)] = scan.o[:, pending:]
        group.records = tuple(_select_rows(x, scan.index)[:, x.shape[1] - tail :].clone() for x in inputs[1:])
        if any(rounded for _, rounded in cuts):
            _count(scan, cuts)


def _count(scan: GroupScan, cuts: tuple[tuple[int, bool], ...]) -> None:
    """Adds the rounded folds to the group's counts; looks at the newest one, whose copies are there."""
    assert cuts[-1][1], "a fold is not rounded only in a prompt, and that comes first"
    group, fold = scan.group, scan.fold
    group.flushes += sum(rounded for _, rounded in cuts)
    chained = _on_device(tuple(row.scheme.cast == "chained" for row in scan.rows), torch.bool, scan.device)
    shared = _on_device(tuple(row.scheme.read is None for row in scan.rows), torch.bool, scan.device)
    source = torch.where(chained.view(-1, 1, 1, 1), group.recurrence, fold)
    group.changed[:, 0] += (group.recurrence != fold).flatten(1).any(1)
    group.changed[:, 1] += (group.read != source).flatten(1).any(1) & ~shared
    held = fold != 0
    group.zeroed = (held & (group.read == 0)).flatten(1).sum(1) / held.flatten(1).sum(1).clamp(min=1)
