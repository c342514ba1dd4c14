"""What a report says in words."""

import pytest

from replayssm_eval.kl.report import reading

BINS = [[0, 1024], [1024, 2048], [2048, 4096], [4096, 8192], [8192, 16384]]


@pytest.mark.parametrize(
    ("means", "says"),
    [
        (
            [1, 2, 4, 8, 16],
            "drifts further the longer the text: 16.0 times the KL of the first 1K tokens in the last bin",
        ),
        (
            [1, 2, 4, 4, 4.05],
            "drifts early: 4.0 times the KL of the first 1K tokens in the last bin, with no growth since 2K that",
        ),
        ([1, 2, 3, 4, 4.05], "drifts further the longer the text"),  # two bins alike are no level
        ([4, 4, 4, 4, 4], "shows no change with length"),
        ([4, 3, 2, 1, 1], "drifts less late than early"),
    ],
)
def test_a_verdict_follows_the_curve(means, says) -> None:
    row = {
        "scheme": "nvfp4@16",
        "seed": 0,
        "role": "scheme",
        "flushes": 1024,
        "kl_mean": means,
        "kl_ci95": [[0.95 * m, 1.05 * m] for m in means],
    }
    (line,) = reading({"bins": BINS, "rows": [row], "model": {}, "options": {}})
    assert line.startswith(f"nvfp4@16 {says}"), line
