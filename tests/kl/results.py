"""A made-up result of one scheme, for tests of what is said about results."""

from dataclasses import fields, replace

from replayssm_eval.kl.result import (
    BookFacts,
    CorpusFacts,
    KlResult,
    LayerManifest,
    ModelFacts,
    Records,
    RowResult,
    Timing,
)
from replayssm_eval.kl.statistics import Bin, Interval, RowStatistics
from replayssm_eval.results.provenance import Provenance

BINS = [Bin(0, 1024), Bin(1024, 2048), Bin(2048, 4096), Bin(4096, 8192), Bin(8192, 16384)]


def statistics(means) -> RowStatistics:
    """means: KL by bin. Intervals are 5% wide on both sides; every other number is 0."""
    lists = {"kl_by_entropy": 6, "same_top1": len(means), "nll": len(means), "nll_difference": len(means)}
    empty = {one.name: [0.0] * lists[one.name] if one.name in lists else 0 for one in fields(RowStatistics)}
    empty |= {"kl_overall_ci95": Interval(0.0, 0.0), "nll_difference_ci95": Interval(0.0, 0.0)}
    intervals = [Interval(0.95 * m, 1.05 * m) for m in means]
    return RowStatistics(**{**empty, "kl_mean": list(means), "kl_ci95": intervals})


def result(means=(1, 2, 4, 8, 16), schemes=("nvfp4@16",), **changes) -> KlResult:
    """changes: fields of the result."""
    zero = statistics([0.0] * len(means))
    made = KlResult(
        status="complete",
        problems=[],
        model=ModelFacts(
            {"name": "a model", "dtype": "float32", "device": "cpu"},
            [LayerManifest(0, 6, 64, 64, ["float32"], [0.0] * (2 + len(schemes)), Records(*["float32"] * 4))],
        ),
        corpus=CorpusFacts("builtin", None, "none added", [BookFacts("a book", "a.txt", "00", 99, 16384)]),
        tokens=BINS[len(means) - 1].stop,
        prompt_tokens=0,
        backend="torch",
        options={},
        vocabulary=2048,
        bins=BINS[: len(means)],
        entropy_tokens=[0] * 6,
        intervals="made up",
        rows=[
            RowResult("fp32", 0, "reference", zero, 1024),
            RowResult("fp32", 0, "control", zero, 1024),
            *(RowResult(scheme, 0, "scheme", statistics(means), 1024) for scheme in schemes),
        ],
        provenance=Provenance("replayssm-eval kl", None, {}, "3.11", "Linux", None, 1, "today", 1.0, 1.5, None),
        timing=Timing(),
    )
    return replace(made, **changes)
