"""The testbeds' models: their shapes, their long memory, and a chunked delta rule that trains fast on plain torch.

The recurrence functions of transformers loop in Python over the rows of a chunk (KDA) or keep every step of a loop over
256 chunks for the gradient. `delta_rule` computes the same numbers in a few batched products per layer. Only a product
of 64 x 64 matrices runs chunk after chunk (`scan_states`); torch.compile does not look into it.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5

KINDS = ("mamba2", "gdn", "kda")
PATTERN = {"mamba2": "MM-MM*MM-", "gdn": "MMMM*MM", "kda": "MMMM*MM"}
INITIAL_STEP = 0.02  # Δ at initialisation; a head's half-life is ln2 / (|A|·Δ)
HALF_LIVES = (4.0, 32768.0)  # tokens
CHUNK = 64  # tokens between two states
BLOCK = 16  # tokens that share a reference for the decay of KDA's channels
FLOOR = -5.0  # least log-decay of a token and channel in training
SLACK = 1.0  # what the bounds of exponents leave to rounding
LEAST_BETA = 1 / 512  # at initialisation: erases half of the state in about 23,000 tokens


def build_model(kind, vocab_size, pattern, hidden):
    """About 4.1M parameters at hidden 256 (8 MiB in bf16): six state layers of 64 x 64 heads and one attention layer.

    pattern: M a state layer, * attention; - an MLP of its own for Mamba-2, where the others have one in every layer.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "max_position_embeddings": 131072,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if kind == "mamba2":
        mamba2 = NemotronHConfig(
            **common | {"hybrid_override_pattern": pattern},
            intermediate_size=hidden,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            mamba_num_heads=hidden // 32,
            mamba_head_dim=64,
            ssm_state_size=64,
            n_groups=1,
            chunk_size=64,
            # The many-token path of the HF class clamps Δ from below and the one-token path does not: a low floor keeps
            # the two close.
            time_step_min=1e-5,
            tie_word_embeddings=False,
        )
        return NemotronHForCausalLM(mamba2)
    if not set(pattern) <= set("M*"):
        raise SystemExit(f"--pattern {pattern}: {kind} has layers M and * only, each with its MLP")
    common |= {
        "num_hidden_layers": len(pattern),
        # The norm behind a head must not damp a state that is written with a small β.
        "rms_norm_eps": 1e-8,
        "layer_types": ["full_attention" if layer == "*" else "linear_attention" for layer in pattern],
    }
    if kind == "gdn":
        keys = max(1, 3 * hidden // 256)
        gdn = Qwen3_5TextConfig(
            **common,
            intermediate_size=5 * hidden // 8,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            linear_num_key_heads=keys,
            linear_num_value_heads=2 * keys,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            # Four rotary channels with periods of 6 and 628 tokens: no angle is new beyond the training context.
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 4 / 64},
            tie_word_embeddings=True,
        )
        return Qwen3_5ForCausalLM(gdn)
    kda = KimiLinearConfig(
        **common,
        intermediate_size=5 * hidden // 8,
        mlp_layer_types=["dense"] * len(pattern),
        num_key_value_heads=hidden // 64,
        kv_lora_rank=hidden // 4,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        linear_head_dim=64,
        linear_num_heads=hidden // 64,
    )
    return KimiLinearForCausalLM(kda)


@torch.no_grad()
def set_long_memory(model, generator):
    """Set A and Δ: half-lives are log-uniform in HALF_LIVES. Each head (KDA: each channel) draws from its own share.

    Neighbouring channels make a head: A is that of its middle channel, Δ's bias tells its channels apart.
    """
    low, high = (math.log(h) for h in HALF_LIVES)
    for module in model.modules():
        if hasattr(module, "A_log"):
            heads, channels = module.A_log.numel(), module.dt_bias.numel()
            place = (torch.arange(channels) + torch.rand(channels, generator=generator)) / channels
            half_life = torch.exp(low + (high - low) * place).view(heads, -1)
            middle = half_life[:, half_life.shape[1] // 2, None]
            step = INITIAL_STEP * (middle / half_life).double().flatten()
            module.A_log.copy_(torch.log(math.log(2) / middle / INITIAL_STEP).view_as(module.A_log))
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus⁻¹(Δ)


@torch.no_grad()
def set_rare_writes(model, ids):
    """β of a slow delta-rule head small: it erases along its keys as slowly as it decays. ids: some text `[1, T]`.

    Each write erases a share β of the state along its key, on average β/d_k of the whole. At β = 1/2 nothing outlives a
    few hundred tokens, whatever α is. β has no bias. Therefore one channel of the embeddings is made constant, and β's
    projection reads it; blocks leave it alone at first. Its size behind a layer's norm is measured on the way.
    """
    model.get_input_embeddings().weight[:, 0] = 1.0
    hooks = []

    def set_beta(mixer, args, kwargs):
        gate = getattr(mixer, "forget_gate", mixer)
        step = F.softplus(gate.dt_bias.double()).view(gate.A_log.numel(), -1).log().mean(1).exp()
        decay = gate.A_log.double().exp().flatten() * step
        d_k = mixer.head_k_dim if hasattr(mixer, "head_k_dim") else mixer.head_dim
        beta = (d_k * decay).clamp(LEAST_BETA, 0.5)
        constant = kwargs["hidden_states"][..., 0].double().mean()
        beta_projection(mixer).weight[:, 0] = torch.logit(beta) / constant

    for name, module in model.named_modules():
        if name.endswith((".out_proj", ".o_proj", ".down_proj")):
            module.weight[0] = 0.0
        if beta_projection(module) is not None:
            hooks.append(module.register_forward_pre_hook(set_beta, with_kwargs=True))
    model.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()


def beta_projection(module):
    """The layer that β comes from, of a delta-rule mixer; None of any other module."""
    return getattr(module, "in_proj_b", getattr(module, "b_proj", None))


@torch.no_grad()
def half_lives(model):
    """Half-lives in tokens of the heads at their bias-only Δ, by layer, sorted. KDA: least, median, longest channel."""
    out = {}
    for name, module in model.named_modules():
        if hasattr(module, "A_log"):
            step = F.softplus(module.dt_bias.float()).view(module.A_log.numel(), -1)
            heads = (math.log(2) / (module.A_log.float().exp().view(-1, 1) * step)).sort(dim=1).values
            spread = [[round(row[i], 1) for i in (0, len(row) // 2, -1)] for row in heads.tolist()]
            out[name] = [row if heads.shape[1] > 1 else row[1] for row in sorted(spread, key=lambda row: row[1])]
    return out


def scan_outside_autocast(scan):
    """The HF scan in fp32 (TF32 products): a bf16 product in the state path would train a model used to noisy state."""

    def chunk_scan(hidden_states, dt, A, B, C, *args, **kwargs):
        with torch.autocast("cuda", enabled=False):
            return scan(hidden_states.float(), dt.float(), A, B.float(), C.float(), *args, **kwargs)

    return chunk_scan


def use_training_functions(kind):
    """Patches the functions of this file into the kind's modeling module, for the life of the process."""
    if kind == "mamba2":
        modeling_nemotron_h.mamba2_chunk_scan = scan_outside_autocast(modeling_nemotron_h.mamba2_chunk_scan)
        return
    module: Any
    module, name = {
        "gdn": (modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
        "kda": (modeling_kimi_linear, "chunk_kimi_delta_attention"),
    }[kind]
    setattr(module, name, delta_rule)
    module.causal_conv1d_fn = causal_conv


def causal_conv(hidden_states, weight, bias=None, activation=None, **kwargs):
    """The class's short convolution as shifted products, which compile into one pass, their gradients into another."""
    assert bias is None
    assert activation == "silu"
    taps = weight.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    out = sum(padded[..., i : i + hidden_states.shape[-1]] * weight[:, i, None] for i in range(taps))
    return F.silu(out).to(hidden_states.dtype)


@torch.library.custom_op("testbed::linear_scan", mutates_args=())
def linear_scan(transition: Tensor, update: Tensor, adjoint: bool) -> Tensor:
    """x_i = M_i x_{i-1} + N_i over the first dimension, from x = 0. adjoint: x_i = M_{i+1}ᵀ x_{i+1} + N_i, backwards.

    In true fp32: TF32 would round the state at each of 256 chunks. The products are small; launches take the time.
    An operator of its own, so that torch.compile does not unroll the loop.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        out = torch.empty(update.shape, dtype=update.dtype, device=update.device)
        x, m, n = out.unbind(), (transition.mT if adjoint else transition).unbind(), update.unbind()
        order = range(len(x))[::-1] if adjoint else range(len(x))
        x[order[0]].copy_(n[order[0]])
        for before, i in itertools.pairwise(order):
            torch.baddbmm(n[i], m[max(before, i)], x[before], out=x[i])
    finally:
        torch.set_float32_matmul_precision(precision)
    return out


@linear_scan.register_fake
def _(transition, update, adjoint):
    return torch.empty(update.shape, dtype=update.dtype, device=update.device)


def _keep_for_gradient(ctx, inputs, output):
    transition, _, adjoint = inputs
    assert not adjoint, "no second derivatives"
    ctx.save_for_backward(transition, output)


def _scan_gradient(ctx, gradient):
    transition, states = ctx.saved_tensors
    update = linear_scan(transition, gradient, True)
    return F.pad(update[1:] @ states[:-1].mT, (0, 0, 0, 0, 0, 0, 1, 0)), update, None


linear_scan.register_autograd(_scan_gradient, setup_context=_keep_for_gradient)


class UnitLowerInverse(torch.autograd.Function):
    """(1 + L)⁻¹ of strictly lower triangular L `[..., n, n]`, n a power of two, by doubling the blocks on the diagonal.

    The usual product (1 − L)(1 + L²)(1 + L⁴)… has powers of L that grow like binomials when keys repeat. The blocks of
    the inverse do not. Its gradient is −(Tᵀ G Tᵀ), with no need to go back through the blocks.
    """

    @staticmethod
    def forward(ctx, lower):
        n = lower.shape[-1]
        inverse = lower.new_ones(*lower.shape[:-1], 1, 1)  # of all diagonal blocks [..., blocks, size, size]
        size = 1
        while size < n:
            pairs = (
                lower.unflatten(-2, (-1, 2 * size))
                .unflatten(-1, (-1, 2 * size))
                .diagonal(dim1=-4, dim2=-2)
                .movedim(-1, -3)
            )
            top, bottom = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
            corner = -(bottom @ pairs[..., size:, :size] @ top)
            inverse = torch.cat([F.pad(top, (0, size)), torch.cat([corner, bottom], dim=-1)], dim=-2)
            size *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT)


def _decayed_products(rows, keys, total):
    """Σ_d r_i[d] k_j[d] exp(total_i[d] − total_j[d]) for each r of `rows` and i ≥ j, `[..., CHUNK, CHUNK]`.

    Above the diagonal the values are finite and have no meaning. total: the log-decay summed up to each token,
    `[..., CHUNK, 1]`, or `[..., CHUNK, d_k]` for KDA.
    A decay per head is a factor of the product. A decay per channel is split at the middle of i's block: both factors
    are then at most exp(-8·FLOOR), whatever the gates, and at most 1 for the keys of earlier blocks. The bounds are for
    the part above the diagonal. They leave room for the rounding of `total`, or some gates would lose their gradient.
    """
    if total.shape[-1] == 1:
        decay = (total - total.mT).clamp_max(SLACK).exp()
        return [(r @ keys.mT) * decay for r in rows]
    blocks = total.unflatten(-2, (-1, BLOCK))
    middle = blocks[..., BLOCK // 2 - 1 : BLOCK // 2, :]
    grown = keys.unsqueeze(-3) * (middle - total.unsqueeze(-3)).clamp_max(SLACK - FLOOR * BLOCK / 2).exp()
    shrunk = (blocks - middle).exp()
    return [((r.unflatten(-2, (-1, BLOCK)) * shrunk) @ grown.mT).flatten(-3, -2) for r in rows]


def delta_rule(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs
):  # fmt: skip
    """Stands in for both classes' many-token function in training.

    query, key `[B, T, G, d_k]`, value `[B, T, H, d_v]`, beta `[B, T, H]`,
    g = log α `[B, T, H]` or per channel `[B, T, H, d_k]`
    -> (o `[B, T, H, d_v]` in query's dtype, None).

    All in fp32, like `scan_outside_autocast`. Per channel, log α is held above FLOOR: a token that forgets all but 0.7%
    instead of all, which keeps the exponentials of `_decayed_products` in range.
    """
    assert initial_state is None, "for training only"
    assert not output_final_state, "for training only"
    with torch.autocast(query.device.type, enabled=False):
        length, heads, dtype = value.shape[1], value.shape[2], query.dtype
        query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        g = g.clamp_min(FLOOR) if g.ndim == 4 else g.unsqueeze(-1)

        def chunks(x):  # [B, T, heads, d] -> [chunk, B * H, CHUNK, d]: a step of the scan reads contiguous memory
            x = F.pad(x, (0, 0, 0, 0, 0, -length % CHUNK)).unflatten(1, (-1, CHUNK))
            return x.permute(1, 0, 3, 2, 4).repeat_interleave(heads // x.shape[3], dim=2).flatten(1, 2)

        q, k, v, total, b = (chunks(x) for x in (query, key, value, g, beta.unsqueeze(-1)))
        total = total.cumsum(dim=-2)
        keys, scores = _decayed_products((k, q), k, total)
        solved = UnitLowerInverse.apply((b * keys).tril(-1))
        decay, last = total.exp(), total[:, :, -1:]
        read, written = solved @ (b * k * decay), solved @ (b * v)  # u = written − read · S
        out_keys = (k * (last - total).exp()).mT
        # S' = diag(α) S + keysᵀ u is one linear map of S
        transition = torch.diag_embed(last.exp().expand(-1, -1, -1, k.shape[-1]).squeeze(-2)) - out_keys @ read
        states = linear_scan(transition, out_keys @ written, False)
        state = F.pad(states[:-1], (0, 0, 0, 0, 0, 0, 1, 0))  # before each chunk
        out = (q * decay) @ state + scores.tril() @ (written - read @ state)
        out = out.unflatten(1, (-1, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        return out.to(dtype), None
