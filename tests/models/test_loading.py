"""The registry, and true shapes with random weights."""

from dataclasses import replace

import pytest
import torch
from replayssm_emulation import RunError, UsageError
from transformers import AutoConfig, AutoModelForCausalLM

from replayssm_eval import run_kl
from replayssm_eval.kl.corpus import load_books
from replayssm_eval.models import loading as models
from replayssm_eval.models.families import family_of

TINY = {
    "model_type": "nemotron_h",
    "vocab_size": 2100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "hybrid_override_pattern": "M-M*",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 20,
    "ssm_state_size": 24,
    "n_groups": 2,
}


def test_the_registered_shape_has_the_published_parameters() -> None:
    shape = models.REGISTRY["nemotron-3-nano-4b"].shape
    assert shape is not None
    config = AutoConfig.for_model(**shape)
    family_of(config)
    assert config.layer_types.count("linear_attention") == 21
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 3_973_556_832


TESTBEDS = [name for name, entry in models.REGISTRY.items() if entry.testbed]


@pytest.mark.parametrize("name", TESTBEDS)
@pytest.mark.slow
def test_testbeds_use_what_they_have_read(name, tmp_path) -> None:
    """Testbeds predict a held-out book at least a nat better than from the last token alone; coarse states matter."""
    result = run_kl(model=name, schemes=["nvfp4@16"], tokens=192, output=tmp_path / "out")
    reference, control, coarse = result["rows"]
    loaded = models.load(name, device="cpu")
    ids = torch.tensor(
        loaded.tokenizer(load_books("builtin")[0].text[:4000], add_special_tokens=False)["input_ids"][:193]
    )
    with torch.inference_mode():
        alone = torch.cat([loaded.model(input_ids=i.view(1, 1), use_cache=False).logits[0] for i in ids[:-1]])
    assert torch.nn.functional.cross_entropy(alone.float(), ids[1:]) > reference["nll"][0] + 1
    assert control["kl_max"] == 0
    assert coarse["kl"] > 1e-4


def test_testbeds_are_small() -> None:
    assert {"tiny-mamba2", "tiny-gdn", "tiny-kda", "tiny-answers"} == set(TESTBEDS)
    sizes = {folder.name: sum(f.stat().st_size for f in folder.iterdir()) for folder in models._ASSETS.iterdir()}
    assert max(sizes.values()) <= 8 << 20
    assert sum(sizes.values()) <= 30 << 20


@pytest.fixture
def tiny(monkeypatch):
    entry = models.REGISTRY["nemotron-3-nano-4b"]
    monkeypatch.setitem(models.REGISTRY, "nemotron-3-nano-4b", replace(entry, shape=TINY))


def test_random_weights_are_repeatable_and_leave_the_generator_alone(tiny) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = (models.load("nemotron-3-nano-4b", device="cpu", random_weights=True) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert one.model.dtype == torch.bfloat16
    assert models.weights_digest(one.model) == models.weights_digest(two.model)
    assert not one.model.training


def test_random_weights_where_a_map_says(tiny) -> None:
    """A model that is spread over devices gets the same values as on one device, and no value is left unset."""
    spread = models.load("nemotron-3-nano-4b", device="cpu", device_map="auto", random_weights=True).model
    alone = models.load("nemotron-3-nano-4b", device="cpu", random_weights=True).model
    assert models.weights_digest(spread) == models.weights_digest(alone)
    assert {p.device.type for p in spread.parameters()} == {"cpu"}
    with pytest.raises(UsageError, match="--device-map balanced"):
        models.load("nemotron-3-nano-4b", device="cpu", device_map="balanced", random_weights=True)
    scales = {at: p.float().std().item() for at, p in alone.named_parameters() if at.endswith("proj.weight")}
    assert scales
    assert all(0.001 < scale < 0.1 for scale in scales.values())


def test_a_weight_that_nobody_makes_is_an_error(tiny, monkeypatch) -> None:
    from transformers import NemotronHForCausalLM

    monkeypatch.setattr(NemotronHForCausalLM, "init_weights", lambda self: None)
    with pytest.raises(RunError, match="without a value"):
        models.load("nemotron-3-nano-4b", device="cpu", random_weights=True)


def test_random_weights_are_marked_in_every_output(tiny, tmp_path) -> None:
    options = {
        "model": "nemotron-3-nano-4b",
        "random_weights": True,
        "tokens": 48,
        "schemes": ["nvfp4@16"],
        "device": "cpu",
    }
    result = run_kl(output=tmp_path / "out", **options)
    assert result["model"]["random_weights"] is True
    assert result["control"]["kl_max"] == 0.0
    for name in ("report.md", "report.html"):
        assert "random weights: says nothing about accuracy" in (tmp_path / "out" / name).read_text()
    assert "RANDOM WEIGHTS" in (tmp_path / "out" / "kl.svg").read_text()


def test_random_weights_need_a_registered_shape() -> None:
    for name in ("tiny-mamba2", "some/model"):
        with pytest.raises(UsageError, match="not registered; known: nemotron-3-nano-4b"):
            models.load(name, random_weights=True)


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch) -> None:
    monkeypatch.setattr(models.os, "sysconf", lambda name: 1 << 16)  # 4 GiB
    with pytest.raises(UsageError, match="nemotron-3-super: its weights need 225 GiB in torch.bfloat16, and cpu has 4"):
        models.load("nemotron-3-super", device="cpu", random_weights=True)
