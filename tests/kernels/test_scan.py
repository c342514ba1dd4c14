"""The many-row scan against the reference recurrence, and its independence of chunks and rows."""

from dataclasses import replace

import pytest
import torch
from replayssm_emulation import NoiseKey, UsageError, fixed_window, parse_scheme, recurrence_windows
from replayssm_kernels import BatchRow, replay_scan
from replayssm_kernels.torch_backend import casts, groups

from tests.helpers.tensors import copies

SCHEMES = [
    "fp32", "fp32", "nvfp4@16", "nvfp4/fp16@16", "fp8@1", "nvfp4-rn@16", "nvfp4/fp32@7+flush-reads=read",
    "fp8@16+records=bf16+handover=off", "nvfp4/int8@16+cast=chained", "fp32/mxfp4-rn@4+cast=chained",
    "mxfp4-sr/fp16@5", "int4-rn@16",
]  # fmt: skip
TOKENS, GROUPS, HEADS, D_K, D_V = 83, 2, 6, 20, 10


def inputs(rows: int, seed: int = 0):
    """The same tokens in every row."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, GROUPS, D_K), (TOKENS, GROUPS, D_K), (TOKENS, HEADS, D_V))
    q, k, v = (torch.randn(1, *s, generator=g).expand(rows, *s) for s in shapes)
    beta, decay = (torch.rand(1, TOKENS, HEADS, generator=g).expand(rows, -1, -1) for _ in range(2))
    return q, k, v, beta, -0.1 * decay


def rows_of(names, **common) -> list[BatchRow]:
    return [BatchRow(parse_scheme(name), **common) for name in names]


def run(x, rows, pieces=(TOKENS,), layer=3):
    carry, outputs, position = None, [], 0
    for length in pieces:
        o, carry = replay_scan(*(a[:, position : position + length] for a in x), rows, carry, layer=layer)
        outputs.append(o)
        position += length
    return torch.cat(outputs, dim=1), carry


@pytest.mark.parametrize("prompt", [0, 5, 37])
def test_rows_equal_the_float64_reference(prompt) -> None:
    """Copies agree up to the fp32 error of the fold, plus one step of the coarsest grid where that error tips a tie."""
    x = inputs(len(SCHEMES))
    rows = rows_of(SCHEMES, seed=4, document=2, prompt=prompt)
    o, carry = run(x, rows)
    for i, row in enumerate(rows):
        q, k = (a[i].double().repeat_interleave(HEADS // GROUPS, dim=1) for a in x[:2])
        v, beta, decay = (a[i].double() for a in x[2:])
        flushes = fixed_window(row.scheme.window, prompt, TOKENS)
        trace = recurrence_windows(q, k, v, beta, decay, row.scheme, flushes, prompt=prompt, key=NoiseKey(4, 2, 3))
        difference = (o[i] - trace.o).abs()
        # 16 records and a state of magnitude ~10: error of a sum of n terms is at most n·2⁻²⁴·Σ|terms|.
        bound = 64 * 2**-24 * trace.o.abs().max()
        assert (difference > bound).float().mean() <= 0.02, SCHEMES[i]
        for got, expected in zip(copies(carry)[i], trace.copies[-1][1:], strict=True):
            assert ((got - expected).abs() > bound).float().mean() <= 0.02, SCHEMES[i]


@pytest.mark.parametrize("prompt", [0, 5, 37])
@pytest.mark.parametrize(
    "pieces", [(40, 43), (13, 1, 20, 49), (1,) * TOKENS, (82, 1)], ids=lambda p: f"{len(p)}-pieces"
)
def test_states_are_bit_identical_however_the_tokens_are_cut(pieces, prompt) -> None:
    x, rows = inputs(len(SCHEMES)), rows_of(SCHEMES, prompt=prompt)
    o, carry = run(x, rows)
    cut_o, cut_carry = run(x, rows, pieces)
    assert carry.by_row("flushes") == cut_carry.by_row("flushes")
    assert carry.by_row("changed") == cut_carry.by_row("changed")
    for row, whole in copies(carry).items():
        for a, b in zip(whole, copies(cut_carry)[row], strict=True):
            assert torch.equal(a, b), SCHEMES[row]
    assert (o - cut_o).abs().max() <= 64 * 2**-24 * o.abs().max()


def test_states_are_bit_identical_in_any_row_order_and_company() -> None:
    x, rows = inputs(len(SCHEMES)), rows_of(SCHEMES)
    o, carry = run(x, rows)
    order = list(reversed(range(len(rows))))
    reordered_o, reordered = run(x, [rows[i] for i in order])
    roundoff = 64 * 2**-24 * o.abs().max()
    assert (reordered_o - o[order]).abs().max() <= roundoff
    for new, old in enumerate(order):
        assert all(map(torch.equal, copies(reordered)[new], copies(carry)[old]))
    for i in (2, 3, 4):
        alone_o, alone = run(inputs(1), [rows[i]])
        assert (alone_o[0] - o[i]).abs().max() <= roundoff
        assert all(map(torch.equal, copies(alone)[0], copies(carry)[i]))


def test_memory_blocks_do_not_show(monkeypatch) -> None:
    x, rows = inputs(len(SCHEMES)), rows_of(SCHEMES)
    o, carry = run(x, rows)
    monkeypatch.setattr(groups, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(casts, "_NOISE_ELEMENTS", 1)
    small_o, small = run(x, rows)
    assert (small_o - o).abs().max() <= 64 * 2**-24 * o.abs().max()
    for row, whole in copies(carry).items():
        assert all(map(torch.equal, whole, copies(small)[row]))


def test_seed_document_and_layer_change_the_noise_and_only_of_stochastic_rows() -> None:
    x = inputs(3)
    base = BatchRow(parse_scheme("fp8@16"))
    _, carry = run(x, [base, replace(base, seed=1), replace(base, document=1)])
    found = copies(carry)
    assert not torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    _, other_layer = run(x, [base, base, base], layer=4)
    assert not torch.equal(found[0][0], copies(other_layer)[0][0])
    nearest = BatchRow(parse_scheme("fp8-rn@16"))
    _, carry = run(x, [nearest, replace(nearest, seed=1), replace(nearest, document=1)])
    assert torch.equal(copies(carry)[0][0], copies(carry)[1][0])
    assert torch.equal(copies(carry)[0][0], copies(carry)[2][0])


def test_fp32_rows_are_identical_and_unrounded() -> None:
    x, rows = inputs(len(SCHEMES)), rows_of(SCHEMES)
    o, _ = run(x, rows)
    assert torch.equal(o[0], o[1])
    assert all(not torch.equal(o[0], o[i]) for i in range(2, len(rows)))


def test_a_schedule_is_a_list_of_positions() -> None:
    """Any flush positions work; those of a fixed window give that window's result."""
    x = inputs(2)
    scheme = parse_scheme("nvfp4@16")
    _, carry = run(x, [BatchRow(scheme), BatchRow(scheme, flushes=tuple(fixed_window(16, 0, TOKENS)))], (40, 43))
    assert all(map(torch.equal, *copies(carry).values()))
    positions = (0, 1, 9, 40, 82)
    o, carry = run(x, [BatchRow(scheme, flushes=positions)] * 2, (13, 70))
    q, k = (a[0].repeat_interleave(HEADS // GROUPS, dim=1) for a in x[:2])
    trace = recurrence_windows(q, k, *(a[0] for a in x[2:]), scheme, list(positions), key=NoiseKey(layer=3))
    assert carry.by_row("flushes") == [5, 5]
    assert ((o[0] - trace.o).abs() > 64 * 2**-24 * trace.o.abs().max()).float().mean() <= 0.02


def test_a_row_is_checked_against_the_batch() -> None:
    with pytest.raises(UsageError, match="2 batch rows for 1 schemes"):
        replay_scan(*inputs(2), rows_of(["fp32"]), None, layer=0)


def test_a_schedule_without_flushes_is_not_the_window() -> None:
    scheme = parse_scheme("nvfp4@16")
    for rows in ([BatchRow(scheme), BatchRow(scheme, flushes=())], [BatchRow(scheme, flushes=()), BatchRow(scheme)]):
        _, carry = run(inputs(2), rows)
        assert carry.by_row("flushes") == [0 if row.flushes == () else TOKENS // 16 for row in rows]


@pytest.mark.parametrize("flushes", [(15, 15), (31, 15), (-3,), (3, 20)], ids=str)
def test_impossible_schedules_are_refused(flushes) -> None:
    with pytest.raises(UsageError, match="flush position"):
        BatchRow(parse_scheme("nvfp4@16"), prompt=5, flushes=flushes)


def test_what_the_casts_did_is_counted() -> None:
    _, carry = run(inputs(4), rows_of(["fp32", "nvfp4@16", "nvfp4/fp32@16", "fp8-unscaled@16"]))
    assert carry.by_row("flushes") == [5] * 4
    assert carry.by_row("changed") == [[0, 0], [5, 0], [0, 5], [5, 0]]
    zeroed = carry.by_row("zeroed")
    assert zeroed[0] == 0
    recurrence, read = copies(carry)[2]
    assert zeroed[2] == pytest.approx(((read == 0) & (recurrence != 0)).float().mean().item())
