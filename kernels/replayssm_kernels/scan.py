"""The entry of the replay scan: it checks the inputs, rounds the records and calls one of the two backends."""

from collections.abc import Sequence

import torch
from replayssm_emulation import Rule, UsageError, quantize_with_noise
from replayssm_emulation.formats import get_format
from torch import Tensor

from .dispatch import check_rows
from .state import BatchRow, Carry, zero_carry
from .torch_backend import groups as torch_groups

_NARROW = ("bf16", "fp16")  # records that are rounded


def replay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    rows: Sequence[BatchRow],
    carry: Carry | None,
    *,
    layer: int,
    rule: Rule = Rule.PLAIN,
    backend: str = "torch",
) -> tuple[Tensor, Carry]:
    """Outputs of the next T tokens, and the carry after them.

    q, k: `[R, T, G, d_k]`, each group shared by H / G heads; v: `[R, T, H, d_v]`; beta: `[R, T, H]` write strength;
    log_decay: `[R, T, H]` log α, or with the delta rule `[R, T, H, d_k]` for a decay per channel; R = len(rows).
    carry: None before the first token (zero state). layer: part of the noise key. rule: plain recurrence or delta rule.
    Inputs of any float dtype are computed in fp32. Returns o fp32 `[R, T, H, d_v]`.
    backend: "torch", or "triton" (see `choose_backend`): the same rounding of the same folds.
    Cutting the tokens into other chunks, or the rows into another order, changes no rounding.
    """
    count, tokens, heads, d_v = v.shape
    d_k = k.shape[-1]
    if count != len(rows) or heads % k.shape[2]:
        raise UsageError(f"{count} batch rows for {len(rows)} schemes, {heads} heads for {k.shape[2]} groups")
    if not (0 <= layer < 1 << 15 and heads <= 1 << 16):
        raise UsageError(f"noise key out of range: layer {layer} (of 2^15), {heads} heads (of 2^16)")
    beta, log_decay = beta.float(), log_decay.float()
    if backend == "torch" or not v.is_cuda or any(row.scheme.records in _NARROW for row in rows):
        q, k, v = q.float(), k.float(), v.float()  # the Triton kernel converts as it loads
    k, v = (_round_records(x, rows, 0 if carry is None else carry.position) for x in (k, v))
    if carry is None:
        carry = zero_carry(rows, k, v, beta, log_decay)
    start, stop = carry.position, carry.position + tokens
    o = torch.full(v.shape, torch.nan, device=v.device)  # poison: every element must be written
    if backend == "triton":
        from .triton_backend.launch import scan_groups

        check_rows(rows, d_v, d_k)
        scan_groups(q, k, v, beta, log_decay, o, carry.groups, rows, start, layer, rule)
    else:
        for group in carry.groups:
            inputs = tuple(x[group.rows] for x in (k, v, beta, log_decay))
            members = [rows[r] for r in group.rows]
            o[group.rows] = torch_groups.scan_group(q[group.rows], inputs, group, members, start, stop, layer, rule)
    carry.position = stop
    return o, carry


def _round_records(x: Tensor, rows: Sequence[BatchRow], position: int) -> Tensor:
    """v or k `[R, T, ...]`. Rows with narrower records are rounded to their format, from the end of their prompt on."""
    rounded = {i: row for i, row in enumerate(rows) if row.scheme.records in _NARROW}
    if rounded:
        x = x.clone()
    for index, row in rounded.items():
        decoded = max(0, row.prompt - position)
        x[index, decoded:] = quantize_with_noise(x[index, decoded:], get_format(row.scheme.records), None)
    return x
