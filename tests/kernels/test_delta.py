"""The delta rule of many rows against the float64 recurrence: GDN and KDA decays, any schedule, prompts, decoding."""

import pytest
import torch
from replayssm_emulation import NoiseKey, Rule, fixed_window, parse_scheme, recurrence_steps
from replayssm_kernels import BatchRow, replay_scan

from tests.helpers.models import delta_inputs

TOKENS, HEADS, GROUPS, D_V, D_K = 53, 4, 2, 10, 12
SCHEMES = [
    "fp32",
    "nvfp4@8",
    "fp8/fp16@8",
    "nvfp4/fp16@8+fold=stored",
    "fp8/bf16@8+flush-reads=read",
    "fp16@1",
    "mxfp4/fp16@8+cast=chained",
]


def inputs(channels: bool, strong: bool = False):
    return delta_inputs(channels, TOKENS, strong, HEADS, GROUPS, D_V, D_K, seed=0)


def scan(x, rows, pieces=(TOKENS,)):
    carry, parts, position = None, [], 0
    for n in pieces:
        part = (a[None, position : position + n].expand(len(rows), *a[position : position + n].shape) for a in x)
        o, carry = replay_scan(*part, rows, carry, layer=2, rule=Rule.DELTA)
        parts.append(o)
        position += n
    return torch.cat(parts, dim=1), carry


def reference(x, row, dtype=torch.float64):
    q, k, v, beta, log_decay = (a.to(dtype) for a in x)
    q, k = (a.repeat_interleave(HEADS // GROUPS, dim=1) for a in (q, k))
    flushes = fixed_window(row.scheme.window, row.prompt, TOKENS)
    key = NoiseKey(row.seed, row.document, 2)
    return recurrence_steps(q, k, v, beta, log_decay, row.scheme, flushes, delta=True, prompt=row.prompt, key=key).o


def off(a, b) -> float:
    """Share of the outputs that are not equal up to roundoff."""
    return ((a - b).abs() > 1e-4 * b.abs().max()).float().mean().item()


@pytest.mark.parametrize("strong", [False, True], ids=["weak", "strong"])
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_fp32_is_the_float64_recurrence(channels, strong) -> None:
    """Within some hundred roundings; strong gates neither overflow nor lose anything."""
    x = inputs(channels, strong)
    expected = reference(x, BatchRow(parse_scheme("fp32")))
    for pieces in ((TOKENS,), (7, 1, 20, 25), (1,) * TOKENS):
        o, _ = scan(x, [BatchRow(parse_scheme("fp32"))], pieces)
        assert (o[0] - expected).abs().max() <= 256 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("prompt", [0, 21])
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_rows_are_rounded_where_the_reference_rounds(channels, prompt) -> None:
    """All schemes side by side. A fold in float64 tips few elements over a rounding boundary; other noise tips most."""
    x = inputs(channels)
    rows = [BatchRow(parse_scheme(s), seed=5, document=d, prompt=prompt) for d, s in enumerate(SCHEMES)]
    o, _ = scan(x, rows)
    for row, got in zip(rows, o, strict=True):
        assert off(got, reference(x, row)) < 0.005, row.scheme
    for index in (1, 5):  # the noisy recurrence copies
        wrong = BatchRow(rows[index].scheme, seed=6, document=index, prompt=prompt)
        assert off(o[index], reference(x, wrong)) > 0.1, rows[index].scheme


def test_options_make_a_difference() -> None:
    """Control: the reference with another option is no match for the row."""
    x = inputs(False)
    for scheme, other in (("nvfp4/fp16@8+fold=stored", "nvfp4/fp16@8"), ("fp8/bf16@8+flush-reads=read", "fp8/bf16@8")):
        o, _ = scan(x, [BatchRow(parse_scheme(scheme), seed=5)])
        wrong = reference(x, BatchRow(parse_scheme(other), seed=5))
        assert off(o[0], wrong) > 0.05


def test_pieces_and_decoding() -> None:
    """Cut anywhere, also into single tokens: the same rounding, and nearly always the same bits of it."""
    x = inputs(True)
    rows = [BatchRow(parse_scheme(s), seed=5, document=d, prompt=9) for d, s in enumerate(SCHEMES)]
    whole, carry = scan(x, rows)
    for pieces in ((9, 44), (30, 1, 22), (9, *(1,) * 44)):
        o, other = scan(x, rows, pieces)
        assert carry.by_row("flushes") == other.by_row("flushes")
        assert max(off(a, b) for a, b in zip(o, whole, strict=True)) < 0.005


def test_a_long_prompt() -> None:
    """200 tokens of prompt, copies handed over at its end: the float64 recurrence still."""
    x = tuple(torch.cat([a] * 4)[:212] for a in inputs(True))
    row = BatchRow(parse_scheme("fp16/fp32@8"), prompt=200)
    o, carry = replay_scan(*(a[None] for a in x), [row], None, layer=2, rule=Rule.DELTA)
    q, k, v, beta, log_decay = (a.double() for a in x)
    q, k = (a.repeat_interleave(HEADS // GROUPS, dim=1) for a in (q, k))
    expected = recurrence_steps(
        q, k, v, beta, log_decay, row.scheme, fixed_window(8, 200, 212), delta=True, prompt=200, key=NoiseKey(0, 0, 2)
    ).o
    assert (o[0, :200] - expected[:200]).abs().max() <= 256 * 2**-24 * expected.abs().max()
    assert (o[0, 200:] - expected[200:]).abs().max() <= 2**-9 * expected.abs().max()
    assert carry.by_row("flushes") == [2]


def test_one_step_by_hand() -> None:
    """S=1, k=1, v=0, α=.5, β=1: the error is -.5, so the state becomes 0."""
    one = torch.ones(1, 1, 1, 1)
    _, carry = replay_scan(
        one,
        one,
        one,
        one[..., 0],
        torch.zeros(1, 1, 1),
        [BatchRow(parse_scheme("fp32@1"))],
        None,
        layer=0,
        rule=Rule.DELTA,
    )
    assert carry.groups[0].recurrence.item() == 1
    half = torch.full((1, 1, 1), 0.5).log()
    o, carry = replay_scan(
        one, one, 0 * one, one[..., 0], half, [BatchRow(parse_scheme("fp32@1"))], carry, layer=0, rule=Rule.DELTA
    )
    assert o.item() == carry.groups[0].recurrence.item() == 0
