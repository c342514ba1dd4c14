"""Philox4x32-10, the counter-based generator behind stochastic rounding, and the key of a state's noise.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); the known answers are those of Random123.
"""

import torch
from torch import Tensor

from .errors import UsageError

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

# The copies that a scheme can round; a shared copy is the recurrence copy.
RECURRENCE, READ = 0, 1


def philox4x32(c0: Tensor, c1, c2, c3, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words per counter.

    c0..c3: counter words, int64 tensors (or ints, broadcast against c0) holding values in [0, 2³²).
    seed: 64-bit key. Returns four int64 tensors of c0's shape with values in [0, 2³²).
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap modulo 2⁶⁴, so both halves of the unsigned product are intact in the bit pattern.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def state_noise(
    seed: int,
    *,
    document: int | Tensor,
    layer: int,
    heads: int,
    copy: int,
    positions: Tensor,
    d_v: int,
    d_k: int,
    first_head: int = 0,
) -> Tensor:
    """The 32-bit noise word of every state element at every given token position.

    The noise of element (i, j) of a head is word j mod 4 of Philox at key = seed and counter

        (i · ceil(d_k / 4) + j div 4,  position,  layer · 2¹⁷ + head · 2 + copy,  document)

    and depends on nothing else: not on the batch row, chunk, engine or device.

    positions: int64 `[P]`, token positions at which the copy is rounded. copy: RECURRENCE or READ.
    document: a number, or int64 `[P]` for positions in several documents.
    Returns int64 `[P, heads, d_v, d_k]` on the device of `positions`, values in [0, 2³²).
    Raises UsageError when a coordinate does not fit its field.
    """
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"seed {seed} is not in [0, 2^64)")
    least, most = (int(document.min()), int(document.max())) if isinstance(document, Tensor) else (document, document)
    if not (
        0 <= layer < 1 << 15 and first_head >= 0 and first_head + heads <= 1 << 16 and least >= 0 and most < 1 << 32
    ):
        raise UsageError(
            f"noise key out of range: document {least}..{most}, layer {layer}, heads {first_head}..{first_head + heads}"
        )
    device = positions.device
    quads = -(-d_k // 4)
    element = torch.arange(d_v * quads, device=device)
    head = torch.arange(first_head, first_head + heads, device=device)
    c0 = element.expand(len(positions), heads, -1)
    c1 = positions.view(-1, 1, 1)
    c2 = ((layer << 17) | (head << 1) | copy).view(1, -1, 1)
    c3 = document.view(-1, 1, 1) if isinstance(document, Tensor) else document
    words = torch.stack(philox4x32(c0, c1, c2, c3, seed), dim=-1)
    return words.view(len(positions), heads, d_v, quads * 4)[..., :d_k]
