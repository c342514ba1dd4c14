"""Accuracy by the reference arm's answer length: bins, paired differences, verdicts.

Length is an outcome of the treatment (low precision can lengthen answers), so one arm, the reference, decides which
bin a question is in, for all arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from replayssm_tasks.loops import LOOP_RULE
from scipy import stats

from .proportions import ALPHA, POWER, Z, detectable_difference, holm, mcnemar, paired_difference_interval, wilson

SCHEMA = "replayssm-eval/quartiles@1"
FEWEST = 4  # questions; with fewer there are no bins
FEWEST_RIGHT = 6  # answers of the reference; five, all lost, have a p of 1/16 in McNemar's exact test
PERMUTATIONS = 10_000
_RESAMPLES = 10_000
_BLOCK = 500  # permutations or resamples at a time
_TOLERANCE = 1e-12  # sums of the same numbers in another order count as equal
LOSS, GAIN, UNDECIDED, IN_CONTROL = "loss", "gain", "not distinguishable", "inside the control's range"
_NO_TREND: dict[str, Any] = {"slope": None, "p": None, "holm_p": None, "verdict": None}
FALLS, RISES = "falls with length", "rises with length"


@dataclass(frozen=True)
class Arm:
    """One arm over the N paired questions.

    role: "reference", "scheme" or "control". score `[N]` in [0, 1]: mean over a question's answers.
    length `[N]`: median over a question's answers, NaN where it is not known. answers `[N]`: number of answers.
    truncated, looped `[N]`: number of such answers. not_extracted `[N]`: filtered responses without an answer.
    These three are NaN where they are not recorded.
    """

    name: str
    role: str
    score: np.ndarray
    length: np.ndarray
    answers: np.ndarray
    truncated: np.ndarray
    not_extracted: np.ndarray
    looped: np.ndarray


def assign_bins(length: np.ndarray, tie: Sequence[str], bins: int) -> np.ndarray:
    """Bin of every question `[N]`, -1 where the length is not known.

    Questions are ordered by (length, tie) and cut into `bins` runs. Sizes differ by at most one, longer runs first.
    Equal lengths may fall on both sides of an edge, never all into one bin. With fewer questions than bins the last
    bins are empty. Without bins all are -1.
    """
    out = np.full(len(length), -1)
    order = sorted(np.flatnonzero(np.isfinite(length)).tolist(), key=lambda i: (length[i], tie[i]))
    for number, members in enumerate(np.array_split(np.array(order, dtype=int), bins) if bins else ()):
        out[members] = number
    return out


def compare(arms: Sequence[Arm], tie: Sequence[str], bins: int = 4, averaged: bool = False) -> dict[str, Any]:
    """bins, reference, control, variants, methods and warnings of `quartiles.json`.

    arms: the reference first. tie `[N]`: what orders questions of equal length. averaged: scores are means of several
    answers or not 0 and 1, so that counts alone do not tell their spread.
    """
    reference, n = arms[0], len(arms[0].score)
    which = assign_bins(reference.length, tie, bins)
    warnings = []
    if (binned := int((which >= 0).sum())) < FEWEST:
        bins = 0
        warnings.append(
            f"{binned} questions with a known length: too few for bins (at least {FEWEST}), overall accuracy only."
        )
    elif binned > 1 and np.ptp(reference.length[which >= 0]) == 0:
        warnings.append("All reference answers are equally long: the bins say nothing about length.")
    if binned < n:
        warnings.append(f"{n - binned} questions without a known reference length are in the overall row only.")
    if not averaged and (right := int(reference.score.sum())) < FEWEST_RIGHT:
        warnings.append(
            f"The reference is right in {right} of {n} questions: "
            "whatever the others lose, it cannot be told from chance."
        )
    groups = [np.flatnonzero(which == b) for b in range(bins)]
    everything = np.arange(n)
    variants = []
    for arm in arms[1:]:
        variants.append(
            {
                "name": arm.name,
                "role": arm.role,
                "bins": [_versus(reference, arm, g, averaged) for g in groups],
                "overall": _versus(reference, arm, everything, averaged),
                "trend": trend(arm.score - reference.score, reference.length) if bins else dict(_NO_TREND),
                "own_length_bins": _own_bins(arm, tie, bins),
            }
        )
    control = _judge(variants)
    if control is None:
        warnings.append(
            "No control: run the reference a second time (other batch size or seed) and pass it with --control."
        )
    return {
        "bins": [_edges(reference.length, g) for g in groups],
        "reference": {
            "name": reference.name,
            "bins": [_side(reference, g) for g in groups],
            "overall": _side(reference, everything),
        },
        "control": control,
        "variants": variants,
        "methods": methods(averaged),
        "warnings": warnings,
    }


def _edges(length: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Shortest and longest length in a bin, both included; null when it is empty."""
    known = length[group]
    some = len(group) > 0
    return {
        "lo": _whole(known.min()) if some else None,
        "hi": _whole(known.max()) if some else None,
        "n": len(group),
        "median_length": _whole(np.median(known)) if some else None,
    }


def _whole(value: float) -> int | float:
    """A length as an integer where it is one (medians of repeats may not be)."""
    return int(value) if float(value).is_integer() else float(value)


def _count(values: np.ndarray) -> int | None:
    """Sum of the known counts; None when none is known."""
    known = values[np.isfinite(values)]
    return int(known.sum()) if len(known) else None


def _side(arm: Arm, group: np.ndarray) -> dict[str, Any]:
    """One arm in one bin."""
    n, right = len(group), float(arm.score[group].sum())
    return {
        "n": n,
        "answers": int(arm.answers[group].sum()) if n else None,
        "accuracy": right / n if n else None,
        "wilson95": wilson(right, n),
        "truncated": _count(arm.truncated[group]),
        "not_extracted": _count(arm.not_extracted[group]),
        "looped": _count(arm.looped[group]),
    }


def _versus(reference: Arm, arm: Arm, group: np.ndarray, averaged: bool) -> dict[str, Any]:
    """One arm in one bin, and against the reference."""
    change = (arm.score - reference.score)[group]
    gains, losses, n = int((change > 0).sum()), int((change < 0).sum()), len(group)
    ratio = arm.length[group] / np.where(reference.length[group] > 0, reference.length[group], np.nan)
    ratio = ratio[np.isfinite(ratio)]
    whole = group[(arm.truncated[group] == 0) & (reference.truncated[group] == 0)]
    recorded = np.isfinite(arm.truncated[group] + reference.truncated[group]).any()
    return {
        **_side(arm, group),
        "difference": float(change.mean()) if n else None,
        "difference_ci95": _interval(change, averaged),
        "both_right": int(((arm.score == 1) & (reference.score == 1))[group].sum()) if n else None,
        "gains": gains if n else None,
        "losses": losses if n else None,
        "mcnemar_p": None if not n else sign_flip(change) if averaged else mcnemar(gains, losses),
        "holm_p": None,
        "length_ratio": float(np.median(ratio)) if len(ratio) else None,
        "detectable_difference": _detectable(change, averaged),
        "without_truncated": _without_truncated(reference, arm, whole) if recorded else None,
        "verdict": None,
    }


def _without_truncated(reference: Arm, arm: Arm, group: np.ndarray) -> dict[str, Any]:
    """The questions whose answers all ended by themselves in both arms."""
    shares = [float(a.score[group].mean()) if len(group) else None for a in (reference, arm)]
    difference = float((arm.score - reference.score)[group].mean()) if len(group) else None
    return {"n": len(group), "reference_accuracy": shares[0], "accuracy": shares[1], "difference": difference}


def _interval(change: np.ndarray, averaged: bool) -> list[float] | None:
    """95% interval of the mean difference of n questions."""
    up, down = float(change[change > 0].sum()), float(-change[change < 0].sum())
    # Without repeats the sums are counts. Without any spread a bootstrap would claim certainty.
    if not averaged or len(change) < 2 or np.ptp(change) == 0:
        return paired_difference_interval(up, down, len(change))
    rng = np.random.default_rng(0)
    means = [change[rng.integers(0, len(change), (_BLOCK, len(change)))].mean(1) for _ in range(0, _RESAMPLES, _BLOCK)]
    return [float(x) for x in np.quantile(np.concatenate(means), [ALPHA / 2, 1 - ALPHA / 2])]


def sign_flip(change: np.ndarray) -> float:
    """Two-sided p of the mean of `change` `[n]` when every sign could as well be the other (fixed seed).

    With changes of 0 and ±1 only, this estimates the exact McNemar p.
    """
    change = change[change != 0]
    seen, rng, extreme = abs(change.sum()) - _TOLERANCE, np.random.default_rng(0), 0
    for _ in range(0, PERMUTATIONS, _BLOCK):
        signs = rng.integers(0, 2, (_BLOCK, len(change))) * 2 - 1
        extreme += int((abs(signs @ change) >= seen).sum())
    return (extreme + 1) / (PERMUTATIONS + 1)


def _detectable(change: np.ndarray, averaged: bool) -> float | None:
    if not averaged:
        return detectable_difference(len(change), float((change != 0).mean())) if len(change) else None
    spread = float(change.std(ddof=1)) if len(change) > 1 else 0.0
    return (Z + float(stats.norm.ppf(POWER))) * spread / len(change) ** 0.5 if spread else None


def trend(change: np.ndarray, length: np.ndarray) -> dict[str, Any]:
    """Slope of the paired difference over log2 of the reference length, and its two-sided permutation p (fixed seed).

    change `[N]`, length `[N]` (NaN: left out; below 1: as 1). Nulls where the slope is not defined.
    """
    known = np.isfinite(length)
    x, y = np.log2(np.maximum(length[known], 1.0)), change[known]
    if len(x) < FEWEST or np.ptp(x) == 0:
        return dict(_NO_TREND)
    x = x - x.mean()
    seen, rng, extreme = abs(float(x @ y)) - _TOLERANCE, np.random.default_rng(0), 0
    for _ in range(0, PERMUTATIONS, _BLOCK):
        shuffled = rng.permuted(np.broadcast_to(y, (_BLOCK, len(y))), axis=1)
        extreme += int((abs(shuffled @ x) >= seen).sum())
    return _NO_TREND | {"slope": float(x @ y / (x @ x)), "p": (extreme + 1) / (PERMUTATIONS + 1)}


def _own_bins(arm: Arm, tie: Sequence[str], bins: int) -> list[dict[str, Any]]:
    """Accuracy by the arm's own lengths: descriptive, since the questions of a bin differ from arm to arm."""
    which = assign_bins(arm.length, tie, bins)
    groups = [np.flatnonzero(which == b) for b in range(bins)]
    return [{**_edges(arm.length, g), "accuracy": float(arm.score[g].mean()) if len(g) else None} for g in groups]


def _judge(variants: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Fill in holm_p and verdicts; return the control's range in every bin and overall, None without a control.

    Families of Holm's correction: bins x schemes; the overall rows of the schemes; their trends. A control's range is
    ± its largest difference: which of two equal runs is called the reference is arbitrary.
    """
    schemes = [v for v in variants if v["role"] == "scheme"]
    controls = [v for v in variants if v["role"] == "control"]
    for family, source in (
        ([cell for v in schemes for cell in v["bins"]], "mcnemar_p"),
        ([v["overall"] for v in schemes], "mcnemar_p"),
        ([v["trend"] for v in schemes], "p"),
    ):
        for cell, adjusted in zip(family, holm([cell[source] for cell in family]), strict=True):
            cell["holm_p"] = adjusted

    def reach(cells: list[dict[str, Any]], key: str = "difference") -> float | None:
        return max((abs(c[key]) for c in cells if c[key] is not None), default=None)

    for v in controls:
        for cell in (*v["bins"], v["overall"]):
            cell["verdict"] = _verdict(cell["difference"], cell["mcnemar_p"], None, LOSS, GAIN)
        v["trend"]["verdict"] = _verdict(v["trend"]["slope"], v["trend"]["p"], None, FALLS, RISES)
    count = len(variants[0]["bins"]) if variants else 0
    spans = [reach([v["bins"][b] for v in controls]) for b in range(count)]
    overall, slope = reach([v["overall"] for v in controls]), reach([v["trend"] for v in controls], "slope")
    for v in schemes:
        for cell, span in zip((*v["bins"], v["overall"]), (*spans, overall), strict=True):
            cell["verdict"] = _verdict(cell["difference"], cell["holm_p"], span, LOSS, GAIN)
        v["trend"]["verdict"] = _verdict(v["trend"]["slope"], v["trend"]["holm_p"], slope, FALLS, RISES)
    names = [v["name"] for v in controls]
    return {"names": names, "range": spans, "overall": overall, "slope": slope} if controls else None


def _verdict(effect: float | None, p: float | None, span: float | None, below: str, above: str) -> str | None:
    """What may be claimed. There is no "no loss": a bin that shows none may still hide one."""
    if p is None or effect is None:
        return None
    if span is not None and abs(effect) <= span + _TOLERANCE:
        return IN_CONTROL
    return UNDECIDED if p > ALPHA else below if effect < 0 else above


def methods(averaged: bool) -> dict[str, str]:
    """How every number came about, in words."""
    several = "scores are means over a question's answers (or not 0 and 1): "
    return {
        "length": "generated tokens, thinking included, where the reference records them; "
        "otherwise of its logged text, thinking as it is there",
        "bins": "questions ordered by the reference's length (median over its answers), ties by doc_hash, "
        "cut into runs whose sizes differ by at most one; lo and hi are included",
        "accuracy": "mean score; an answer that was not extracted counts as not correct; 95% Wilson score interval"
        + (" of the sum of the means" if averaged else ""),
        "difference": "variant minus reference on the same questions; "
        + (
            several + f"95% percentile bootstrap over questions, {_RESAMPLES:,} resamples"
            if averaged
            else "95% score interval for paired shares (Tango 1998)"
        ),
        "counts": "both: right in both arms; won, lost: right in this arm alone, in the reference alone"
        + (" (better, worse than there)" if averaged else ""),
        "mcnemar_p": (
            several + f"sign-flip permutation test, {PERMUTATIONS:,} draws"
            if averaged
            else "exact McNemar test of gains against losses, two-sided"
        ),
        "holm_p": "Holm over bins x schemes, controls left out; "
        "over the schemes for the overall rows and for the trends",
        "detectable_difference": "smallest true difference that one test at 5%, before Holm, finds with 80% probability"
        + (
            " (normal approximation, observed spread)"
            if averaged
            else " at the observed share of discordant pairs (exact)"
        ),
        "trend": "slope of the paired difference per doubling of the reference's length; "
        f"permutation test, {PERMUTATIONS:,} draws, two-sided",
        "verdict": "loss or gain: Holm p at most 5% (a control: its own p) and outside ± the control's largest "
        "difference in that bin; inside it the difference is undecided",
        "not_extracted": "our own record, else a filtered response that is empty, null or [invalid]",
        "looped": f"our own record, else {LOOP_RULE}",
        "length_ratio": "median over questions of variant length / reference length",
    }
