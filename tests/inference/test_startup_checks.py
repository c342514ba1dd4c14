"""The start-up probe and the hook counter against faults of transformers itself (P1, P5).

The faults are a broken cached forward, equal rows with other bits, and a fast path around the recurrence.
"""

import importlib
import inspect
from collections import Counter
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from replayssm_emulation import RunError, UsageError
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, NemotronHForCausalLM

from replayssm_eval import attach
from replayssm_eval.models.families import FAMILIES, state_layers
from tests.helpers.models import mamba2, nemotron_h, token_ids
from tests.models.test_families import COMMON, CONFIGS


def restart(forward, mixer, hidden_states, cache, config, **kwargs):
    """The new tokens are read from a zero state, which then replaces the old one."""
    fresh = DynamicCache(config=config)
    output = forward(mixer, hidden_states, cache=fresh, **kwargs)
    cache.layers[mixer.layer_idx] = fresh.layers[mixer.layer_idx]
    return output


def first_token_only(forward, mixer, hidden_states, cache, config, **kwargs):
    """Of several new tokens one is read, and its output is given to all."""
    return forward(mixer, hidden_states[:, :1], cache=cache, **kwargs).expand_as(hidden_states)


@pytest.mark.parametrize("fault", [restart, first_token_only])
@pytest.mark.parametrize("make", [lambda: nemotron_h("M-M*"), mamba2], ids=["nemotron_h", "mamba2"])
def test_a_broken_cached_forward_is_refused(make, fault, monkeypatch) -> None:
    """P1: as transformers had it. One pass and single tokens are right, so only a second chunk can tell."""
    model = make()
    mixer = type(next(iter(state_layers(model).values())))
    forward = mixer.forward

    def broken(self, hidden_states, cache=None, **kwargs):
        continues = cache is not None and cache.get_recurrent_state(self.layer_idx, state_idx=0) is not None
        if continues and hidden_states.shape[1] > 1:
            return fault(forward, self, hidden_states, cache, model.config, **kwargs)
        return forward(self, hidden_states, cache=cache, **kwargs)

    monkeypatch.setattr(mixer, "forward", broken)
    with (
        pytest.raises(RunError, match=r"start-up probe: one pass and two chunks differ .*transformers \d"),
        attach(model, ["fp32"]),
    ):
        pass


def test_rows_that_a_machine_does_not_keep_equal_are_refused(monkeypatch) -> None:
    """A matrix library may give equal rows other bits in a single-token step; a control would then not be 0."""
    model = nemotron_h("M-M*")
    forward = type(model.lm_head).forward

    def broken(self, x):
        out = forward(self, x)
        if self is model.lm_head and x.shape[1] == 1 and len(x) > 1:
            out[1, 0, 3] = torch.nextafter(out[1, 0, 3], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(type(model.lm_head), "forward", broken)
    with attach(model, ["fp32", "nvfp4@16"]):
        pass  # no control, nothing to compare
    with (
        pytest.raises(
            RunError, match=r"rows 0 and 1 hold equal fp32 states, but their logits differ by .* in a pass of 1 tokens"
        ),
        attach(model, ["fp32", "fp32", "nvfp4@16"]),
    ):
        pass


@pytest.fixture
def kernels():
    """A module that stands in for `mamba_ssm`: it computes the right thing, and counts how often."""
    modeling = importlib.import_module(FAMILIES["nemotron_h"].modeling)
    stub = ModuleType("mamba_ssm")
    stub.calls = Counter()
    for name in ("mamba2_chunk_scan", "mamba2_selective_state_update"):

        def kernel(*args, name=name, torch_path=getattr(modeling, name), **kwargs):
            stub.calls[name] += 1
            return torch_path(*args, **kwargs)

        setattr(stub, name, kernel)
    return stub


@pytest.fixture
def switched_off():
    """A model with state layers 0 and 2, and the switch that once kept the kernels away and is no longer read."""
    plain = nemotron_h("M-M*")
    model = NemotronHForCausalLM(type(plain.config)(**plain.config.to_dict() | {"use_mamba_kernels": False})).eval()
    model.load_state_dict(plain.state_dict())
    return model


def test_kernels_that_nobody_asked_for_do_not_run(switched_off, kernels, monkeypatch) -> None:
    """P5: transformers prefers an installed package whatever the config says; the states are rounded all the same."""
    modeling = importlib.import_module(FAMILIES["nemotron_h"].modeling)
    for name in ("mamba2_chunk_scan", "mamba2_selective_state_update"):
        monkeypatch.setattr(modeling, name, getattr(kernels, name))
    ids = token_ids(77, rows=2)
    with torch.inference_mode():
        expected = switched_off(input_ids=ids[:1], use_cache=False).logits
        assert kernels.calls == {"mamba2_chunk_scan": 2}
        with attach(switched_off, ["fp32", "nvfp4@16"], follow_hf_clamp=True) as session:
            kernels.calls.clear()
            out = switched_off(input_ids=ids, use_cache=False).logits
            assert not kernels.calls
            assert session.flushes == {0: [4, 4], 2: [4, 4]}  # state layers x (77 // 16)
            session.check_rounding([4, 4])
    assert (out[0] - expected[0]).abs().max() <= 1e-4
    assert (out[1] - out[0]).norm() > 1e-4 * out[0].norm()


def test_a_layer_with_its_own_kernels_stops_the_run(switched_off, kernels) -> None:
    """P5: the layer calls its kernels by itself and computes the right thing, so that only the counter can tell."""
    mixer = state_layers(switched_off)[2]
    plain = inspect.unwrap(type(mixer).forward)
    own = {**plain.__globals__, **vars(kernels)}
    # transformers 5.25 calls the kernels from a function of its own, which hub kernels replace as a whole.
    for function in (inspect.unwrap(own[name]) for name in ("mamba2_scan_forward",) if name in own):
        own[function.__name__] = FunctionType(function.__code__, own, argdefs=function.__defaults__)
    mixer.forward = MethodType(FunctionType(plain.__code__, own, argdefs=plain.__defaults__), mixer)
    with (
        pytest.raises(RunError, match=r"state hook did not run exactly once in layers \[2\]"),
        attach(switched_off, ["fp32", "nvfp4@16"]),
    ):
        pass
    assert kernels.calls


# From 5.25 on, `kernelize` of transformers puts kernels of the hub in three places. `load` asks for none. A model that
# the user built and gave to `attach` may have them. None of the three stays unseen:
# 1. A recurrence function, such as `mamba2_chunk_scan`. Our function stands at the same name. If the layer calls the
#    kernel all the same, it has no scan in that pass.
# 2. `mamba2_scan_forward`, or the `forward` of a whole layer, such as Qwen3_5GatedDeltaNet. The layer has no scan in
#    that pass, and the pass ends with an error.
# 3. The class of a layer. `state_layers` looks for the class, and misses layers that the config's `layer_types` names.
# A replaced `causal_conv1d_forward` is no bypass: it computes what the scan reads.
# A layer that calls our scan, and then uses a state of its own, passes the count. Only the probe can catch it.


def own_copy(modeling, name):
    """A function of a modeling file that keeps calling the file's own functions, whatever is patched there later."""
    function = inspect.unwrap(getattr(modeling, name))
    return FunctionType(function.__code__, dict(vars(modeling)), argdefs=function.__defaults__)


@pytest.mark.parametrize(("kind", "make"), [("nemotron_h", nemotron_h), ("mamba2", mamba2)])
def test_a_replaced_scan_function_stops_the_run(kind, make, monkeypatch) -> None:
    modeling = importlib.import_module(FAMILIES[kind].modeling)
    if not hasattr(modeling, "mamba2_scan_forward"):
        pytest.skip("transformers before 5.25 has no such function")
    model = make()
    monkeypatch.setattr(modeling, "mamba2_scan_forward", own_copy(modeling, "mamba2_scan_forward"))
    with (
        pytest.raises(RunError, match="state hook did not run exactly once in layers"),
        attach(model, ["fp32", "nvfp4@16"]),
    ):
        pass


@pytest.mark.parametrize("replaced", ["one layer", "all layers"])
@pytest.mark.parametrize("kind", ["nemotron_h", "mamba2", "qwen3_5_text", "qwen3_next"])
def test_a_layer_replaced_as_a_whole_stops_the_run(kind, replaced, monkeypatch) -> None:
    """The probe alone cannot tell: the layer does the same before and after the functions are replaced."""
    torch.manual_seed(0)
    if kind in CONFIGS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | CONFIGS[kind])).eval()
    else:
        model = {"nemotron_h": nemotron_h, "mamba2": mamba2}[kind]()
    layers = state_layers(model)
    last = max(layers)
    for mixer in layers.values() if replaced == "all layers" else [layers[last]]:
        monkeypatch.setattr(mixer, "forward", lambda hidden_states, **kwargs: hidden_states)
    names = ", ".join(map(str, layers)) if replaced == "all layers" else str(last)
    with (
        pytest.raises(RunError, match=rf"state hook did not run exactly once in layers \[{names}\]"),
        attach(model, ["fp32", "nvfp4@16"]),
    ):
        pass


def test_a_layer_of_another_class_is_missed(monkeypatch) -> None:
    model = nemotron_h("M-M*")
    mixer = state_layers(model)[2]
    monkeypatch.setattr(mixer, "__class__", type("KernelMixer", (type(mixer),), {}))
    with (
        pytest.raises(UsageError, match=r"state layers found at \[0\], but the config declares \[0, 2\]"),
        attach(model, ["fp32", "nvfp4@16"]),
    ):
        pass
