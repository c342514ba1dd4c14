"""The replay scan on a GPU: which rows run as one launch of the kernels of `scan_kernels` or `delta_kernels`, and on what tables.

Arithmetic and rounding are those of `scan` and `delta`; only the order of fp32 sums inside a product may differ.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import triton
from replayssm_emulation import Rule, Scheme
from replayssm_emulation.scheme import Copy
from torch import Tensor

from ..state import BatchRow, Group
from .cast import Cast, plan_cast, spans_head
from .delta_kernels import delta_prepare_kernel, delta_window_kernel
from .plain_kernels import prepare_kernel, window_kernel
from .token_kernels import token_kernel

PIECE = 16  # tokens per piece: the smallest operand of a tensor-core product
_WIDEST = 256
VARIANTS: set[tuple] = set()  # what was asked of the compiler


def specialisation(scheme: Scheme, d_v: int, d_k: int) -> tuple | None:
    """What a kernel is compiled for, or None when it cannot run this scheme or head size."""

    def constants(copy: Copy) -> tuple | None:
        return plan_cast(copy.format, d_k, copy.rounding == "stochastic", scheme.noise_bits)

    recurrence = constants(scheme.recurrence)
    read = constants(scheme.read) if scheme.read is not None else Cast()
    if recurrence is None or read is None or max(d_v, d_k) > _WIDEST:
        return None
    return recurrence, read, scheme.read is None, scheme.cast == "chained", scheme.flush_reads == "fold"


@lru_cache(maxsize=1024)
def _pieces(first: int, cuts: tuple[tuple[int, bool], ...], stop: int, device: torch.device) -> tuple[Tensor, bool]:
    """(piece, LONG) of `window_kernel` for folds `cuts` in tokens [first, stop), counted from `first`.

    What the last fold leaves is kept.
    """
    table: list[tuple[int, int, int, int, int, int]] = []
    start, long = first, False
    for position, rounded in cuts:
        edges = [*range(start, position + 1, PIECE), position + 1]
        long |= len(edges) > 2
        table += [(a - first, b - first, 0, 0, -1, 0) for a, b in pairwise(edges)]
        table[-1] = (*table[-1][:2], 2 if rounded else 1, position, 0 if position == cuts[-1][0] else -1, 0)
        start = position + 1
    edges = [*range(start, stop, PIECE), stop]
    table += [(a - first, b - first, 0, 0, -1, 0) for a, b in pairwise(edges)]
    return torch.tensor(table, dtype=torch.int32, device=device), long or len(edges) > 2


@lru_cache(maxsize=4096)
def _numbers(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # A 64-bit seed fits int64 by its bit pattern.
    return torch.tensor([v - (1 << 64) if v >= 1 << 63 else v for v in values], dtype=dtype, device=device)


def _of(x: Tensor, index: Sequence[int]) -> Tensor:
    """Rows of x: no copy if they are all, and no copy from the host, which a CUDA graph could not hold."""
    return x if list(index) == list(range(len(x))) else x[_numbers(tuple(index), torch.int64, x.device)]


def _inner(x: Tensor) -> Tensor:
    """x `[R, T, a, b]` with its last two axes contiguous; kernels take any stride of the others."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


@dataclass(frozen=True)
class Tiles:
    """How a head of `[d_v, d_k]` is cut: `parts` programs of `height` rows, each of `slices` tiles `width` wide."""

    height: int
    width: int
    slices: int
    parts: int
    warps: int
    by_column: bool = False
    registers: int | None = None  # a lower limit per thread lets more programs run at once
    stages: int = 1  # 2 reads a piece ahead; Triton 3.6 cannot compile that for windows of several pieces


def tiles_of(rounded: tuple, single: bool, d_v: int, d_k: int) -> Tiles:
    """One program per head only where a scale spans it; a warp for every band of 16 rows. Measured: reports/performance/notes.md."""
    per_head = any(spans_head(cast) for cast in rounded[:2])
    block = max(16, *(cast.block if cast.lossy else 0 for cast in rounded[:2]))
    whole = max(block, triton.next_power_of_2(d_k))
    rows = max(16, triton.next_power_of_2(d_v))
    if single and not per_head:  # bound by noise: small programs, of which the first rounds of Philox stay in registers
        width = max(block, min(whole, 32))
        height = max(4, 128 // width)  # four elements a thread at least: none is held twice
        return Tiles(height, width, -(-d_k // width), -(-d_v // height), 1, True)
    noisy = any(cast.lossy and cast.noise_bits for cast in rounded[:2])
    height = rows if per_head else 16 if noisy else min(rows, 32)
    width = max(block, min(whole, 32 if single else 128 if noisy and not per_head else 64))
    # What draws no noise waits for memory: read a piece ahead, more programs at once.
    registers, stages = (None, 1) if noisy or per_head else (168, 2)
    return Tiles(height, width, -(-d_k // width), -(-d_v // height), height // 16, False, registers, stages)


def delta_tiles_of(rounded: tuple, d_v: int, d_k: int) -> Tiles:
    """Taller than those of the plain scan: every program of a head reads its keys and queries, wide ones in fp32."""
    per_head = any(spans_head(cast) for cast in rounded[:2])
    block = max(16, *(cast.block if cast.lossy else 0 for cast in rounded[:2]))
    rows = max(16, triton.next_power_of_2(d_v))
    height = rows if per_head else min(max(16, rows // 2), 64)
    width = max(block, min(triton.next_power_of_2(d_k), 64 if per_head else 32))
    return Tiles(height, width, -(-d_k // width), -(-d_v // height), height // 16)


def _launches(
    inputs: tuple[Tensor, ...], o: Tensor, group: Group, rows: Sequence[BatchRow],
    index: list[int], first: int, cuts: tuple[tuple[int, bool], ...], layer: int, delta: bool,
) -> tuple[Tensor, list[tuple[bool, Callable[[], None]]]]:  # fmt: skip
    """(fold, launches) that scan rows which share a schedule; one launch for rows that are compiled alike.

    inputs: q, k `[R, T, G, d_k]`, v `[R, T, H, d_v]` of any float dtype, beta and log_decay fp32 `[R, T, H]`, with delta
    log_decay also `[R, T, H, d_k]`; with o fp32 `[R, T, H, d_v]` tensors of the whole batch, of which row index[n] belongs to rows[n] and to the n-th copies of the group. first:
    position of token 0. cuts: (position, rounded) of the folds. Every scheme must have a `specialisation`.
    A launch writes its rows of o, replaces their copies and, if there are cuts, writes the newest fold `[rows, H, d_v, d_k]`;
    True marks the slow ones, of single tokens.
    """
    q, k, v = (_inner(x) for x in inputs[:3])
    beta, log_decay = (x.contiguous() for x in inputs[3:])
    tokens, heads, d_v = v.shape[1:]
    groups, d_k = k.shape[2:]
    device = v.device
    exact = all(x.dtype in (torch.bfloat16, torch.float16) for x in ((q, k) if delta else (q, k, v)))
    channels = log_decay.ndim == 4
    decay = log_decay.exp() if channels else log_decay  # once, not in every program that reads it
    assert o.is_contiguous()
    piece, long = _pieces(first, cuts, first + tokens, device)
    single = len(cuts) == tokens and all(rounded for _, rounded in cuts)
    # Single tokens read q and k for every part of d_v: converting them here spares that kernel a sixteenth of its work.
    full = (q.float(), k.float()) if single else (q, k)
    alike: dict[tuple[tuple, bool], list[int]] = {}
    for place, row in enumerate(rows):
        found = specialisation(row.scheme, d_v, d_k)
        assert found is not None, row.scheme
        alike.setdefault((found, delta and row.scheme.read is not None and row.scheme.fold == "stored"), []).append(
            place
        )
    precision = "ieee" if triton.knobs.runtime.interpret else "tf32x2"
    fold = torch.empty_like(group.recurrence)

    def launch(found: tuple, stored: bool, members: list[int], by_token: bool) -> None:
        recurrence_cast, read_cast, shared, chained, reads_fold = found
        at = _numbers(tuple(index[m] for m in members), torch.int32, device)
        place = _numbers(tuple(members), torch.int32, device)
        seed = _numbers(tuple(rows[m].seed for m in members), torch.int64, device)
        document = _numbers(tuple(rows[m].document for m in members), torch.int64, device)
        padding = (
            _numbers(tuple(rows[m].padding for m in members), torch.int32, device)
            if group.lag is None
            else _of(group.lag, members)
        )
        tiles = delta_tiles_of(found, d_v, d_k) if delta and not by_token else tiles_of(found, by_token, d_v, d_k)
        grid = (heads, len(members), tiles.parts)
        queries, keys = full if by_token else (q, k)
        strides = (queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1))
        common = (group.recurrence, group.read, fold, at, place, seed, document, padding, piece, len(piece))
        shape = (
            *strides,
            v.stride(0),
            v.stride(1),
            tokens,
            layer,
            heads,
            groups,
            d_v,
            d_k,
            tiles.height,
            tiles.width,
            tiles.slices,
        )
        casts = {"RECURRENCE_CAST": recurrence_cast, "READ_CAST": read_cast, "SHARED": shared, "CHAINED": chained}
        options = {
            "num_warps": tiles.warps,
            "maxnreg": tiles.registers,
            "num_stages": 1 if long else tiles.stages,
            "enable_fp_fusion": False,
        }
        if by_token:
            VARIANTS.add(("token", found, d_v, d_k, v.dtype, delta, channels))
            _start(
                token_kernel, grid, queries, keys, v, beta, decay, o, *common, *shape, **casts, BY_COLUMN=tiles.by_column, DELTA=delta,
                CHANNELS=channels, **options,
            )  # fmt: skip
            return
        if delta:
            what = (channels, d_v, d_k, q.dtype, v.dtype)
            VARIANTS.update({("delta prepare", channels, d_k, q.dtype), ("delta window", found, stored, *what, long)})
            solve, mix = (torch.empty(len(members), len(piece), heads, PIECE, PIECE, device=device) for _ in range(2))
            made: list[Tensor | None] = [None] * 6
            if channels:
                made[2:5] = (torch.empty(len(members), heads, len(piece), PIECE, d_k, device=device) for _ in range(3))
                made[5] = torch.empty(len(members), heads, len(piece), 2, d_k, device=device)
            else:
                made[:2] = (torch.empty(len(members), len(piece), heads, PIECE, device=device) for _ in range(2))
            whole = max(16, triton.next_power_of_2(d_k))
            _start(
                delta_prepare_kernel, (len(piece), len(members), groups), q, k, beta, decay, solve, mix, *made, at, piece, *strides,
                tokens, heads, groups, d_k, whole, min(whole, 32), PIECE, channels, exact, precision,
                num_warps=1, num_stages=1, maxnreg=168, enable_fp_fusion=False,
            )  # fmt: skip
            _start(
                delta_window_kernel, grid, q, k, v, o, solve, mix, *made, *common, *shape, PIECE, **casts, READS_FOLD=reads_fold,
                STORED=stored, CHANNELS=channels, LONG=long, EXACT=exact and not channels, PRECISION=precision, **options,
            )  # fmt: skip
            return
        VARIANTS.update({("prepare", d_k, q.dtype), ("window", found, d_v, d_k, v.dtype, long)})
        mix = torch.empty(len(members), len(piece), heads, PIECE, PIECE, device=device)
        from_start, to_end = (torch.empty(len(members), len(piece), heads, PIECE, device=device) for _ in range(2))
        _start(
            prepare_kernel, (len(piece), len(members), groups), q, k, beta, log_decay, mix, from_start, to_end, at, piece, *strides, tokens, heads, groups,
            d_k, max(16, triton.next_power_of_2(d_k)), PIECE, exact, precision, enable_fp_fusion=False,
        )  # fmt: skip
        _start(
            window_kernel, grid, q, k, v, o, mix, from_start, to_end, *common, *shape, PIECE,
            **casts, READS_FOLD=reads_fold, LONG=long, EXACT=exact, PRECISION=precision, **options,
        )  # fmt: skip

    return fold, [
        (b, partial(launch, *how, members, b)) for how, members in alike.items() for b in [single and how[0][-1]]
    ]


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
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, o: Tensor, groups: Sequence[Group], rows: Sequence[BatchRow],
    start: int, layer: int, rule: Rule,
) -> None:  # fmt: skip
    """The next T tokens of every group, from position `start`: `scan._scan_group` on the device.

    Shapes as in `replay_scan`. Writes o; updates copies, records and counts of the groups.
    """
    stop = start + v.shape[1]
    finish, launches = [], []
    for group in groups:
        members = [rows[r] for r in group.rows]
        pending = group.records[0].shape[1]
        cuts = members[0].folds(start, stop)
        first, index, target = start - pending, group.rows, o
        inputs: tuple[Tensor, ...] = (q, k, v, beta, log_decay)
        if pending:
            records = (q.new_zeros(len(index), pending, *q.shape[2:]), *group.records)
            inputs = tuple(
                torch.cat([old, _of(x, index).to(old.dtype)], dim=1) for old, x in zip(records, inputs, strict=True)
            )
            index, target = list(range(len(index))), torch.full(inputs[2].shape, torch.nan, device=o.device)
        fold, work = _launches(inputs, target, group, members, index, first, cuts, layer, rule.delta)
        launches += work
        finish.append(
            (group, members, inputs, index, target, fold, cuts, pending, stop - (cuts[-1][0] + 1 if cuts else first))
        )
    _run_side_by_side(launches, v.device)
    for group, members, inputs, index, target, fold, cuts, pending, tail in finish:
        if pending:
            o[_numbers(tuple(group.rows), torch.int64, o.device)] = target[:, pending:]
        group.records = tuple(_of(x, index)[:, x.shape[1] - tail :].clone() for x in inputs[1:])
        if rounded := sum(r for _, r in cuts):
            assert cuts[-1][1], "a fold is not rounded only in a prompt, and that comes first"
            group.flushes += rounded
            chained, shared = (
                _numbers(tuple(flags), torch.bool, v.device)
                for flags in (
                    [row.scheme.cast == "chained" for row in members],
                    [row.scheme.read is None for row in members],
                )
            )
            source = torch.where(chained.view(-1, 1, 1, 1), group.recurrence, fold)
            group.changed[:, 0] += (group.recurrence != fold).flatten(1).any(1)
            group.changed[:, 1] += (group.read != source).flatten(1).any(1) & ~shared
            held = fold != 0
            group.zeroed = (held & (group.read == 0)).flatten(1).sum(1) / held.flatten(1).sum(1).clamp(min=1)
