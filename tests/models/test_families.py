"""Every family on a tiny random model: the unpatched model's numbers, in one pass, in pieces and token by token."""

import pytest
import torch
import transformers
from replayssm_emulation import parse_scheme
from replayssm_kernels import BatchRow
from transformers import LogitsProcessorList

from replayssm_eval import attach
from replayssm_eval.inference import decoding
from replayssm_eval.inference.decoding import decode
from replayssm_eval.inference.forward import hidden_states, layer_devices, new_cache
from replayssm_eval.inference.step_graphs import StepGraphs
from replayssm_eval.kl.checkpoint import Checkpoint
from replayssm_eval.models.families import FAMILIES
from replayssm_eval.models.loading import auto_class
from tests.helpers.models import VOCAB, token_ids

HEADS, D_V, D_K = 6, 20, 12  # no power of two
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MAMBA = {"mamba_n_heads": HEADS, "mamba_d_head": D_V, "mamba_d_state": D_K, "mamba_n_groups": 3, "mamba_chunk_size": 32}
CONFIGS = {
    "mamba2": {
        "num_hidden_layers": 2, "expand": 2, "num_heads": HEADS, "head_dim": D_V, "state_size": D_K, "n_groups": 3,
        "chunk_size": 32,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*M-", "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": HEADS,
        "mamba_head_dim": D_V,
        "ssm_state_size": D_K, "n_groups": 3, "chunk_size": 32,
    },
    "bamba": {**MAMBA, "num_hidden_layers": 3, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_expand": 2},
    "granitemoehybrid": {
        **MAMBA, "num_hidden_layers": 3, "num_key_value_heads": 2, "layer_types": ["mamba", "attention", "mamba"],
        "mamba_expand": 2,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        **MAMBA, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": HEADS * D_V,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": D_K, "mamba_ngroups": 3,
        "n_mamba_heads": HEADS, "mamba_expand": 2, "chunk_size": 32,
    },
}  # fmt: skip
LAYERS = {"mamba2": [0, 1], "falcon_h1": [0, 1], "zamba2": [0, 1, 2]}  # others: 0 and 2
GDN = {
    "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": HEADS, "linear_num_key_heads": 3, "linear_value_head_dim": D_V,
    "linear_key_head_dim": D_K,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MLA = {
    "num_hidden_layers": 3, "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "mlp_layer_types": ["dense"] * 3,
}  # fmt: skip
CONFIGS |= {
    "qwen3_next": {**GDN, **MOE},
    "qwen3_5_text": GDN,
    "qwen3_5_moe_text": {**GDN, **MOE},
    "olmo_hybrid": {**GDN, "linear_num_key_heads": HEADS, "num_key_value_heads": 4},
    "qwen4_exp_text": {
        **GDN, **MOE, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 128,
        "indexer_compress_ratio": 16,
        "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 16, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1, "output_gate_type": "silu", "eos_token_id": 0,
    },
    "lara_mini": {**GDN, **MOE},
    "kimi_linear": {**MLA, "linear_head_dim": D_K, "linear_num_heads": HEADS},
    "bailing_hybrid": {**MLA, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": D_K},
    "glm5_next_text": {
        **MLA, "linear_head_dim": D_K, "linear_num_heads": HEADS, "qk_rope_head_dim": 0, "q_lora_rank": 16,
        "index_head_dim": 16, "index_n_heads": 2,
    },
}  # fmt: skip
CONFIGS |= {
    "minimax": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": 3, "head_dim": D_K, "block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
SHAPES = dict.fromkeys(("kimi_linear", "bailing_hybrid", "glm5_next_text", "minimax"), (HEADS, D_K, D_K))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """A model that uses its states: what bypasses the state is weak, its outputs are strong, its memory is long.

    Plain random weights would hardly use the state.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind = request.param
    config = transformers.AutoConfig.for_model(kind, **COMMON | CONFIGS[kind])
    if kind == "glm5_next_text":  # has a language head as part of a model of images and text only
        vision = {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": COMMON["hidden_size"],
        }
        config = transformers.AutoConfig.for_model("glm5_next", text_config=config.to_dict(), vision_config=vision)
    model = auto_class(config).from_config(config).eval()
    for module in model.modules():
        if type(module).__name__ != FAMILIES[kind].mixer:
            continue
        (module.out_proj if hasattr(module, "out_proj") else module.o_proj).weight.data.mul_(8)
        for name, weight in module.named_parameters():
            if name.endswith("A_log"):
                weight.data.sub_(2)
        if kind == "minimax":
            module.qkv_proj.weight.data.mul_(8)
        elif not FAMILIES[kind].rule.delta:
            module.in_proj.weight.data.mul_(8)
            module.D.data.mul_(0.01)
            module.dt_bias.data[::2] = -9.0  # Δ below what the many-token functions of some families clamp it to
    return model


def read(model, ids, pieces):
    cache, position, parts = new_cache(model), 0, []
    for length in pieces:
        parts.append(hidden_states(model, ids[:, position : position + length], cache, position))
        position += length
    return torch.cat(parts, dim=1)


def close(a, b) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


@torch.no_grad()
def test_fp32_is_the_unpatched_model(model) -> None:
    ids = token_ids(64)
    expected = model(input_ids=ids, use_cache=False).logits
    with attach(model, ["fp32"], follow_hf_clamp=True):
        assert close(model(input_ids=ids, use_cache=False).logits, expected)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(32, 32), (13, 1, 20, 30), (1,) * 64], ids=lambda p: f"{len(p)}-pieces")
def test_pieces_equal_one_pass(model, pieces) -> None:
    """Also of a row that is rounded: where it is does not depend on the pieces."""
    ids = token_ids(64, rows=2)
    with attach(model, ["fp32", "fp8@16"], probe=False) as session:
        whole = read(model, ids, (64,))
        flushes = session.flushes
        assert close(read(model, ids, pieces)[0], whole[0])
        assert session.flushes == flushes == {layer: [4, 4] for layer in session.layers}


@torch.no_grad()
def test_the_state_is_what_the_config_says(model) -> None:
    kind = model.config.get_text_config().model_type
    with attach(model, ["fp32", "nvfp4@16"], probe=False) as session:
        out = read(model, token_ids(40, rows=2), (40,))
        manifest = session.manifest()
    assert [entry["layer"] for entry in manifest] == LAYERS.get(kind, [0, 2])
    assert {(e["heads"], e["d_v"], e["d_k"]) for e in manifest} == {SHAPES.get(kind, (HEADS, D_V, D_K))}
    assert (out[1, 17:] - out[0, 17:]).abs().max() > 1e-4 * out[0].abs().max(), "rounding the state changes nothing"
    assert torch.equal(out[1, :15], out[0, :15]), "nothing is rounded before the first flush"


@torch.no_grad()
@pytest.mark.slow
def test_generation(model) -> None:
    """Greedy, two sequences: the tokens of whole passes, and of the unpatched model where it clamps no Δ."""
    prompts = torch.cat([token_ids(9, seed=n) for n in range(2)])
    options = {"max_new_tokens": 12, "do_sample": False}
    unpatched = model.generate(prompts, **options)
    with attach(model, ["fp32"] * 2, probe=False) as session:
        session.start(session.rows)
        got = model.generate(prompts, custom_generate=decode, **options)
        expected = prompts
        for _ in range(12):
            logits = model.get_output_embeddings()(read(model, expected, (expected.shape[1],))[:, -1])
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(got, expected)
    if model.config.get_text_config().model_type not in ("nemotron_h", "zamba2"):
        assert torch.equal(got, unpatched)


@torch.no_grad()
def test_a_saved_state_is_gone_on_from(model, tmp_path) -> None:
    """Caches that hold more than can be put back are not saved: a resumed run then reads their text anew."""
    ids = token_ids(64, rows=2)
    checkpoint = Checkpoint(tmp_path, "run", tokens=64)
    with attach(model, ["fp32", "nvfp4/fp16@16"], probe=False) as session:
        cache = new_cache(model, 64)
        hidden_states(model, ids[:, :41], cache, 0)
        checkpoint.save_state(0, 41, session, cache)
        expected = hidden_states(model, ids[:, 41:], cache, 41)
        saved = bool(list(tmp_path.iterdir()))
        assert saved == (
            model.config.get_text_config().model_type not in ("glm5_next_text", "qwen4_exp_text", "minimax")
        )
        if saved:
            session.start(session.rows)
            cache = new_cache(model, 64)
            checkpoint.load_state(session, cache, layer_devices(model))
            assert torch.equal(hidden_states(model, ids[:, 41:], cache, 41), expected)


# Caches of their own kind, or layers that hold attention and a state.
NOT_REPLAYED = ("falcon_h1", "zamba2", "qwen4_exp_text", "glm5_next_text", "minimax")


@torch.inference_mode()
@pytest.mark.slow
def test_replayed_steps_are_the_steps(model, monkeypatch) -> None:
    """Decoding as with CUDA graphs, on the torch scan, where nothing is captured: left-padded rows, growing caches."""
    begin, call, taken = StepGraphs.begin.__func__, StepGraphs.__call__, []

    def begin_on_torch(cls, model, session, *args):
        with monkeypatch.context() as patch:
            patch.setattr(session, "backend", "triton")
            return begin(cls, model, session, *args)

    monkeypatch.setattr(StepGraphs, "begin", classmethod(begin_on_torch))
    monkeypatch.setattr(StepGraphs, "__call__", lambda steps, tokens: (taken.append(1), call(steps, tokens))[1])
    monkeypatch.setattr(decoding, "_LOOK_EVERY", 2)
    monkeypatch.setattr(decoding, "_ROOM", 4)
    scheme, padding, scores = parse_scheme("fp32@2"), (2, 0), ([], [])
    ids = torch.cat([token_ids(9, seed=seed) for seed in range(2)])
    mask = torch.tensor([[0] * n + [1] * (9 - n) for n in padding])
    answers = []
    with attach(model, [scheme] * 2, backend="torch", probe=False) as session:
        for more, seen in (({}, scores[0]), ({"session": session}, scores[1])):
            session.start([BatchRow(scheme, document=d, prompt=9, padding=n) for d, n in enumerate(padding)])
            keep = LogitsProcessorList([lambda ids, x, seen=seen: (seen.append(x.clone()), x)[1]])
            options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "logits_processor": keep, **more}
            answers.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=12, custom_generate=decode, **options)
            )
    kind = model.config.get_text_config().model_type
    assert bool(taken) == (kind not in NOT_REPLAYED), kind
    assert torch.equal(*answers)
    for one, other in zip(scores[0], scores[1][:12], strict=True):  # replayed, a step or two are taken past the end
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * one.abs().max())
