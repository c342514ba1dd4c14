"""Statistics of paired answers by length: known values, edge cases of the bins, and what may be claimed."""

import itertools
import math

import numpy as np
import pytest

from replayssm_eval.quartiles.comparison import Arm, assign_bins, compare, sign_flip, trend
from replayssm_eval.quartiles.proportions import (
    Z,
    detectable_difference,
    holm,
    mcnemar,
    paired_difference_interval,
    power,
    wilson,
)
from replayssm_eval.quartiles.report import COLUMNS, reading, rows


def arm(score, length=None, name="fp32", role="reference", answers=1, **flags):
    score = np.array(score, dtype=float)
    unknown = np.full(len(score), np.nan)
    length = np.arange(len(score)) + 1.0 if length is None else np.array(length, dtype=float)
    known = {
        key: np.array(flags[key], dtype=float) if key in flags else unknown
        for key in ("truncated", "not_extracted", "looped")
    }
    return Arm(name, role, score, length, np.full(len(score), answers), **known)


def ties(n):
    """Tie breakers that are not in the order of the questions."""
    return [f"{(i * 7919) % 1009:04d}" for i in range(n)]


def against(reference, *others, bins=4, **options):
    return compare([reference, *others], ties(len(reference.score)), bins, **options)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (0, 25, 0, 0.1332),
        (30, 30, 0.8865, 1),
        (35, 50, 0.5625, 0.8090),
    ],  # 35/50: by hand, centre 0.68574, half width 0.12328
)
def test_wilson(right, n, low, high) -> None:
    assert wilson(right, n) == pytest.approx([low, high], abs=6e-5)


def test_wilson_ends_are_exact_and_nothing_is_null() -> None:
    assert wilson(0, 25)[0] == 0.0
    assert wilson(30, 30)[1] == 1.0
    assert wilson(0, 0) is None


@pytest.mark.parametrize(
    ("gains", "losses", "p"), [(2, 5, 0.453125), (0, 6, 0.03125), (4, 4, 1.0), (0, 0, 1.0), (0, 1, 1.0)]
)
def test_mcnemar(gains, losses, p) -> None:
    assert mcnemar(gains, losses) == pytest.approx(p, abs=1e-12)
    assert mcnemar(losses, gains) == pytest.approx(p, abs=1e-12)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == [
        pytest.approx(0.03),
        pytest.approx(0.06),
        None,
        pytest.approx(0.06),
        pytest.approx(0.02),
    ]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def likeliest_statistic(gains: int, losses: int, n: int, d: float) -> float:
    """The score statistic at difference d. A search over the likelihood finds its nuisance share, not a formula."""
    shares = np.linspace(max(0, -d), (1 - d) / 2, 200_001)[1:-1]
    likelihood = (gains * np.log(shares + d) if gains else 0) + (losses * np.log(shares) if losses else 0)
    rest = n - gains - losses
    likelihood = likelihood + (rest * np.log(1 - 2 * shares - d) if rest else 0)
    q = shares[likelihood.argmax()]
    return (gains - losses - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))


@pytest.mark.parametrize(("gains", "losses", "n"), [(1, 7, 21), (2, 5, 100), (40, 20, 160), (0, 9, 50)])
def test_paired_interval_holds_what_the_score_test_does_not_reject(gains, losses, n) -> None:
    low, high = paired_difference_interval(gains, losses, n)
    assert low < (gains - losses) / n < high
    assert likeliest_statistic(gains, losses, n, low) == pytest.approx(Z, abs=2e-3)
    assert likeliest_statistic(gains, losses, n, high) == pytest.approx(-Z, abs=2e-3)


def test_paired_interval_edges() -> None:
    """Without discordant pairs it is ± z²/(n + z²), the Wilson end of 0 of n. Pairs all one way reach the end."""
    assert paired_difference_interval(0, 0, 25) == pytest.approx([-wilson(0, 25)[1], wilson(0, 25)[1]])
    assert paired_difference_interval(5, 0, 5)[1] == 1.0
    assert paired_difference_interval(0, 5, 5) == pytest.approx(
        [-x for x in reversed(paired_difference_interval(5, 0, 5))]
    )
    assert paired_difference_interval(0, 0, 0) is None


def test_power_by_enumeration() -> None:
    """n = 8, 60% discordant, difference 0.5: 55% losses, 5% gains, every outcome summed."""
    n, shares, expected = 8, (0.05, 0.55, 0.4), 0.0
    for gains, losses in itertools.product(range(n + 1), repeat=2):
        if gains + losses <= n and mcnemar(gains, losses) <= 0.05:
            rest = n - gains - losses
            ways = math.factorial(n) / (math.factorial(gains) * math.factorial(losses) * math.factorial(rest))
            expected += ways * shares[0] ** gains * shares[1] ** losses * shares[2] ** rest
    assert power(n, 0.6, 0.5) == pytest.approx(expected, abs=1e-12)


def test_a_quartile_can_hardly_show_ten_points() -> None:
    assert power(50, 0.2, 0.1) == pytest.approx(0.24, abs=0.02)
    assert power(198, 0.2, 0.1) == pytest.approx(0.87, abs=0.01)
    found = detectable_difference(50, 0.2)
    assert power(50, 0.2, found) >= 0.8 > power(50, 0.2, found - 0.001)
    assert detectable_difference(5, 0.2) is None  # even 5 losses of 5 have p = 0.0625


@pytest.mark.parametrize("right", [0, 5, 6])
def test_a_reference_that_answers_nothing_cannot_lose(right) -> None:
    """Of five right answers, all lost, McNemar's exact test says 0.0625; of six 0.03125."""
    scores = [1] * right + [0] * (20 - right)
    found = against(arm(scores, range(20)), arm([0] * 20, name="x", role="scheme"))
    assert any(f"right in {right} of 20" in w for w in found["warnings"]) == (right < 6)
    assert (found["variants"][0]["overall"]["mcnemar_p"] < 0.05) == (right == 6)


@pytest.mark.parametrize(
    ("length", "sizes", "medians"),
    [
        ([7] * 8, [2, 2, 2, 2], [7, 7, 7, 7]),
        ([0] * 100 + [1] * 101, [51, 50, 50, 50], [0, 0, 1, 1]),
        (range(10, 17), [2, 2, 2, 1], [10.5, 12.5, 14.5, 16]),
        ([5, 6, 7, 8, np.nan], [1, 1, 1, 1], [5, 6, 7, 8]),
    ],
)
def test_bins_are_equal_within_one(length, sizes, medians) -> None:
    """T1: equal lengths go to both sides of an edge and merge no bins. Without a length: only in the overall row."""
    found = against(arm([1] * len(length), length), arm([1] * len(length), name="x", role="scheme"))
    assert [b["n"] for b in found["bins"]] == sizes
    assert [b["median_length"] for b in found["bins"]] == medians
    assert found["reference"]["overall"]["n"] == len(length)
    unknown = sum(x != x for x in length)
    assert any(f"{unknown} questions without" in w for w in found["warnings"]) == bool(unknown)
    assert any("equally long" in w for w in found["warnings"]) == (len(set(length)) == 1)


def test_ties_do_not_depend_on_the_order_of_the_questions() -> None:
    length, tie = np.array([0.0] * 100 + [1.0] * 101), ties(201)
    bins = assign_bins(length, tie, 4)
    shuffle = np.random.default_rng(0).permutation(201)
    again = assign_bins(length[shuffle], [tie[i] for i in shuffle], 4)
    assert (again == bins[shuffle]).all()
    assert 0 < (bins[:100] == 1).sum() < 50  # the edge runs through equal lengths


def test_more_bins_than_questions_leaves_nulls() -> None:
    found = against(arm([1, 0, 1, 1, 1]), arm([1, 1, 1, 1, 0], name="x", role="scheme"), bins=8)
    assert [b["n"] for b in found["bins"]] == [1] * 5 + [0] * 3
    assert found["bins"][7] == {"lo": None, "hi": None, "n": 0, "median_length": None}
    empty = found["variants"][0]["bins"][7]
    assert empty.pop("n") == 0
    assert set(empty.values()) == {None}
    assert set(found["reference"]["bins"][7].values()) == {0, None}
    assert [c["difference"] for c in found["variants"][0]["bins"][:5]] == [0, 1, 0, 0, -1]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_few_questions_give_the_overall_row_only(n) -> None:
    """T1: no bin of nothing."""
    found = against(arm([1] * n), arm([0] * n, name="x", role="scheme"))
    assert (found["bins"], found["reference"]["bins"], found["variants"][0]["bins"]) == ([], [], [])
    assert any(w.startswith(f"{n} questions with a known length: too few") for w in found["warnings"])
    assert found["reference"]["overall"]["accuracy"] == (1 if n else None)
    assert found["variants"][0]["overall"]["difference"] == (-1 if n else None)
    assert found["variants"][0]["trend"]["slope"] is None


@pytest.mark.parametrize(
    ("length", "bins", "counts"),
    [
        ([7] * 8, 4, "2 2 2 2 8"),
        ([1, 2, 3, 4, np.nan], 4, "1 1 1 1 5"),
        (range(5), 8, "1 1 1 1 1 0 0 0 5"),
        (range(3), 4, "3"),
        ([], 4, "0"),
    ],
    ids=str,
)
def test_every_bin_shows_its_count(length, bins, counts) -> None:
    """T1: every row of the table has its n. An empty bin has dashes, not 0 or NaN. Ties have a stated rule."""
    score = [1] * len(length)
    found = {
        **against(arm(score, length), arm(score, length, name="x", role="scheme"), bins=bins),
        "length_unit": "tokens",
    }
    table = rows(found, found["variants"][0])
    assert " ".join(row[COLUMNS.index("n")] for row in table) == counts
    assert all(set(row[2:]) == {"–"} for row in table if row[1] == "0")
    assert "nan" not in str(table)
    assert "ties by doc_hash" in found["methods"]["bins"]


def test_bins_come_from_the_reference() -> None:
    """T1: the variant's own lengths, in the opposite order, change its length ratio and its own view only."""
    score = [1, 1, 0, 0, 1, 0, 1, 1]
    same = against(arm(score), arm(score[::-1], name="x", role="scheme"))
    reversed_length = against(arm(score), arm(score[::-1], np.arange(8, 0, -1), name="x", role="scheme"))
    cells = [found["variants"][0]["bins"] for found in (same, reversed_length)]
    assert [c["accuracy"] for c in cells[0]] == [c["accuracy"] for c in cells[1]] == [1, 0.5, 0, 1]
    assert [c["length_ratio"] for c in cells[0]] == [1, 1, 1, 1]
    assert cells[1][0]["length_ratio"] == (8 / 1 + 7 / 2) / 2
    assert [b["accuracy"] for b in reversed_length["variants"][0]["own_length_bins"]] == [1, 0, 0.5, 1]


def test_one_bin_by_hand() -> None:
    """T3: 8 questions: 1 gained, 3 lost, 2 truncated in either arm, one of them lost."""
    reference = arm([1, 1, 1, 1, 1, 0, 0, 0], truncated=[0, 0, 0, 0, 0, 1, 0, 0], not_extracted=[0] * 8, looped=[0] * 8)
    other = arm(
        [0, 0, 0, 1, 1, 1, 0, 0],
        name="x",
        role="scheme",
        truncated=[1, 0, 0, 0, 0, 0, 0, 0],
        not_extracted=[1, 1] + [0] * 6,
        looped=[1] * 8,
    )
    cell = against(reference, other, bins=1)["variants"][0]["bins"][0]
    assert (cell["both_right"], cell["gains"], cell["losses"], cell["difference"], cell["accuracy"]) == (
        2,
        1,
        3,
        -0.25,
        0.375,
    )
    assert cell["mcnemar_p"] == cell["holm_p"] == pytest.approx(2 * 5 / 16)
    assert (cell["truncated"], cell["not_extracted"], cell["looped"]) == (1, 2, 8)
    assert cell["without_truncated"] == {
        "n": 6,
        "reference_accuracy": pytest.approx(4 / 6),
        "accuracy": pytest.approx(2 / 6),
        "difference": pytest.approx(-2 / 6),
    }
    assert cell["verdict"] == "not distinguishable"


def test_all_right_in_both_arms() -> None:
    found = against(arm([1] * 100), arm([1] * 100, name="x", role="scheme"))
    cell = found["variants"][0]["bins"][0]
    assert cell["wilson95"][1] == 1.0
    assert cell["difference"] == 0
    assert cell["difference_ci95"][0] < -0.1  # 25 questions exclude no loss of 10 points
    assert (cell["mcnemar_p"], cell["verdict"], found["variants"][0]["trend"]["p"]) == (1.0, "not distinguishable", 1.0)


def test_trend_by_hand() -> None:
    """Lengths 1, 2, 4, 8 and losses in the last two: slope -2/5 per doubling; 2 of the 6 orders are as extreme."""
    found = trend(np.array([0.0, 0, -1, -1]), np.array([1.0, 2, 4, 8]))
    assert found["slope"] == pytest.approx(-0.4)
    assert found["p"] == pytest.approx(1 / 3, abs=0.02)
    assert trend(np.array([0.0, 0, -1, -1]), np.array([1.0, 2, 4, 8])) == found
    assert trend(np.array([0.0, 0, 1, 1]), np.array([1.0, 2, 4, 8]))["slope"] == pytest.approx(0.4)
    assert trend(np.array([0.0, 0, -1, -1, 1]), np.array([1.0, 2, 4, 8, np.nan]))["slope"] == found["slope"]
    assert trend(np.array([0.0, -1, 0, 0]), np.array([7.0, 7, 7, 7]))["slope"] is None


def test_trend_p_is_uniform_without_a_trend() -> None:
    """Of 60 series without a trend, about 3 have p <= 0.05 (binomial: at most 9)."""
    rng = np.random.default_rng(1)
    small = sum(
        trend(rng.integers(-1, 2, 40).astype(float), rng.integers(1, 5000, 40).astype(float))["p"] <= 0.05
        for _ in range(60)
    )
    assert small <= 9


def drop(n: int, lost: int) -> list[int]:
    """n right answers, of which the last `lost` become wrong: the longest ones, as `arm` numbers lengths."""
    return [1] * (n - lost) + [0] * lost


def test_a_planted_loss_is_found_where_it_is() -> None:
    found = against(
        arm([1] * 400), arm(drop(400, 15), name="x", role="scheme"), arm(drop(400, 1), name="again", role="control")
    )
    control, scheme = sorted(found["variants"], key=lambda v: v["role"])
    assert [c["verdict"] for c in scheme["bins"]] == ["inside the control's range"] * 3 + ["loss"]
    assert scheme["overall"]["verdict"] == "loss"
    assert scheme["bins"][3]["holm_p"] == pytest.approx(4 * 2 * 0.5**15)
    assert {c["verdict"] for c in control["bins"]} == {"not distinguishable"}
    assert {c["holm_p"] for c in control["bins"]} == {None}
    assert scheme["trend"]["slope"] < 0
    assert scheme["trend"]["p"] < 0.001
    assert (scheme["trend"]["verdict"], control["trend"]["verdict"]) == ("falls with length", "not distinguishable")
    assert found["control"] == {
        "names": ["again"],
        "range": [0, 0, 0, 0.01],
        "overall": 0.0025,
        "slope": abs(control["trend"]["slope"]),
    }


def test_inside_the_control_nothing_is_claimed() -> None:
    """T3: 15 losses, p = 6e-5, but the control loses as much: undecided. A gain of another size is still one."""
    control = arm(drop(400, 15), name="again", role="control")
    found = against(arm([1] * 400), arm(drop(400, 15), name="x", role="scheme"), control)
    assert found["variants"][0]["bins"][3]["verdict"] == "inside the control's range"
    assert found["variants"][1]["bins"][3]["verdict"] == "loss"
    text = " ".join(reading({**found, "length_unit": "tokens"}, found["variants"][0]))
    assert "no question is lost or won at 1–100, 101–200 and 201–300 tokens, as in the control" in text
    assert "undecided at 301–400 tokens and overall" in text
    assert "has no steeper trend with length than the control's" in text
    assert ": loss" not in text
    assert "falls" not in text
    better = against(
        arm(drop(400, 40)), arm([1] * 400, name="x", role="scheme"), arm(drop(400, 41), name="again", role="control")
    )
    assert better["variants"][0]["bins"][3]["verdict"] == "gain"


def test_holm_counts_all_schemes_and_no_control() -> None:
    """6 losses in one bin: p = 1/32, Holm over 4 bins 1/8, over two schemes 1/4; a control changes nothing."""
    x, y, again = (
        arm(drop(400, 6), name=n, role=r) for n, r in (("x", "scheme"), ("y", "scheme"), ("again", "control"))
    )
    reference = arm([1] * 400)
    p = [
        against(reference, x, *more)["variants"][0]["bins"][3]["holm_p"]
        for more in ((), (again,), (arm([1] * 400, name="y", role="scheme"),))
    ]
    assert p == [pytest.approx(1 / 8), pytest.approx(1 / 8), pytest.approx(1 / 4)]
    both = against(reference, x, y)["variants"]
    assert both[0]["overall"]["mcnemar_p"] == pytest.approx(1 / 32)
    assert both[0]["overall"]["holm_p"] == pytest.approx(1 / 16)
    assert both[0]["bins"][3]["verdict"] == "not distinguishable"


def test_means_of_repeats() -> None:
    """Four answers a question: a bootstrap over questions, a sign-flip test, and no certainty where nothing changed."""
    rng = np.random.default_rng(0)
    reference = rng.binomial(4, 0.8, 200) / 4
    worse = np.maximum(reference - np.where(np.arange(200) >= 150, 0.25, 0.0), 0)
    found = against(arm(reference, answers=4), arm(worse, name="x", role="scheme", answers=4), averaged=True)
    cells = found["variants"][0]["bins"]
    assert cells[3]["difference"] == pytest.approx((worse - reference)[150:].mean())
    assert cells[3]["difference_ci95"][1] < 0
    assert cells[3]["verdict"] == "loss"
    assert (cells[0]["mcnemar_p"], cells[0]["answers"]) == (1.0, 200)
    assert cells[0]["difference_ci95"] == pytest.approx([-wilson(0, 50)[1], wilson(0, 50)[1]])
    assert "bootstrap over questions" in found["methods"]["difference"]
    noisy = against(arm(reference), arm(rng.permutation(reference), name="x", role="scheme"), averaged=True)[
        "variants"
    ][0]["overall"]
    low, high = noisy["difference_ci95"]
    assert low < 0 < high
    assert noisy["detectable_difference"] == pytest.approx((high - low) / 2 * (Z + 0.8416) / Z, rel=0.1)


def test_sign_flips_estimate_mcnemar() -> None:
    assert sign_flip(np.array([1.0] * 2 + [-1.0] * 5 + [0.0] * 9)) == pytest.approx(mcnemar(2, 5), abs=0.02)


def test_no_report_ever_says_no_loss() -> None:
    found = {**against(arm([1] * 100), arm([1] * 100, name="x", role="scheme")), "length_unit": "tokens"}
    variant = found["variants"][0]
    text = " ".join(reading(found, variant) + list(itertools.chain(*rows(found, variant))))
    assert "not distinguishable" in text
    assert "no loss" not in text
    assert "points would often be missed" in text
    assert any("No control" in w for w in found["warnings"])
