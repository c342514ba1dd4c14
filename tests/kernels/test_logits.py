"""The comparison kernel on tiny shapes against float64: special cases, accuracy, exact zeros, blocks.

On a GPU where there is one, otherwise in the interpreter.
"""

import numpy as np
import pytest
import torch
from replayssm_kernels.triton_backend import logits as kl_kernel
from replayssm_kernels.triton_backend.logits import compare_logits_triton

from replayssm_eval.inference import metrics
from replayssm_eval.inference.metrics import TokenMetrics, compare_hidden, compare_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.interpreter
INF, NAN = torch.inf, torch.nan


def run(logits: torch.Tensor, targets: torch.Tensor, chunk: int = 4) -> tuple[np.ndarray, ...]:
    found = compare_logits_triton(logits.to(DEVICE), targets.to(DEVICE), chunk=chunk, num_warps=1)
    return tuple(x.cpu().numpy() for x in found)


def assert_same(logits: torch.Tensor, targets: torch.Tensor, chunk: int = 4) -> None:
    """All that the kernel finds against float64, NaN and inf included."""
    kl, top1, nll, entropy = run(logits, targets, chunk)
    expected = compare_logits(logits, targets)
    # Logarithms of fp32 sums are off by a few times 2⁻²⁴, absolute.
    for got, wanted in ((kl, expected.kl), (nll, expected.nll), (entropy, expected.entropy)):
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
    defined = ~np.isnan(expected.entropy)
    np.testing.assert_array_equal(top1[defined], logits.float().numpy().argmax(-1)[defined])
    np.testing.assert_array_equal((top1 == top1[:1]) & ~np.isnan(kl), expected.same_top1)


# (row 0, row): a vocabulary of 6 in chunks of 4.
CASES = {
    "excluded by both": ([0, 0, -INF, 1, 2, -INF], [0.1, 0, -INF, 1, 2, -INF]),
    "excluded by the row": ([0, 0, 0, 0, 0, 0], [0.1, 0, 0, 0, 0, -INF]),
    "row 0's likeliest excluded by the row": ([0, 5, 0, 0, 0, 0], [0, -INF, 0, 0, 0, 0]),
    "excluded by row 0": ([0, 0, -INF, 0, 0, 0], [0, 0, 3, 0, 0, 0]),
    "a chunk excluded by both": ([-INF, -INF, -INF, -INF, 1, 2], [-INF, -INF, -INF, -INF, 2, 1]),
    "a chunk excluded by row 0": ([-INF, -INF, -INF, -INF, -200, -201], [-210, 0, -INF, -200, -201, -200]),
    "a chunk excluded by the row": ([-1, -2, -INF, 0, 1, 2], [-INF, -INF, -INF, -INF, 2, 1]),
    "probability that float64 still holds": ([0, 0, 0, 0, 0, -740], [0, 0, 0, 0, 0, -INF]),
    "probability 0 even in float64": ([0, 0, 0, 0, 0, -750], [0, 0, 0, 0, 0, -INF]),
    "all excluded": ([0, 0, 0, 0, 0, 0], [-INF] * 6),
    "all excluded by row 0": ([-INF] * 6, [0, 0, 0, 0, 0, 0]),
    "NaN in row 0": ([0, 0, 0, 0, NAN, 0], [0, 0, 0, 0, 0, 0]),
    "NaN in the row": ([0, 0, 0, 0, 0, 0], [NAN, 0, 0, 0, 0, 0]),
    "+inf in row 0": ([0, INF, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    "+inf in the row": ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, INF]),
    "+inf in both": ([0, INF, 0, 0, 0, 0], [0, INF, 0, 0, 0, 0]),
    "first of equals": ([0, 3, 3, 0, 3, 0], [0, 0, 3, 0, 3, 3]),
    "masked by a number": ([0, -1e4, 0, 0, 1, 0], [0, -1e4, 1, 0, 0, -1e4]),
    "row 0's first chunk masked": ([-1e29, -INF, -1e29, -INF, 30, 30], [1, -INF, 30, 1, 30, 30]),
    "suppressed, then negligible": ([0, 1, 1, -800, 1e4, 0], [-INF, 1, 1, -800, 2.5, 0]),
    "overflow": ([0, 0, 0, 90, 0, 0], [0, 0, 0, 0, 90, 300]),
}


def test_special_cases() -> None:
    pairs = torch.tensor(list(CASES.values())).transpose(0, 1).contiguous()
    for targets in (torch.arange(len(CASES)) % 6, torch.full((len(CASES),), -1)):
        assert_same(pairs, targets)


@pytest.mark.parametrize(
    "values", [[-INF, 0, 1, -800, 5, -100, 1e4], [INF, NAN, -INF, *range(15)], [-INF, -740, -743, -746, 0]], ids=str
)
def test_any_mixture_of_special_values(values) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.tensor(values)[torch.randint(len(values), (3, 20, 7), generator=g)]
    assert_same(logits, torch.randint(-1, 7, (20,), generator=g))


def test_a_single_logit() -> None:
    assert_same(torch.ones(1, 1, 1), torch.tensor([0]))


def exact_kl(logits: torch.Tensor) -> torch.Tensor:
    """float64, without the cancellation of Σ p·log(p / q), since Σ q = 1."""
    log_p = torch.log_softmax(logits.double(), -1)
    ratio = log_p - log_p[:1]
    return (log_p[:1].exp() * (torch.expm1(ratio) - ratio)).sum(-1)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Scale of row 0's logits, scale of the differences, and what row 0's likeliest token stands out by.
REGIMES = [
    (1, 1e-6, 0),
    (1, 1e-4, 0),
    (1, 0.01, 0),
    (1e-3, 1e-3, 0),
    (1, 1, 0),
    (1, 10, 0),
    (1, 1000, 0),
    (5, 0.1, 0),
    (1, 0.01, 20),
    (300, 1, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_relative_accuracy(dtype) -> None:
    """KL from 1e-14 to 4000; V is no multiple of the chunk; row 1 equals row 0."""
    g = torch.Generator().manual_seed(0)
    base, moved = (torch.randn(len(REGIMES), 301, generator=g) for _ in range(2))
    scale, noise, peak = torch.tensor(REGIMES).T.unsqueeze(-1)
    base *= scale
    base[:, 77] += peak.squeeze(-1)
    logits = torch.stack([base, base, base + noise * moved]).to(dtype)
    kl, top1, nll, entropy = run(logits, torch.arange(len(REGIMES)), chunk=128)
    # Every output was written: they start as NaN and -1.
    assert not np.isnan([kl, nll, entropy]).any()
    assert (top1 >= 0).all()
    assert not kl[:2].any()
    # u = 2⁻²⁴. Weights exp(z) are off by up to (2 + 1.5·|z|)·u, |z| up to 20. Sums are off by u per chunk and level, of
    # either sign. KL is a difference of G and D²/2, which multiplies errors by Σ p·d²/2 over KL, 8 at most here. Mostly
    # they cancel: 64u is a quarter of the sum of all.
    np.testing.assert_allclose(kl[2], exact_kl(logits)[2], rtol=64 * 2**-24)
    expected = compare_logits(logits, torch.arange(len(REGIMES)))
    np.testing.assert_allclose(nll, expected.nll, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, expected.entropy, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_and_shifted_rows_give_exactly_zero(dtype) -> None:
    """Also with a huge logit, and with the likeliest token in a late chunk."""
    base = torch.randint(-8, 9, (2, 300), generator=torch.Generator().manual_seed(0)).to(dtype)
    base[1, 290] = 65504.0 if dtype == torch.float16 else 1e30
    assert not run(torch.stack([base, base]), torch.tensor([0, 1]), chunk=64)[0].any()
    assert not run(torch.stack([base, base + 3])[:, :1].contiguous(), torch.tensor([0]), chunk=64)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_compare_hidden_states_alike(dtype, monkeypatch) -> None:
    """In blocks of 4, 4 and 2 tokens of the same logits."""
    g = torch.Generator().manual_seed(1)
    row = torch.randn(1, 10, 8, generator=g)
    hidden = torch.cat([row, row, row + 0.1 * torch.randn(1, 10, 8, generator=g)]).to(DEVICE)
    head = torch.nn.Linear(8, 50, bias=False).to(DEVICE, dtype)
    torch.nn.init.normal_(head.weight, generator=torch.Generator(DEVICE).manual_seed(2))
    monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 3 * 50 * 4))
    monkeypatch.setattr(metrics, "KERNEL_BLOCK_BYTES", 3 * 50 * 4 * dtype.itemsize)
    shapes = []

    def spy(logits, targets):
        shapes.append((logits.shape[1], logits.dtype))
        return compare_logits_triton(logits, targets)

    monkeypatch.setattr(kl_kernel, "compare_logits_triton", spy)
    targets = torch.tensor([*range(9), -1])
    found, expected = (compare_hidden(hidden, head, targets, backend) for backend in ("triton", "torch"))
    assert shapes == [(4, dtype), (4, dtype), (2, dtype)]
    assert not found.kl[:2].any()
    assert (found.kl[2] > 0).all()
    for name in TokenMetrics.__dataclass_fields__:
        got, wanted = getattr(found, name), getattr(expected, name)
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=64 * 2**-24, atol=2e-6 if name in ("nll", "entropy") else 0)
