"""The testbeds' training: the chunked delta rule against the recurrence and the classes' functions, and long memory."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from replayssm_eval import attach
from replayssm_eval.models.loading import load

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.slow
KINDS = ("mamba2", "gdn", "kda")
CLASS_FUNCTIONS = {"gdn": torch_chunk_gated_delta_rule, "kda": chunk_kimi_delta_attention}


@pytest.fixture(scope="module")
def models():
    spec = importlib.util.spec_from_file_location("testbed_models", SCRIPTS / "testbed_models.py")
    sys.modules["testbed_models"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(kind, tokens, gates):
    """q, k, v, g, β of 2 sequences of 4 heads; keys repeat, as they do in text. gates: "slow", "mixed" or "strong"."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(2, tokens, *shape, generator=generator)

    groups = 2 if kind == "gdn" else 4
    words = torch.randint(0, 10, (2, tokens), generator=generator)
    key = torch.randn(10, groups, 16, generator=generator)[words] + 0.3 * normal(groups, 16)
    g = normal(4, 16) if kind == "kda" else normal(4)
    g = {"slow": -0.001 * g.exp(), "mixed": -0.05 * (2 * g).exp(), "strong": -4.0 + 0.3 * g}[gates]
    g = g.clamp_min(-4.999) if kind == "kda" else g  # off the floor, where the gradient ends
    return [x.requires_grad_() for x in (normal(groups, 16), key, normal(4, 24), g, normal(4).sigmoid().detach())]


def recurrence(query, key, value, g, beta):
    """Token by token in float64."""
    query, key, value, g, beta = (x.double() for x in (query, key, value, g, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], dim=2) for x in (query, key))
    g = g if g.ndim == 4 else g[..., None]
    state, out = torch.zeros(*value.shape[::2], key.shape[-1], value.shape[-1], dtype=torch.float64), []
    for t in range(value.shape[1]):
        state = state * g[:, t, ..., None].exp()
        error = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t, ..., None] * error[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * key.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)


def close(got, expected, tolerance):
    return (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("gates", ["slow", "mixed", "strong"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_delta_rule_and_its_gradients(models, kind, gates) -> None:
    """200 tokens are three chunks and a part of one."""
    arguments = inputs(kind, 200, gates)
    expected = recurrence(*arguments)
    q, k, v, g, beta = arguments
    got, state = models.delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert state is None
    assert close(got, expected, 5e-6)
    of_class, _ = CLASS_FUNCTIONS[kind](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert close(got, of_class, 5e-6)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad((expected * weight).sum(), arguments)
    for name, mine, right in zip("qkvgβ", torch.autograd.grad((got * weight).sum(), arguments), exact, strict=True):
        assert close(mine, right, 2e-5), name


def test_gates_of_any_strength_stay_finite(models) -> None:
    """Channels below the floor forget all but exp(-5)."""
    q, k, v, g, beta = (x.detach() for x in inputs("kda", 128, "mixed"))
    g = (40 * g).clamp_min(-300.0).requires_grad_()
    got, _ = models.delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert close(got, recurrence(q, k, v, g.clamp_min(models.FLOOR), beta), 1e-5)
    assert torch.autograd.grad(got.square().sum(), g)[0].isfinite().all()


def test_inverse_with_repeated_keys(models) -> None:
    """All keys equal and β = 1: the inverse has two diagonals, while the powers of L reach 10^17."""
    lower = torch.ones(3, 64, 64).tril(-1)
    expected = torch.eye(64) - torch.diag(torch.ones(63), -1)
    assert torch.equal(models.UnitLowerInverse.apply(lower), expected.expand(3, 64, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_long_from_the_start(models, kind) -> None:
    """Half-lives from 4 to 32,768 tokens, log-uniform: of heads, and of KDA's channels."""
    model = models.build_model(kind, 512, "M*M", 128)
    models.set_long_memory(model, torch.Generator().manual_seed(0))
    layers = list(models.half_lives(model).values())
    assert len(layers) == 2
    low, high = models.HALF_LIVES
    for heads in layers:
        flat = sorted(x for head in heads for x in (head if kind == "kda" else [head]))
        assert low <= flat[0] < low * (high / low) ** (1 / len(heads))
        assert high >= flat[-1] > high / (high / low) ** (1 / len(heads))
        if kind == "kda":
            assert all(least < middle < longest for least, middle, longest in heads)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_slow_heads_write_rarely_from_the_start(models, kind) -> None:
    """Each layer's fastest head has β near 1/2, its slowest a small one. The constant passes every layer's norm."""
    torch.manual_seed(0)
    model = models.build_model(kind, 512, "MM*M", 128)
    models.set_long_memory(model, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 512, (1, 200))
    models.set_rare_writes(model, ids)
    seen = []
    for module in model.modules():
        if models.beta_projection(module) is not None:
            models.beta_projection(module).register_forward_hook(
                lambda _, __, out: seen.append(out.sigmoid().mean((0, 1)))
            )
    with torch.no_grad():
        model.model(input_ids=ids, use_cache=False)
    assert len(seen) == 3
    for beta in seen:
        assert beta[0] > 0.2
        assert beta[-1] < 0.1
        assert beta[-1] < beta[0] / 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folders of two steps of the script, by kind; the runs side by side."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    sizes = {"vocab": 300, "hidden": 128, "pattern": "M*M", "context": 128, "batch": 2, "steps": 2, "workers": 1}
    small = [*(f"--{name}={value}" for name, value in sizes.items()), "--no-compile"]
    command = [sys.executable, str(SCRIPTS / "train_testbed.py"), "--corpus", str(folder), *small]
    outputs = {kind: folder / kind for kind in KINDS}
    options = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    }
    runs = [
        subprocess.Popen([*command, "--kind", kind, "--output", str(output)], **options)
        for kind, output in outputs.items()
    ]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_loads_and_agrees_with_its_class(trained, kind) -> None:
    """The probe of `attach` passes, and the unpatched class gives the session's numbers."""
    record = json.loads((trained[kind] / "training.json").read_text())
    assert [line["step"] for line in record["log"]] == [0, 1]
    assert record["command"]["kind"] == kind
    model = load(str(trained[kind]), dtype="float32", device="cpu").model
    ids = torch.randint(0, 250, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with attach(model, ["fp32"], follow_hf_clamp=True):
            assert close(model(input_ids=ids, use_cache=False).logits, expected, 1e-4)


def test_an_interrupted_training_says_so(tmp_path) -> None:
    """What there is is kept, marked, and the exit code is that of an interrupted run."""
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    sizes = {"vocab": 300, "hidden": 64, "pattern": "M*", "context": 64, "batch": 1, "steps": 1_000_000, "workers": 1}
    small = [*(f"--{name}={value}" for name, value in sizes.items()), "--no-compile", "--output", str(tmp_path / "out")]
    command = [sys.executable, str(SCRIPTS / "train_testbed.py"), "--corpus", str(tmp_path), *small]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert any(line.startswith("step 0 ") for line in run.stdout)
    run.send_signal(signal.SIGINT)
    rest, errors = run.communicate(timeout=120)
    assert run.returncode == 130, errors
    assert "interrupted" in rest
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert 0 <= record["interrupted_after_step"] < 1_000_000
    assert load(str(tmp_path / "out"), device="cpu").model.num_parameters() == record["parameters"]
