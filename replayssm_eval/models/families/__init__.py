"""The families of models that hold a recurrent state, by `model_type`. How to add one: docs/adding-a-family.md."""

from typing import Any

from replayssm_emulation import UsageError

from . import delta, lightning, mamba2
from .family import Family, latent_width

__all__ = ["FAMILIES", "Family", "family_of", "state_layers"]

FAMILIES = {
    "mamba2": mamba2.family("mamba2", "Mamba2Mixer", takes_masks=False),
    "nemotron_h": mamba2.family("nemotron_h", "NemotronHMamba2Mixer", needs_attention=True),
    "bamba": mamba2.family("bamba", "BambaMixer"),
    "granitemoehybrid": mamba2.family("granitemoehybrid", "GraniteMoeHybridMambaLayer"),
    "falcon_h1": mamba2.family("falcon_h1", "FalconH1Mixer"),
    "zamba2": mamba2.family("zamba2", "Zamba2MambaMixer"),
    "qwen3_next": delta.gdn_family("qwen3_next", "Qwen3NextGatedDeltaNet"),
    "qwen3_5_text": delta.gdn_family("qwen3_5", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe_text": delta.gdn_family("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
    "olmo_hybrid": delta.gdn_family("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
    "qwen4_exp_text": delta.gdn_family("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", chooses_keys=True),
    "lara_mini": delta.gdn_family("lara_mini", "LaraMiniGatedDeltaNet"),
    "kimi_linear": delta.kda_family("kimi_linear", "KimiLinearDeltaAttention", kv_width=latent_width),
    "bailing_hybrid": delta.kda_family("bailing_hybrid", "BailingHybridDeltaAttention", kv_width=latent_width),
    "glm5_next_text": delta.kda_family(
        "glm5_next", "Glm5NextTextLinearAttention", kv_width=latent_width, chooses_keys=True
    ),
    "minimax": lightning.FAMILY,
}

_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")


def family_of(config: Any) -> Family:
    """The family of a model's text config. Raises UsageError, with the reason, for a model that cannot be emulated."""
    kind = getattr(config, "model_type", None)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in _MAMBA_1:
        raise UsageError(
            f"model type {kind!r} is Mamba-1: its decay differs for every state element, so a window has no matrix "
            "form, and its transformers code resets the state between calls; use a Mamba-2 model"
        )
    raise UsageError(
        f"model type {kind!r} has no recurrent state layers that are known here; known: {', '.join(FAMILIES)}"
    )


def state_layers(model: Any) -> dict[int, Any]:
    """Layer index -> mixer of every layer that holds a recurrent state. Raises UsageError when there is none."""
    return family_of(model.config.get_text_config()).state_layers(model)
