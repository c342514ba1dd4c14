"""Every row's next-token distribution against row 0's. One Triton kernel, a program per row and token.

With d = row's logit - row 0's - c, p row 0's softmax, any constant c (a shift of all logits changes no distribution):

    D = Σ p·d,   G = Σ p·(exp(d) - 1 - d),   L = log Σ p·exp(d) = log1p(G + D),   KL = L - D

Every term of G is at least 0 and comes from its series where d is small. So the error is relative to KL, near fp32's
however small KL is, and KL is 0 where the rows differ by a constant. c is d of row 0's likeliest token, whose own terms
then vanish. The rest has the size of KL even when that token has nearly all the mass. Where G + |D| > 1, L is the
difference of the rows' own normalisers, with an absolute error.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits per step of a program, and its warps. With 4 logits per thread (78 registers on Hopper) a processor holds three
# programs.
CHUNK, WARPS = 1024, 8
_HUGE = tl.constexpr(1e30)  # differences from here on only say that a token is suppressed; V of them can be summed


@triton.jit
def _excess(w, e, d):
    """w·(exp(d) - 1 - d), given e = w·exp(d). The series ends with d¹¹/11!: below 6e-9 of the sum where |d| < 1."""
    s = 1 / 3628800 + d * (1 / 39916800)
    s = 1 / 40320 + d * (1 / 362880 + d * s)
    s = 1 / 720 + d * (1 / 5040 + d * s)
    s = 1 / 24 + d * (1 / 120 + d * s)
    s = 1 / 2 + d * (1 / 6 + d * s)
    return tl.where(tl.abs(d) < 1.0, w * (d * d * s), e - w - w * d)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _compare_kernel(logits_ptr, target_ptr, sum_ptr, top1_ptr, rows, tokens, vocab, CHUNK: tl.constexpr):
    """logits `[R, T, V]`, target int64 `[T]`; sums fp32 `[10, R, T]` in the order stored below, top1 int32 `[R, T]`.

    Sums are relative to the maximum so far, per lane, and rescaled when it grows. A maximum on the device may ignore
    NaN; a logit that is NaN or +inf counts as -inf in every maximum, and as NaN in the sum of its row's weights.
    """
    # Rows of one token run side by side: row 0's logits come from the cache.
    row = (tl.program_id(0) % rows).to(tl.int64)
    token = (tl.program_id(0) // rows).to(tl.int64)
    here = row * tokens + token
    mine_ptr = logits_ptr + here * vocab
    reference_ptr = logits_ptr + token * vocab

    lane = tl.arange(0, CHUNK)
    zeros = tl.zeros((CHUNK,), tl.float32)
    weight, moved, excess = zeros, zeros, zeros  # row 0's Σ exp(z - top), Σ exp(z - top)·d, the same of G
    own, own_z = zeros, zeros  # this row's Σ exp(z - top), Σ exp(z - top)·(z - top)
    barred = zeros + float("-inf")  # row 0's largest logit among the tokens that this row excludes
    zero = tl.sum(zeros, axis=0)  # numbers that the loop can replace
    top, top_0, top1 = zero + float("-inf"), zero + float("-inf"), tl.program_id(0) * 0
    # This row's logit of row 0's likeliest token so far, relative to row 0's and absolute. Before that, whatever this
    # row does not exclude overflows `excess`, which then is not used.
    c, pivot = zero, zero - _HUGE

    for start in range(0, vocab, CHUNK):
        i = start + lane
        z_0 = tl.load(reference_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        z = tl.load(mine_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        defined_0, defined = z_0 < float("inf"), z < float("inf")
        z_0 = tl.where(defined_0, z_0, float("-inf"))
        z = tl.where(defined, z, float("-inf"))

        high = tl.max(z_0, axis=0)
        if high > top_0:
            there = tl.load(mine_ptr + tl.min(tl.where(z_0 == high, i, vocab), axis=0)).to(tl.float32)
            usable = (
                tl.abs(there - high) < 1000.0
            )  # not where one row suppresses the token: c would swallow what differs
            new_c = tl.where(usable, there - high, 0.0)
            new_pivot = tl.where(usable, there, high)
            # exp(d + a) - 1 - (d + a) = exp(a)·(exp(d) - 1 - d) + (exp(a) - 1)·d + (exp(a) - 1 - a), all rescaled
            begun = top_0 > float("-inf")
            a = tl.where(begun, c - new_c, 0.0)
            scale = tl.exp(tl.where(begun, top_0 - high, 0.0))
            grow = tl.exp(pivot - new_pivot)
            bend = _excess(scale, grow, a)
            # Tokens that this row suppresses lose their rest in a large sum when exp(a) is large, too. It is not used
            # then.
            excess = tl.where(excess > tl.where(a > 4.0, 64.0, float("inf")), float("inf"), excess)
            excess = tl.where(excess == 0.0, 0.0, grow * excess) + (bend + scale * a) * moved + bend * weight
            moved = scale * (moved + a * weight)
            weight = scale * weight
            top_0, c, pivot = high, new_c, new_pivot
        w = tl.exp(z_0 - tl.where(top_0 > float("-inf"), top_0, 0.0))
        difference = z - z_0
        # Also ±inf, and NaN where both rows exclude the token: `barred`, or w = 0, decides about those.
        d = tl.where(difference < _HUGE, tl.maximum(difference - c, -_HUGE), _HUGE)
        weight += tl.where(defined_0, w, float("nan"))
        moved += w * d
        excess += _excess(w, tl.exp(z - pivot), d)
        barred = tl.maximum(barred, tl.where(z > float("-inf"), float("-inf"), z_0))

        high = tl.max(z, axis=0)
        if high > top:
            a = tl.where(top > float("-inf"), top - high, 0.0)
            scale = tl.exp(a)
            own_z = scale * (own_z + a * own)
            own = scale * own
            top = high
            top1 = tl.min(tl.where(z == high, i, vocab), axis=0)
        z -= tl.where(top > float("-inf"), top, 0.0)
        w = tl.exp(z)
        own += tl.where(defined, w, float("nan"))
        own_z += tl.where(w > 0.0, w * z, 0.0)

    target = tl.load(target_ptr + token)
    known = (target >= 0) & (target < vocab)
    stride = (rows * tokens).to(tl.int64)
    sum_ptr += here
    tl.store(sum_ptr, tl.sum(weight, axis=0))
    tl.store(sum_ptr + stride, tl.sum(moved, axis=0))
    tl.store(sum_ptr + 2 * stride, tl.sum(excess, axis=0))
    tl.store(sum_ptr + 3 * stride, tl.max(barred, axis=0))
    tl.store(sum_ptr + 4 * stride, top_0)
    tl.store(sum_ptr + 5 * stride, pivot)
    tl.store(sum_ptr + 6 * stride, tl.sum(own, axis=0))
    tl.store(sum_ptr + 7 * stride, tl.sum(own_z, axis=0))
    tl.store(sum_ptr + 8 * stride, top)
    tl.store(sum_ptr + 9 * stride, tl.load(mine_ptr + target, mask=known, other=float("nan")).to(tl.float32))
    tl.store(top1_ptr + here, top1)


def compare_logits_triton(
    logits: Tensor, targets: Tensor, *, chunk: int = CHUNK, num_warps: int = WARPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(kl, top1, nll, entropy) `[R, T]` on the device, without waiting for it: fp32, top1 int32.

    logits: `[R, T, V]` contiguous, any float dtype, compared in fp32. targets: int64 `[T]`, -1 for no next token.
    `replayssm_eval.inference.metrics.compare_logits` has the special cases: a KL of NaN says "undefined". top1 is the
    lowest index among the likeliest. fp32's range shows only in D: probabilities of row 0 below 1e-38 of its largest
    count as 0 there, differences beyond 1e30 as 1e30. A tiny KL may come out below 0 by its error, as in float64.
    """
    rows, tokens, vocab = logits.shape
    assert logits.is_contiguous()
    sums = logits.new_full((10, rows, tokens), torch.nan, dtype=torch.float32)  # poison: every element must be written
    top1 = torch.full((rows, tokens), -1, dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        _compare_kernel[(rows * tokens,)](
            logits, targets.contiguous(), sums, top1, rows, tokens, vocab, CHUNK=chunk, num_warps=num_warps
        )  # fmt: skip
    weight, moved, excess, barred, top_0, pivot, own, own_z, top, z_target = sums.double()
    d, g = moved / weight, excess / weight
    log_weight, log_own = (
        weight.log(),
        own.log(),
    )  # a row's normaliser is its top plus this, which huge logits would swallow
    # The error of log1p(g + d) is fp32's times (g + |d|) / (1 + g + d). The sums have fp32's error. g may have
    # overflowed.
    shift = torch.where(g + d.abs() <= 1, torch.log1p(g + d), top - pivot + log_own - log_weight)
    kl = torch.where(torch.exp(barred - top_0 - log_weight) > 0, torch.inf, shift - d)
    undefined = ~(own > 0)
    kl = torch.where(undefined | undefined[:1], torch.nan, kl)
    nll = torch.where(undefined, torch.nan, top - z_target + log_own)
    entropy = torch.where(undefined, torch.nan, log_own - own_z / own)
    return kl.float(), top1, nll.float(), entropy.float()
