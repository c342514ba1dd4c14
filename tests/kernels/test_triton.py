"""The Triton kernels on tiny shapes: bits equal to the CPU reference, the scan equal to the torch scan.

On a GPU where there is one, otherwise in the interpreter.
"""

import pytest
import torch
import triton
import triton.language as tl
from replayssm_emulation import FORMATS, UsageError, get_format, parse_scheme, quantize
from replayssm_kernels import BatchRow, choose_backend, replay_scan
from replayssm_kernels.triton_backend.cast import (
    cast_slice,
    largest_of_rows,
    ordinary,
    over_head,
    plan_cast,
    slice_noise,
)

from tests.helpers.tensors import copies, every_16_bit_value, random_32_bit_values, same_bits

VARIANTS = ["fp8-head", "fp8-unscaled", "int4-b32", "mxfp4-even", "mxfp8-rceil", "mxfp6-e3m2-rceil"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.interpreter
KEY = {"seed": 5 + (9 << 40), "document": 4, "layer": 3, "position": 9, "copy": 1}


@triton.jit
def cast_kernel(
    x_ptr, o_ptr, d_v, d_k, seed, position, key, document,
    D_V: tl.constexpr, D_K: tl.constexpr, CAST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, D_V)[:, None]
    j = tl.arange(0, D_K)[None, :]
    inside = (i < d_v) & (j < d_k)
    x = tl.load(x_ptr + i * d_k + j, mask=inside, other=0.0)
    noise = slice_noise(seed, position, key, document, (d_k + 3) // 4, 0, 0, D_V, D_K, False)
    largest = over_head(largest_of_rows(x, CAST), CAST)
    if SHORT:
        a = tl.abs(x)
        if ordinary(tl.max(a, axis=1), tl.min(a, axis=1), CAST):
            x = cast_slice(x, noise, largest, True, CAST)
            tl.store(o_ptr + i * d_k + j, x, mask=inside)
    else:
        x = cast_slice(x, noise, largest, False, CAST)
        tl.store(o_ptr + i * d_k + j, x, mask=inside)


def cast(
    x: torch.Tensor, name: str, rounding: str, noise_bits: int = 32, head: int = 0, short: bool = False
) -> torch.Tensor:
    d_v, d_k = x.shape
    constants = plan_cast(get_format(name), d_k, rounding == "stochastic", noise_bits)
    assert constants is not None
    x = x.to(DEVICE)
    o = torch.full_like(x, torch.inf)
    key = (KEY["layer"] << 17) | (head << 1) | KEY["copy"]
    tile = (max(16, triton.next_power_of_2(d_v)), max(16, triton.next_power_of_2(d_k), constants[7]))
    cast_kernel[(1,)](
        x,
        o,
        d_v,
        d_k,
        KEY["seed"],
        KEY["position"],
        key,
        KEY["document"],
        *tile,
        constants,
        short,
        enable_fp_fusion=False,
    )
    return o.cpu()


def state(d_v: int, d_k: int) -> torch.Tensor:
    """Rows of very different size, with zeros, infinities and numbers near the ends of fp32's range."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(d_v, d_k, generator=g) * torch.exp(3 * torch.randn(d_v, 1, generator=g))
    x[0] = 0
    x[1, :6] = torch.tensor([torch.inf, -1.0, -0.0, 1e-40, 3e38, -1e-45])
    return x


@pytest.mark.parametrize("shape", [(64, 64), (20, 48), (5, 6)], ids=str)
@pytest.mark.parametrize(("rounding", "noise_bits"), [("nearest", 32), ("stochastic", 32), ("stochastic", 13)])
@pytest.mark.parametrize("name", [*FORMATS, *VARIANTS])
def test_casts_are_bit_identical(name, rounding, noise_bits, shape) -> None:
    x = state(*shape)
    heads = x.expand(3, *shape)
    expected = quantize(heads, name, rounding, noise_bits=noise_bits, **KEY)[2]
    assert same_bits(cast(x, name, rounding, noise_bits, head=2), expected)
    # The torch reference gives the same bits on every device, too.
    assert same_bits(quantize(heads.to(DEVICE), name, rounding, noise_bits=noise_bits, **KEY)[2].cpu(), expected)


@pytest.mark.parametrize("noise_bits", [32, 13])
@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2"])
def test_the_short_cast_is_bit_identical(name, noise_bits) -> None:
    """Rows of any size with all elements in the format's normal range. Any other row keeps the short way shut."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=g).sign() * torch.rand(64, 128, generator=g).clamp(min=1e-4)
    x *= torch.logspace(-5, 35, 64).unsqueeze(1)
    expected = quantize(x, name, "stochastic", noise_bits=noise_bits, **KEY)
    assert same_bits(cast(x, name, "stochastic", noise_bits, short=True), expected)
    for value in (0.0, 1e-10, 1e38):
        y = x.clone()
        y[7, 9] = value
        assert torch.isinf(cast(y, name, "stochastic", noise_bits, short=True)).all()  # nothing was written


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8", "mxfp4", "nvfp4", "fp8-head"])
def test_nan_reaches_exactly_as_far_as_in_the_reference(name) -> None:
    x = state(4, 64)
    x[2, 40] = torch.nan
    assert same_bits(cast(x, name, "nearest"), quantize(x, name))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8-unscaled", "fp8-e5m2-unscaled", "mxfp4", "mxfp6", "mxfp6-e3m2"])
@pytest.mark.parametrize(
    "values", [every_16_bit_value(), random_32_bit_values(1 << 16, 1)], ids=["every-16-bit", "random-32-bit"]
)
def test_every_value_of_a_grid(name, values) -> None:
    """Exhaustive: all 16-bit floats, in tiles of 256 x 256, whose blocks mix all magnitudes."""
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    for part in values.split(1 << 16):
        x = torch.nn.functional.pad(part, (0, -len(part) % 256)).view(-1, 256)
        assert same_bits(cast(x, name, "nearest"), quantize(x, name))
        assert same_bits(cast(x, name, "stochastic"), quantize(x, name, "stochastic", **KEY))


SCHEMES = [
    "fp32",
    "fp32",
    "nvfp4@16",
    "nvfp4/fp16@16",
    "fp8-rn@5",
    "mxfp4-sr/int8@20+flush-reads=read",
    "nvfp4/fp16@16+cast=chained",
]
TOKENS = 37


def inputs(rows: int, heads: int = 2, groups: int = 1, d_k: int = 12, d_v: int = 10):
    g = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, groups, d_k), (TOKENS, groups, d_k), (TOKENS, heads, d_v))
    q, k, v = (torch.randn(1, *s, generator=g).expand(rows, *s) for s in shapes)
    beta, decay = (torch.rand(1, TOKENS, heads, generator=g).expand(rows, -1, -1) for _ in range(2))
    return q, k, v, beta, -0.1 * decay


def run(x, rows, backend, pieces=(TOKENS,)):
    carry, outputs, position = None, [], 0
    for length in pieces:
        o, carry = replay_scan(
            *(a[:, position : position + length].to(DEVICE) for a in x), rows, carry, layer=3, backend=backend
        )
        outputs.append(o)
        position += length
    return torch.cat(outputs, dim=1), carry


def assert_same_run(x, rows, pieces=(TOKENS,)) -> None:
    """Same rounding noise: outputs and copies agree up to roundoff, except where it tips an element over a boundary."""
    expected, carry = run(x, rows, "torch", pieces)
    got, triton_carry = run(x, rows, "triton", pieces)
    bound = 64 * 2**-24
    assert not got.isnan().any()
    assert ((got - expected).abs() > bound * expected.abs().max()).float().mean() <= 0.02
    assert carry.by_row("flushes") == triton_carry.by_row("flushes")
    for row, pair in copies(carry).items():
        for a, b in zip(pair, copies(triton_carry)[row], strict=True):
            assert ((a - b).abs() > bound * a.abs().max()).float().mean() <= 0.02, rows[row].scheme
    for a, b in zip(carry.by_row("zeroed"), triton_carry.by_row("zeroed"), strict=True):
        assert a == pytest.approx(b, abs=0.02)
    for a, b in zip(carry.by_row("changed"), triton_carry.by_row("changed"), strict=True):
        assert [bool(n) for n in a] == [bool(n) for n in b]


@pytest.mark.parametrize("prompt", [0, 5])
def test_the_scan_equals_the_torch_scan(prompt) -> None:
    assert_same_run(
        inputs(len(SCHEMES)), [BatchRow(parse_scheme(s), seed=4, document=2, prompt=prompt) for s in SCHEMES]
    )


def test_inputs_may_be_views_of_any_layout() -> None:
    """As a convolution leaves them: channels before tokens, all in one tensor."""
    x = inputs(2)
    together = torch.cat([a.flatten(2) for a in x[:3]], dim=2).transpose(1, 2).contiguous().transpose(1, 2)
    views = [
        a.unflatten(2, b.shape[2:])
        for a, b in zip(together.split([b[0, 0].numel() for b in x[:3]], dim=2), x[:3], strict=True)
    ]
    rows = [BatchRow(parse_scheme(s), seed=4) for s in ("fp32", "nvfp4/fp16@16")]
    o, _ = run(x, rows, "triton")
    viewed, _ = run((*views, *x[3:]), rows, "triton")
    assert torch.equal(o, viewed)


def test_single_tokens_and_groups() -> None:
    rows = [BatchRow(parse_scheme(s), seed=4) for s in ("fp32@1", "fp8@1", "nvfp4/fp16-rn@1")]
    assert_same_run(tuple(a[:, :TOKENS] for a in inputs(3, heads=4, groups=2, d_k=20, d_v=18)), rows)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_padded_row_is_the_row_alone(backend) -> None:
    """Whole windows of left padding, zeros by the attention mask: the same copies, bit for bit, beside other rows."""
    x = inputs(1)
    rows = [BatchRow(parse_scheme("nvfp4/fp16@16"), seed=4, document=7, prompt=5)]
    _, alone = run(x, rows, backend)
    batch = [torch.cat([torch.zeros_like(a[:, :16]), a], dim=1) for a in x]
    other = [a[:, : a.shape[1]] for a in inputs(1)]
    both = [torch.cat([torch.cat([b[:, :16], b], dim=1), a]) for a, b in zip(batch, other, strict=True)]
    padded = [
        BatchRow(parse_scheme("nvfp4/fp16@16"), 4, 8, prompt=21),
        BatchRow(parse_scheme("nvfp4/fp16@16"), 4, 7, prompt=21, padding=16),
    ]
    _, carry = replay_scan(*(a.to(DEVICE) for a in both), padded, None, layer=3, backend=backend)
    assert all(map(torch.equal, copies(alone)[0], copies(carry)[1]))
    wrong = [padded[0], BatchRow(parse_scheme("nvfp4/fp16@16"), 4, 7, prompt=21)]
    _, carry = replay_scan(*(a.to(DEVICE) for a in both), wrong, None, layer=3, backend=backend)
    assert not torch.equal(copies(alone)[0][0], copies(carry)[1][0])


def exact_inputs(rows: int):
    """Small multiples of 1/8 and no decay: every sum is exact, whatever its order."""
    x = inputs(rows)
    q, k, v = ((a * 2).round() / 8 for a in x[:3])
    return q, k, v, torch.ones_like(x[3]), torch.zeros_like(x[4])


@pytest.mark.parametrize("pieces", [(TOKENS,), (9, 1, 20, 7)], ids=str)
def test_exact_arithmetic_gives_equal_bits(pieces) -> None:
    """Where no sum is rounded, outputs and copies agree bit for bit, and with them every rounding."""
    names = [
        "fp32/mxfp4-rn@4+cast=chained",
        "fp16@16",
        "mxfp4/fp16@5",
        "mxfp8/fp16@3+flush-reads=read",
        "fp8-unscaled/bf16@16",
        "fp16-rn@20",
    ]
    rows = [BatchRow(parse_scheme(s), seed=4, document=n) for n, s in enumerate(names)]
    x = exact_inputs(len(rows))
    expected, carry = run(x, rows, "torch", pieces)
    got, triton_carry = run(x, rows, "triton", pieces)
    for row, scheme in enumerate(names):
        assert torch.equal(got[row], expected[row]), scheme
        assert all(map(torch.equal, copies(carry)[row], copies(triton_carry)[row])), scheme


@pytest.mark.parametrize("name", ["fp16@1", "mxfp4@1", "bf16/fp16-rn@1"])
def test_exact_single_tokens_give_equal_bits(name) -> None:
    rows = [BatchRow(parse_scheme(name), seed=4, document=n) for n in range(2)]
    x = exact_inputs(2)
    expected, carry = run(x, rows, "torch")
    got, triton_carry = run(x, rows, "triton")
    assert torch.equal(got, expected)
    for row, pair in copies(carry).items():
        assert all(map(torch.equal, pair, copies(triton_carry)[row]))


def test_any_schedule() -> None:
    rows = [BatchRow(parse_scheme("nvfp4@16"), flushes=f) for f in ((0, 1, 9, 30), (), (36,))]
    assert_same_run(inputs(3), rows)


def test_cutting_the_tokens_changes_no_bit() -> None:
    rows = [BatchRow(parse_scheme(s), seed=1) for s in SCHEMES[2:4]]
    x = inputs(2)
    o, carry = run(x, rows, "triton")
    cut_o, cut_carry = run(x, rows, "triton", (13, 1, 23))
    assert (o - cut_o).abs().max() <= 64 * 2**-24 * o.abs().max()
    for row, pair in copies(carry).items():
        assert all(map(torch.equal, pair, copies(cut_carry)[row]))


def test_fp32_rows_are_identical() -> None:
    o, _ = run(inputs(2), [BatchRow(parse_scheme("fp32"))] * 2, "triton")
    assert torch.equal(o[0], o[1])


def test_rows_that_the_noise_key_cannot_hold_are_refused() -> None:
    fp32 = parse_scheme("fp32")
    for row, says in (
        ({"seed": -1}, "seed -1"),
        ({"seed": 1 << 64}, "seed"),
        ({"document": 1 << 32}, "document"),
        ({"document": -1}, "document"),
    ):
        with pytest.raises(UsageError, match=says):
            BatchRow(fp32, **row)
    for padding in (-1, 3, 4):
        with pytest.raises(UsageError, match="needs a token of its own"):
            BatchRow(fp32, prompt=3, padding=padding)
    x = tuple(a.to(DEVICE) for a in inputs(1))
    with pytest.raises(UsageError, match="layer 32768"):
        replay_scan(*x, [BatchRow(fp32)], None, layer=1 << 15, backend="triton")


def test_what_cannot_run_is_refused(monkeypatch) -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu) == choose_backend("torch", cpu) == "torch"
    with pytest.raises(UsageError, match="unknown backend 'cuda'"):
        choose_backend("cuda", cpu)
    with pytest.raises(UsageError, match="cannot run int4-b12@16 on heads of 10 x 24"):
        run(inputs(1, d_k=24), [BatchRow(parse_scheme("int4-b12@16"))], "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", cpu) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        choose_backend("triton", cpu)
