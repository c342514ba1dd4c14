"""What models keep per sequence, against hand counts; registered shapes have as many parameters as their names say."""

import json

import pytest
from replayssm_emulation import UsageError

from replayssm_eval.models.registry import REGISTRY
from replayssm_eval.models.sizes import model_sizes

MIB = 1 << 20


def test_nemotron_3_super_by_hand() -> None:
    """40 layers of 128 x 64 x 128 in fp32; a record is 128 x (64 x 2 + 4) + 8 x 128 x 2 = 18,944 bytes a layer."""
    sizes = model_sizes("nemotron-3-super")
    assert sizes["state_bytes"] == 160 * MIB
    assert sizes["record_bytes_per_token"] == 40 * 18_944
    assert sizes["kv_bytes_per_token"] == 8 * 2 * 2 * 128 * 2
    assert sizes["crossover_tokens"] == 160 * MIB // 8192
    schemes = sizes["schemes"]
    assert schemes["fp32@1"] == {"copies": 160 * MIB, "records": 0}
    assert schemes["fp16@16"] == {"copies": 80 * MIB, "records": 16 * 40 * 18_944}
    # 4 bits, a byte for every 16 elements, 4 bytes a head
    assert schemes["nvfp4@16"]["copies"] == 40 * 128 * (64 * 128 * 9 // 16 + 4)
    assert schemes["nvfp4/fp16@16"]["copies"] == schemes["nvfp4@16"]["copies"] + 80 * MIB


def test_latent_attention_and_channel_decays_by_hand() -> None:
    sizes = model_sizes("kimi-linear-48b")
    assert (sizes["state_layers"], sizes["heads"], sizes["d_v"], sizes["d_k"]) == (20, 32, 128, 128)
    assert sizes["kv_bytes_per_token"] == 7 * (512 + 64) * 2
    assert sizes["record_bytes_per_token"] == 20 * 32 * (2 * 256 + 4 * 129)


@pytest.mark.parametrize(
    ("name", "billions", "state_layers"),
    [
        ("nemotron-3-nano-30b", 31.6, 23),
        ("qwen3.5-4b", 4.2, 24),
        ("qwen3.5-122b", 122.1, 36),
        ("qwen3-next-80b", 79.7, 36),
        ("kimi-linear-48b", 49.1, 20),
        ("glm-5.3-flash", 313.8, 34),
    ],
)
def test_registered_shapes(name, billions, state_layers) -> None:
    sizes = model_sizes(name)
    assert round(sizes["parameters"] / 1e9, 1) == billions
    assert sizes["state_layers"] == state_layers
    assert REGISTRY[name].confirmed


def test_the_command(main) -> None:
    code, out, _ = main("models", "show", "tiny-mamba2", "--json")
    assert code == 0
    assert json.loads(out)["state_bytes"] == 6 * 8 * 64 * 64 * 4
    code, out, _ = main("models", "show", "nemotron-3-nano-4b")
    assert code == 0
    assert "96 heads x 80 x 128" in out
    code, _, err = main("models", "show", "nobody/nothing")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    with pytest.raises(UsageError, match="no config"):
        model_sizes("nobody/nothing")
