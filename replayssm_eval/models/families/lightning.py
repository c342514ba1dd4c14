"""Lightning attention (MiniMax): v, k and q as they are, β = 1, a fixed decay for every head."""

import torch
import torch.nn.functional as F

from .family import Family


def patches(session):
    """Replaces the whole forward of the mixer.

    transformers has no separate function for this recurrence, and it keeps the state in the model's dtype.
    """

    def forward(mixer, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        """`[R, T, hidden]` -> (output of the same shape, the cache's new content)."""
        shape = (*hidden_states.shape[:2], mixer.num_attention_heads, 3 * mixer.head_dim)
        qkv = mixer.act_fn(mixer.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = qkv * attention_mask[:, :, None].to(qkv.dtype)
        q, k, v = qkv.view(shape).split(mixer.head_dim, dim=-1)
        log_decay = -mixer.slope_rate.float().view(1, 1, -1).expand(shape[:3])
        state = None if cache is None else cache.get_linear_cache(mixer.layer_idx)
        o, state = session.scan(q, k, v, torch.ones_like(log_decay), log_decay, state)
        o = mixer.norm(o.to(hidden_states.dtype).flatten(2))
        if cache is not None:
            cache.set_linear_cache(mixer.layer_idx, state)
        return mixer.out_proj(F.sigmoid(mixer.output_gate(hidden_states)) * o), state

    return {"MiniMaxLightningAttention.forward": forward}


def _shape(m):
    return m.num_attention_heads, m.num_attention_heads, m.head_dim, m.head_dim


def _cache():
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


FAMILY = Family(
    "transformers.models.minimax.modeling_minimax", "MiniMaxLightningAttention", patches, _shape, cache=_cache
)
