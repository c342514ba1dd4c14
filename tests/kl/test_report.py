"""What a report says in words."""

from dataclasses import replace

import numpy as np
import pytest

from replayssm_eval.inference.metrics import TokenMetrics
from replayssm_eval.kl.figure import kl_figure, legend
from replayssm_eval.kl.report import kl_markdown, reading, table
from replayssm_eval.results.plotting import look_of

from .results import result


@pytest.mark.parametrize(
    ("means", "says"),
    [
        (
            [1, 2, 4, 8, 16],
            "drifts further as the text gets longer. Its KL in the last bin is 16.0 times that of the first 1K tokens.",
        ),
        (
            [1, 2, 4, 4, 4.05],
            "drifts early. Its KL in the last bin is 4.0 times that of the first 1K tokens. "
            "After 2K tokens it shows no growth beyond noise.",
        ),
        ([1, 2, 3, 4, 4.05], "drifts further as the text gets longer"),  # two bins alike are no level
        ([4, 4, 4, 4, 4], "shows no change with length beyond noise"),
        ([4, 3, 2, 1, 1], "drifts less late than early"),
        ([4], "which is too short to show a trend"),
    ],
)
def test_a_verdict_follows_the_curve(means, says) -> None:
    (line,) = reading(result(means))
    assert says in line
    assert line.startswith("nvfp4@16 " if len(means) > 1 else "The run")


def test_a_row_that_was_never_rounded_is_named() -> None:
    made = result()
    rows = [*made.rows[:2], replace(made.rows[2], flushes=0)]
    assert reading(replace(made, rows=rows))[0] == "nvfp4@16 was never rounded: its window is longer than the text."


def test_a_narrow_terminal_shows_both_ends() -> None:
    wide, narrow = table(result(), 210), table(result(), 90)
    assert wide.columns[1:6] == ["0–1K", "1K–2K", "2K–4K", "4K–8K", "8K–16K"]
    assert wide.hidden_bins == 0
    assert [row[:2] for row in wide.rows] == [["control", "0"], ["nvfp4@16", "1"]]
    assert narrow.columns[1:4] == ["0–1K", "2K–4K", "8K–16K"]
    assert narrow.hidden_bins == 2
    assert narrow.rows[1][1:4] == ["1", "4", "16"]


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({}, "GiB peak;"),
        ({"gpu": "H200", "peak_gpu_memory_gib": 33.5}, "33.5 GiB peak on H200"),
        (
            {"gpu": "H200", "peak_gpu_memory_gib": 126.1, "peak_gpu_memory_by_device_gib": [113.4, 126.1]},
            "113.4 and 126.1 GiB peak on H200",
        ),
    ],
    ids=["cpu", "gpu", "gpus"],
)
def test_a_report_says_what_the_run_needed(memory, says) -> None:
    made = result()
    assert says in kl_markdown(replace(made, provenance=replace(made.provenance, **memory)))


def test_shared_and_separate_copies_of_one_format_are_told_apart() -> None:
    """fp8@16 and fp8/fp16@16 have the colour of fp8. Line and name differ, and the legend explains the lines."""
    schemes = ("fp8@16", "fp8/fp16@16", "fp8@1")
    assert len({look_of(scheme)["linestyle"] for scheme in schemes}) == 3
    made = result(schemes=schemes)
    for line in ("Solid: one shared copy", "Dashed: separate copies", "Dash-dotted: a shared copy"):
        assert line in legend(made, True, True)
    values = np.random.default_rng(0).random((5, 1, made.tokens)).astype(np.float32)
    picture = kl_figure(made, TokenMetrics(values, values > 0.5, values, values))["svg"].decode()
    for scheme in schemes:
        assert f">{scheme}</text>" in picture
