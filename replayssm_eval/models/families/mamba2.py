"""Mamba-2 layers: v = x, β = Δ, α = exp(A·Δ), k = B, q = C; the skip D·x stays outside the state."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .family import Family


def family(kind: str, mixer: str, **differences: Any) -> Family:
    """The Mamba-2 family of the transformers package `kind`; differences: further fields of `Family`."""

    def shape(m: Any) -> tuple[int, int, int, int]:
        return m.num_heads, m.n_groups, m.head_dim, m.ssm_state_size

    return Family(f"transformers.models.{kind}.modeling_{kind}", mixer, patches, shape, **differences)


def patches(session):
    """Replacements for the two recurrence functions of a transformers Mamba-2 modeling file.

    Δ is computed in fp32 for every dtype of the model. In transformers the many-token function clamps Δ from below, and
    the one-token function does not. This package emulates decoding, so neither clamps unless `session.follow_hf_clamp`.
    """

    def step_size(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = F.softplus(dt) if dt_softplus else dt
        return dt.clamp(*session.mixer.time_step_limit) if session.follow_hf_clamp else dt

    def mamba2_chunk_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size=None,
        D=None,
        dt_bias=None,
        initial_states=None,
        dt_softplus=False,
        return_final_states=False,
        **kwargs,
    ):
        """x `[R, T, H, d_v]`, dt `[R, T, H]`, A `[H]`, B and C `[R, T, G, d_k]` -> y fp32 `[R, T, H, d_v]`."""
        step = step_size(dt, dt_bias, dt_softplus)
        y, state = session.scan(C, B, hidden_states, step, step * A.float(), initial_states)
        if D is not None:
            y.addcmul_(D.float()[..., None], hidden_states)  # in place: y is the largest tensor of a pass
        return (y, state) if return_final_states else y

    def mamba2_selective_state_update(
        state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs
    ):
        """One token: x and dt `[R, H, d_v]`, A `[H, d_v, d_k]`, B and C `[R, G, d_k]` -> y `[R, H, d_v]`."""
        step = step_size(dt[:, None, :, 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        y, new_state = session.scan(
            C[:, None], B[:, None], hidden_states[:, None], step, step * A[:, 0, 0].float(), state
        )
        state.copy_(new_state)
        y = y[:, 0]
        if D is not None:
            y = y + D.float() * hidden_states.float()
        return y if z is None else y * F.silu(z.float())

    return {"mamba2_chunk_scan": mamba2_chunk_scan, "mamba2_selective_state_update": mamba2_selective_state_update}
