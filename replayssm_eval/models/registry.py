"""Models that have a name: hub id, true shape, and what confirms it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelEntry:
    """name: what the user types. location: hub id, or a folder inside the package for a testbed.

    shape: the true config, where it is known, for runs with random weights. confirmed: how it is known.
    """

    name: str
    location: str
    summary: str
    testbed: bool = False
    shape: dict[str, Any] | None = None
    confirmed: str = ""


_NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "num_key_value_heads": 2,
    "num_attention_heads": 32,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "max_position_embeddings": 262144,
}
_NANO_4B = _NEMOTRON | {
    "hidden_size": 3136,
    "intermediate_size": 12544,
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
}
_NANO_30B = _NEMOTRON | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
_SUPER = _NEMOTRON | {
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
}
_QWEN_4B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN_122B = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 3072,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 64,
    "linear_num_key_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_KIMI_48B = {
    "model_type": "kimi_linear",
    "layer_types": ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)],
}
# Those copies lack the widths of MLPs and experts. Only their sum is confirmed.
_BY_SIZE = (
    "layers and heads from third-party copies of config.json; widths of MLPs and experts only by the {} parameters "
    "that they add up to"
)

REGISTRY = {
    entry.name: entry
    for entry in (
        ModelEntry(
            "tiny-mamba2",
            "tiny-mamba2",
            "testbed in the package: 4.1M-parameter NemotronH trained on public-domain books",
            testbed=True,
        ),
        ModelEntry(
            "tiny-gdn",
            "tiny-gdn",
            "testbed in the package: 4.0M-parameter Qwen3.5 text model (Gated DeltaNet) trained on the same books",
            testbed=True,
        ),
        ModelEntry(
            "tiny-kda",
            "tiny-kda",
            "testbed in the package: 4.1M-parameter Kimi-Linear model (KDA) trained on the same books",
            testbed=True,
        ),
        ModelEntry(
            "tiny-answers",
            "tiny-answers",
            "testbed in the package: 1.1M-parameter NemotronH without attention that answers the task "
            "replayssm_progression",
            testbed=True,
        ),
        ModelEntry(
            "nemotron-3-nano-4b",
            "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
            "42 layers, 21 Mamba-2 of 96 heads x 80 x 128",
            shape=_NANO_4B,
            confirmed="third-party copies of config.json; the built model has the published 3,973,556,832 parameters",
        ),
        ModelEntry(
            "nemotron-3-nano-30b",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "52 layers, 23 Mamba-2 of 64 heads x 64 x 128, MoE",
            shape=_NANO_30B,
            confirmed=_BY_SIZE.format("31.6B"),
        ),
        ModelEntry(
            "nemotron-3-super",
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "88 layers, 40 Mamba-2 of 128 heads x 64 x 128, MoE",
            shape=_SUPER,
            confirmed=_BY_SIZE.format("120.7B"),
        ),
        ModelEntry(
            "qwen3.5-4b",
            "Qwen/Qwen3.5-4B",
            "32 layers, 24 GDN of 32 heads x 128 x 128",
            shape=_QWEN_4B,
            confirmed=_BY_SIZE.format("4.2B (text part)"),
        ),
        ModelEntry(
            "qwen3.5-122b",
            "Qwen/Qwen3.5-122B-A10B",
            "48 layers, 36 GDN of 64 heads x 128 x 128, MoE",
            shape=_QWEN_122B,
            confirmed=_BY_SIZE.format("122.1B (text part)"),
        ),
        ModelEntry(
            "qwen3-next-80b",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "48 layers, 36 GDN of 32 heads x 128 x 128, MoE",
            shape={"model_type": "qwen3_next"},
            confirmed="the defaults of its transformers class, which have 79.7B parameters",
        ),
        ModelEntry(
            "kimi-linear-48b",
            "moonshotai/Kimi-Linear-48B-A3B-Instruct",
            "27 layers, 20 KDA of 32 heads x 128 x 128, MoE",
            shape=_KIMI_48B,
            confirmed="the defaults of its transformers class but for 7 MLA layers; they have 49.1B parameters",
        ),
        ModelEntry(
            "glm-5.3-flash",
            "zai-org/GLM-5.3-Flash",
            "45 layers, 34 KDA of 64 heads x 128 x 128, MoE; the part that reads text",
            shape={"model_type": "glm5_next"},
            confirmed="nothing but the defaults of its transformers class",
        ),
    )
}
