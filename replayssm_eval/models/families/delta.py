"""Delta-rule layers: β and log α as the model makes them, unit keys; GDN decays per head, KDA per channel of d_k."""

from functools import partial
from typing import Any

import torch
from replayssm_emulation import Rule
from torch import Tensor

from .family import Family


def gdn_family(kind: str, mixer: str, **differences: Any) -> Family:
    """The Gated DeltaNet family of the transformers package `kind`; differences: further fields of `Family`."""

    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_v_heads, m.num_k_heads, m.head_v_dim, m.head_k_dim

    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    modeling = f"transformers.models.{kind}.modeling_{kind}"
    return Family(modeling, mixer, partial(patches, names=names), shape, Rule.DELTA, **differences)


def kda_family(kind: str, mixer: str, **differences: Any) -> Family:
    """The Kimi Delta Attention family of the transformers package `kind`; differences: further fields of `Family`."""

    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_heads, m.num_heads, m.head_dim, m.head_dim

    names = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    modeling = f"transformers.models.{kind}.modeling_{kind}"
    return Family(modeling, mixer, partial(patches, names=names), shape, Rule.DELTA_PER_CHANNEL, **differences)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def patches(session, names: tuple[str, str]):
    """Replacements for the recurrence functions `names` of a modeling file, for many tokens and for one token."""
    return dict.fromkeys(names, partial(_rule, session))


def _rule(
    session, query, key, value, g=None, beta=None, chunk_size=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):  # fmt: skip
    """query, key `[R, T, G, d_k]`, value `[R, T, H, d_v]`, beta `[R, T, H]`, g = log α `[R, T, H]` or `[R, T, H, d_k]`.

    Returns (o `[R, T, H, d_v]` in the dtype of query, the cache's new content). Gates keep the dtype of the model.
    """
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    o, state = session.scan(q * q.shape[-1] ** -0.5, k, value, beta, g, initial_state)
    return o.to(query.dtype), state if output_final_state else None
