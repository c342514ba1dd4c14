"""Tiny random-weight models of ragged sizes, made once per test session, and inputs of the delta rule."""

from functools import cache

import torch
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

VOCAB = 97


@cache
def nemotron_h(pattern: str = "M-M*", dtype: torch.dtype = torch.float32) -> NemotronHForCausalLM:
    """Head dim 80, state 48, 3 groups: no power of two anywhere."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=VOCAB, hidden_size=64, hybrid_override_pattern=pattern, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, mamba_num_heads=6, mamba_head_dim=80, ssm_state_size=48, n_groups=3,
        chunk_size=32,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    )  # fmt: skip
    return strong_states(NemotronHForCausalLM(config).to(dtype).eval())


@cache
def tiny_nemotron_h() -> NemotronHForCausalLM:
    """Small enough for kernels in the interpreter: state layers 0 and 1, heads of 10 x 12."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=VOCAB, hidden_size=16, hybrid_override_pattern="MM*", intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, mamba_num_heads=2, mamba_head_dim=10, ssm_state_size=12, n_groups=1,
        chunk_size=32,
    )  # fmt: skip
    return strong_states(NemotronHForCausalLM(config).eval())


@cache
def mamba2(layers: int = 3) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=240,
        expand=2,
        num_heads=6,
        head_dim=80,
        state_size=48,
        n_groups=3,
        num_hidden_layers=layers,
        chunk_size=32,
    )
    return strong_states(Mamba2ForCausalLM(config).eval())


@cache
def mamba1() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)).eval()


@torch.no_grad()
def strong_states(model):
    """Random weights leave the states nearly unused. Scaled inputs make the logits depend on the states."""
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.in_proj.weight.mul_(8)
            module.A_log.sub_(2)
    return model


def token_ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, tokens), generator=generator).expand(rows, -1)


def delta_inputs(channels: bool, tokens: int, strong: bool, heads: int, groups: int, d_v: int, d_k: int, seed: int):
    """q, k, v, beta and log-decay of the delta rule, without a row axis. Keys have length 1, as in the models.

    strong: some gates have log-decay -5, the others -0.01.
    """
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, groups, d_k, generator=g), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, d_v, generator=g)
    beta = torch.rand(tokens, heads, generator=g)
    gate = torch.rand(tokens, heads, *([d_k] if channels else []), generator=g)
    return q, k, v, beta, torch.where(gate < 0.3, -5.0, -0.01) if strong else -0.2 * gate
