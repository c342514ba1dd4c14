"""The delta rule's Triton kernels on tiny shapes, against the float64 recurrence and the torch scan.

On a GPU where there is one, otherwise in the interpreter.
"""

import pytest
import torch
from replayssm_emulation import NoiseKey, Rule, fixed_window, parse_scheme, recurrence_steps
from replayssm_kernels import BatchRow, replay_scan
from transformers import AutoConfig, AutoModelForCausalLM

from replayssm_eval import attach
from tests.helpers.models import delta_inputs, token_ids
from tests.helpers.tensors import copies
from tests.models.test_families import COMMON, CONFIGS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.interpreter
SCHEMES = [
    "nvfp4@16",
    "fp8/fp16@5",
    "nvfp4/fp16@8+fold=stored",
    "fp8/bf16@16+flush-reads=read",
    "fp16/int8@20+fold=stored",
    "fp16@1",
    "mxfp4/fp16@20+cast=chained",
]


def inputs(
    channels: bool, tokens: int, strong: bool = False, heads: int = 2, groups: int = 1, d_v: int = 10, d_k: int = 12
):
    return delta_inputs(channels, tokens, strong, heads, groups, d_v, d_k, seed=3)


def run(x, rows, backend: str = "triton", pieces: tuple[int, ...] = ()):
    """(o on the CPU, carry) of rows with the same inputs, in chunks of `pieces` tokens. `replay_scan` poisons o."""
    carry, outputs, position = None, [], 0
    for n in pieces or (len(x[0]),):
        part = (
            a[None, position : position + n].expand(len(rows), *a[position : position + n].shape).to(DEVICE) for a in x
        )
        o, carry = replay_scan(*part, rows, carry, layer=2, rule=Rule.DELTA, backend=backend)
        outputs.append(o.cpu())
        position += n
    assert position == len(x[0])
    return torch.cat(outputs, dim=1), carry


ROUNDOFF = 256 * 2**-24  # of the largest element


def off(a, b) -> torch.Tensor:
    """Which elements are not equal up to roundoff; NaN equals nothing."""
    return ~((a - b).abs() <= ROUNDOFF * b.abs().max())


def float64_outputs(x, window: int = 16):
    share = x[2].shape[1] // x[0].shape[1]
    q, k, *rest = (a.double() for a in x)
    q, k = (a.repeat_interleave(share, dim=1) for a in (q, k))
    flushes = fixed_window(window, 0, len(q))
    return recurrence_steps(q, k, *rest, parse_scheme(f"fp32@{window}"), flushes, delta=True, key=NoiseKey(0, 0, 2)).o


@pytest.mark.parametrize("strong", [False, True], ids=["weak", "strong"])
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_fp32_is_the_float64_recurrence(channels, strong) -> None:
    """Within some hundred roundings. Strong gates neither overflow nor lose anything. Windows of 16, and long ones."""
    x = inputs(channels, 64, strong)
    expected = float64_outputs(x)
    o, _ = run(
        x,
        [
            BatchRow(parse_scheme("fp32")),
            BatchRow(parse_scheme("fp32/fp32@21")),
            BatchRow(parse_scheme("fp32"), prompt=30),
        ],
    )
    assert (o - expected).abs().max() <= 256 * 2**-24 * expected.abs().max()
    assert o.isfinite().all()


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_keys_that_nearly_repeat(channels) -> None:
    """No decay, keys at an angle of cosine .9: the powers of their overlaps grow into the thousands."""
    q, k, v, beta, decay = inputs(channels, 32)
    x = (q, torch.nn.functional.normalize(k[:1] + k / 3, dim=-1), v, beta.sqrt(), 0 * decay)
    expected = float64_outputs(x)
    o, _ = run(x, [BatchRow(parse_scheme("fp32"))])
    assert (o[0] - expected).abs().max() <= 32 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("prompt", [0, 21])
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_the_scan_equals_the_torch_scan(channels, prompt) -> None:
    """All schemes side by side, in odd chunks: the same rounding, except where fp32 roundoff tips an element.

    Roundoff tips about one element in a thousand (roundoff over an eight-bit step), hardly ever three of the 120 of a
    copy. A tipped element changes one channel of the outputs: for good, or until the read copy is made anew. That takes
    at most 8 tokens if there is more than one flush.
    """
    x = inputs(channels, 29, heads=1)  # the interpreter is slow
    rows = [BatchRow(parse_scheme(s), seed=5, document=d, prompt=prompt) for d, s in enumerate(SCHEMES)]
    pieces = (29,) if prompt else (9, 20)
    expected, carry = run(x, rows, "torch", pieces)
    got, triton_carry = run(x, rows, "triton", pieces)
    assert carry.by_row("flushes") == triton_carry.by_row("flushes")
    held, triton_held = copies(carry), copies(triton_carry)
    tipped = 0
    for row, scheme in enumerate(SCHEMES):
        elements = [off(a, b) for a, b in zip(triton_held[row], held[row], strict=True)]
        tipped += sum(int(e.sum()) for e in elements)
        assert max(int(e.sum()) for e in elements) <= 2, scheme
        kept = ~torch.stack([e.any(-1) for e in elements]).any(0).cpu()  # channels [H, d_v]
        assert off(got[row][:, kept], expected[row][:, kept]).sum() <= 8, scheme
    assert tipped <= 4  # of 1,680


def exact_inputs(channels: bool, tokens: int, window: int):
    """Sums that fp32 does not round: one key a token, of powers of two (several in short windows), β 1, no decay."""
    g = torch.Generator().manual_seed(3)
    q = torch.randint(-2, 3, (tokens, 1, 12), generator=g) / 4
    k = torch.zeros(tokens, 1, 12)
    for t in range(tokens):
        at = torch.randperm(4, generator=g)
        if window > 5:
            k[t, 0, 3 * at[0]] = 1
        else:
            k[t, 0, 3 * at] = torch.randint(0, 2, (4,), generator=g) - 0.5  # a unit key: four halves of either sign
    v = torch.randint(-8, 9, (tokens, 1 if channels else 2, 10), generator=g) / 8
    return q, k, v, torch.ones(v.shape[:2]), torch.zeros(*v.shape[:2], *([12] if channels else []))


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(
    ("window", "pieces", "names"),
    [
        (3, (7, 1, 4), ["fp16/mxfp4-sr@3", "mxfp8/fp16@3+flush-reads=read", "fp8-unscaled/bf16@3+fold=stored"]),
        (1, (9,), ["mxfp4@1", "bf16/fp16-rn@1"]),
        (
            20,
            (41,),
            ["mxfp8/mxfp4-sr@20", "mxfp4/mxfp6-sr@20+fold=stored", "mxfp4-sr/mxfp6@20+cast=chained", "mxfp4@20"],
        ),
    ],
    ids=["short", "single", "long"],
)
def test_exact_arithmetic_gives_equal_bits(channels, window, pieces, names) -> None:
    """Where no sum is rounded, outputs and copies agree bit for bit, and with them every rounding."""
    x = exact_inputs(channels, sum(pieces), window)
    rows = [BatchRow(parse_scheme(s), seed=4, document=n) for n, s in enumerate(names)]
    expected, carry = run(x, rows, "torch", pieces)
    assert all(any(changed) for changed in carry.by_row("changed"))
    got, triton_carry = run(x, rows, "triton", pieces)
    for row, scheme in enumerate(names):
        assert torch.equal(got[row], expected[row]), scheme
        assert all(map(torch.equal, copies(triton_carry)[row], copies(carry)[row])), scheme


@pytest.mark.parametrize(("d_v", "d_k"), [(80, 48), (16, 128)], ids=str)
def test_any_head_size(d_v, d_k) -> None:
    """Several slices and parts, heads that share keys, decays of channels; views of any layout."""
    x = inputs(True, 18, heads=2, groups=1, d_v=d_v, d_k=d_k)
    together = torch.cat([a.flatten(1) for a in x[:3]], dim=1).t().contiguous().t()
    views = [
        a.unflatten(1, b.shape[1:])
        for a, b in zip(together.split([b[0].numel() for b in x[:3]], dim=1), x[:3], strict=True)
    ]
    rows = [BatchRow(parse_scheme(scheme), seed=5) for scheme in ("fp32@8", "fp16@8")]
    expected, carry = run(x, rows, "torch")
    got, triton_carry = run((*views, *x[3:]), rows)
    assert not off(got[0], expected[0]).any()
    exact, rounded = (off(copies(triton_carry)[row][0], copies(carry)[row][0]) for row in range(2))
    assert not exact.any()
    assert rounded.float().mean() <= ROUNDOFF / 2**-11  # what roundoff can tip over a boundary of fp16


def test_one_step_by_hand() -> None:
    """S=1, k=1, v=0, α=.5, β=1: the error is -.5, so the state becomes 0. Single tokens, and a window of two."""
    one = torch.ones(2, 1, 1)
    x = (
        one,
        one,
        torch.tensor([1.0, 0.0]).view(2, 1, 1),
        one[..., 0],
        torch.tensor([[0.0], [0.5]]).log().nan_to_num(neginf=0),
    )
    o, carry = run(x, [BatchRow(parse_scheme("fp32@1")), BatchRow(parse_scheme("fp32@2"))])
    assert o.flatten().tolist() == [1, 0, 1, 0]
    assert all(copy.item() == 0 for pair in copies(carry).values() for copy in pair)


def test_a_model_runs_on_it() -> None:
    """The logits of both scans are the same. No start-up check: it is the plain scan's and takes long here."""
    torch.manual_seed(0)
    sizes = {"linear_num_heads": 1, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = AutoConfig.for_model(
        "kimi_linear", **COMMON | CONFIGS["kimi_linear"] | sizes | {"mlp_layer_types": ["dense"] * 2}
    )
    model = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    scheme, logits = ["nvfp4/fp16@16+fold=stored"], []
    for backend in ("torch", "triton"):
        with torch.inference_mode(), attach(model, scheme, backend=backend, probe=False) as session:
            assert session.backend == backend
            logits.append(model(input_ids=token_ids(20).to(DEVICE)).logits.float())
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()
