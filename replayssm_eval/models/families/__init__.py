"""Which models hold a recurrent state, and where their modeling code computes it: one module per kind of recurrence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from replayssm_emulation import Rule, UsageError

from . import delta, lightning, mamba2


@dataclass(frozen=True)
class Family:
    """modeling: the transformers module whose functions are replaced; mixer: the class name of its state layers.

    patches(session): the replacements by function name, or Class.method. shape(mixer): (heads, groups of keys, d_v, d_k).
    rule: how its layers update a state.
    cache(): an empty cache, of models that do not take a DynamicCache.
    """

    modeling: str
    mixer: str
    patches: Callable[[Any], dict[str, Callable]]
    shape: Callable[[Any], tuple[int, int, int, int]]
    rule: Rule = Rule.PLAIN
    cache: Callable[[], Any] | None = None


def _mamba2(kind: str, mixer: str) -> Family:
    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_heads, m.n_groups, m.head_dim, m.ssm_state_size

    return Family(f"transformers.models.{kind}.modeling_{kind}", mixer, mamba2.patches, shape)


def _gdn(kind: str, mixer: str) -> Family:
    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_v_heads, m.num_k_heads, m.head_v_dim, m.head_k_dim

    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    return Family(
        f"transformers.models.{kind}.modeling_{kind}", mixer, partial(delta.patches, names=names), shape, Rule.DELTA
    )


def _kda(kind: str, mixer: str) -> Family:
    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_heads, m.num_heads, m.head_dim, m.head_dim

    names = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    return Family(
        f"transformers.models.{kind}.modeling_{kind}",
        mixer,
        partial(delta.patches, names=names),
        shape,
        Rule.DELTA_PER_CHANNEL,
    )


def _lightning_shape(m: Any) -> tuple[int, int, int, int]:
    return m.num_attention_heads, m.num_attention_heads, m.head_dim, m.head_dim


#: By `model_type`. docs/adding-a-family.md says how to add one.
FAMILIES = {
    "mamba2": _mamba2("mamba2", "Mamba2Mixer"),
    "nemotron_h": _mamba2("nemotron_h", "NemotronHMamba2Mixer"),
    "bamba": _mamba2("bamba", "BambaMixer"),
    "granitemoehybrid": _mamba2("granitemoehybrid", "GraniteMoeHybridMambaLayer"),
    "falcon_h1": _mamba2("falcon_h1", "FalconH1Mixer"),
    "zamba2": _mamba2("zamba2", "Zamba2MambaMixer"),
    "qwen3_next": _gdn("qwen3_next", "Qwen3NextGatedDeltaNet"),
    "qwen3_5_text": _gdn("qwen3_5", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe_text": _gdn("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
    "olmo_hybrid": _gdn("olmo_hybrid", "OlmoHybridGatedDeltaNet"),
    "qwen4_exp_text": _gdn("qwen4_exp", "Qwen4ExpTextGatedDeltaNet"),
    "lara_mini": _gdn("lara_mini", "LaraMiniGatedDeltaNet"),
    "kimi_linear": _kda("kimi_linear", "KimiLinearDeltaAttention"),
    "bailing_hybrid": _kda("bailing_hybrid", "BailingHybridDeltaAttention"),
    "glm5_next_text": _kda("glm5_next", "Glm5NextTextLinearAttention"),
    "minimax": Family(
        "transformers.models.minimax.modeling_minimax",
        "MiniMaxLightningAttention",
        lightning.patches,
        _lightning_shape,
        cache=lightning.cache,
    ),
}

_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")


def family_of(config: Any) -> Family:
    """The family of a model's config. Raises UsageError, with the reason, for a model that cannot be emulated."""
    kind = getattr(config, "model_type", None)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in _MAMBA_1:
        raise UsageError(
            f"model type {kind!r} is Mamba-1: its decay differs for every state element, so a window has no matrix form, and "
            "its transformers code resets the state between calls; use a Mamba-2 model"
        )
    raise UsageError(
        f"model type {kind!r} has no recurrent state layers that are known here; known: {', '.join(FAMILIES)}"
    )
