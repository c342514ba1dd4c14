"""The reference recurrence: its two forms against each other, against a plain loop, and against hand-made cases."""

import pytest
import torch
from replayssm_emulation import (
    NoiseKey,
    UsageError,
    fixed_window,
    parse_scheme,
    quantize,
    recurrence_steps,
    recurrence_windows,
)

SCHEMES = [
    "fp32", "nvfp4@16", "nvfp4/fp16@16", "fp8@1", "nvfp4/fp16@16+fold=stored", "nvfp4/fp32@7+flush-reads=read",
    "fp8@16+records=bf16+handover=off", "nvfp4/int8@16+cast=chained", "fp16@1+noise-bits=13",
]  # fmt: skip


def inputs(tokens=70, heads=3, d_k=12, d_v=10, channels=False, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, d, generator=g, dtype=dtype) for d in (d_k, d_k, d_v))
    beta = torch.rand(tokens, heads, generator=g, dtype=dtype)
    shape = (tokens, heads, d_k) if channels else (tokens, heads)
    return q, k / k.norm(dim=-1, keepdim=True), v, beta, -0.3 * torch.rand(shape, generator=g, dtype=dtype)


def plain_loop(q, k, v, beta, log_decay, delta):
    """The recurrence as the design writes it, nothing else."""
    state, out = torch.zeros(q.shape[1], v.shape[2], q.shape[2], dtype=v.dtype), []
    for t in range(len(q)):
        alpha = log_decay[t].exp()
        state = state * (alpha[:, None, None] if alpha.ndim == 1 else alpha[:, None, :])
        error = v[t] - (state @ k[t][..., None])[..., 0] if delta else v[t]
        state = state + (beta[t][:, None] * error)[..., None] * k[t][:, None, :]
        out.append((state @ q[t][..., None])[..., 0])
    return torch.stack(out)


@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("channels", [False, True], ids=["per-head", "per-channel"])
@pytest.mark.parametrize("prompt", [0, 5, 16])
@pytest.mark.parametrize("name", SCHEMES)
def test_steps_equal_windows(name, prompt, channels, delta) -> None:
    x = inputs(channels=channels)
    scheme = parse_scheme(name)
    flushes = fixed_window(scheme.window, prompt, len(x[0]))
    steps = recurrence_steps(*x, scheme, flushes, delta=delta, prompt=prompt)
    windows = recurrence_windows(*x, scheme, flushes, delta=delta, prompt=prompt)
    assert (steps.o - windows.o).abs().max() <= 1e-12
    assert [c[0] for c in steps.copies] == [c[0] for c in windows.copies] == flushes
    for (_, *a), (_, *b) in zip(steps.copies, windows.copies, strict=True):
        for one, other in zip(a, b, strict=True):
            assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("channels", [False, True], ids=["per-head", "per-channel"])
@pytest.mark.parametrize("window", [1, 7, 16])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_unrounded_windows_change_nothing(tokens, window, channels, delta) -> None:
    """R1: without rounding, any window equals the plain recurrence."""
    x = inputs(tokens=tokens, channels=channels)
    trace = recurrence_windows(*x, parse_scheme(f"fp32@{window}"), fixed_window(window, 0, tokens), delta=delta)
    assert (trace.o - plain_loop(*x, delta)).abs().max() <= 1e-12


@pytest.mark.parametrize("form", [recurrence_steps, recurrence_windows])
def test_delta_decays_before_it_forms_the_error(form) -> None:
    """S7: S=1, k=1, v=0, α=0.5, β=1 gives 0; the other order would give -0.5."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    decay = torch.tensor([[0.5]], dtype=torch.float64).log()
    trace = form(one, one, one * 0, one[..., 0], decay, parse_scheme("fp32@1"), [0], delta=True, state=one)
    assert trace.o.item() == 0
    assert trace.copies[0][1].item() == 0


@pytest.mark.parametrize("channels", [False, True], ids=["GDN", "KDA"])
def test_strong_gates_do_not_overflow(channels) -> None:
    """64 tokens with log-decays of -5 and -0.01 in float32 stay finite and equal the float64 loop to 1e-4."""
    q, k, v, beta, log_decay = inputs(tokens=64, channels=channels)
    log_decay = (
        torch.where(torch.arange(64).view(-1, *[1] * (log_decay.ndim - 1)) % 2 == 0, -5.0, -0.01)
        .expand_as(log_decay)
        .double()
    )
    exact = plain_loop(q, k, v, beta, log_decay, True)
    trace = recurrence_windows(
        *(x.float() for x in (q, k, v, beta, log_decay)), parse_scheme("fp32"), fixed_window(16, 0, 64), delta=True
    )
    assert trace.o.isfinite().all()
    assert (trace.o - exact).abs().max() <= 1e-4


def test_shared_copy_feeds_its_rounding_back_and_a_read_copy_does_not() -> None:
    """The recurrence copies of READ/fp32 are those of fp32, whatever the read format; a shared copy's are not."""
    x = inputs(dtype=torch.float32)
    flushes = fixed_window(16, 0, 70)
    exact, separate, shared = (
        recurrence_windows(*x, parse_scheme(s), flushes) for s in ("fp32", "nvfp4/fp32@16", "nvfp4@16")
    )
    for (_, a, _), (_, b, read), (_, c, _) in zip(exact.copies, separate.copies, shared.copies, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(read, quantize(b, "nvfp4"))
        assert not torch.equal(a, c)


def test_copies_are_cast_from_the_same_fold_with_their_own_noise() -> None:
    x = inputs(dtype=torch.float32)
    key = NoiseKey(seed=3, document=2, layer=1)
    trace = recurrence_windows(*x, parse_scheme("fp8-sr/fp8@16"), [15], key=key)
    fold = recurrence_windows(*x, parse_scheme("fp32"), [15]).copies[0][1]
    for which, copy in enumerate(trace.copies[0][1:]):
        assert torch.equal(
            copy, quantize(fold, "fp8", "stochastic", seed=3, document=2, layer=1, position=15, copy=which)
        )


def test_the_flushing_token_reads_the_unrounded_fold() -> None:
    """The documented default: token 15 of a 16-token window equals fp32; token 16 is the first to read a rounding."""
    x = inputs(dtype=torch.float32)
    exact = recurrence_windows(*x, parse_scheme("fp32"), [15, 31])
    rounded = recurrence_windows(*x, parse_scheme("nvfp4@16"), [15, 31])
    assert torch.equal(exact.o[:16], rounded.o[:16])
    assert not torch.equal(exact.o[16], rounded.o[16])


def test_any_increasing_positions_are_a_schedule() -> None:
    x = inputs()
    scheme = parse_scheme("nvfp4@16")
    flushes = [0, 1, 9, 40, 69]
    assert (recurrence_steps(*x, scheme, flushes).o - recurrence_windows(*x, scheme, flushes).o).abs().max() <= 1e-12


def test_mismatched_shapes_are_refused() -> None:
    q, k, v, beta, log_decay = inputs()
    with pytest.raises(UsageError, match="shapes do not agree"):
        recurrence_steps(q, k[:, :2], v, beta, log_decay, parse_scheme("fp32"), [])
    with pytest.raises(UsageError, match="log_decay"):
        recurrence_windows(q, k, v, beta, log_decay[:, :2], parse_scheme("fp32"), [])
