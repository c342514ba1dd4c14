"""Delta-rule layers: β and log α as the model makes them, unit keys; GDN decays per head, KDA per channel of d_k."""

from functools import partial

import torch
from torch import Tensor


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def patches(session, names: tuple[str, str]):
    """Replacements for the recurrence functions `names`, of many tokens and of one, of a transformers modeling file."""
    return dict.fromkeys(names, partial(_rule, session))


def _rule(
    session, query, key, value, g=None, beta=None, chunk_size=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):  # fmt: skip
    """query, key `[R, T, G, d_k]`, value `[R, T, H, d_v]`, beta `[R, T, H]`, g = log α `[R, T, H]` or `[R, T, H, d_k]`
    -> (o in query's dtype `[R, T, H, d_v]`, what the cache holds). The gates stay in fp32 if the model computes them so."""
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    o, state = session.scan(q * q.shape[-1] ** -0.5, k, value, beta, g, initial_state)
    return o.to(query.dtype), state if output_final_state else None
