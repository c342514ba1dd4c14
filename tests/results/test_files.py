"""What a run says of the machine that it ran on."""

import datetime

import pytest
import torch

from replayssm_eval import run_kl
from replayssm_eval.kl.report import kl_markdown
from replayssm_eval.results.provenance import provenance


@pytest.mark.parametrize("peaks", [[3.0], [1.5, 2.0], [0.0, 4.0]], ids=str)
def test_peak_memory_is_that_of_the_fullest_gpu(monkeypatch, peaks) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(peaks[device] * 2**30))
    found = provenance(datetime.datetime.now(datetime.UTC))
    assert found["peak_gpu_memory_gib"] == max(peaks)
    assert found.get("peak_gpu_memory_by_device_gib") == (peaks if min(peaks) and len(peaks) > 1 else None)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"gpu": None, "peak_gpu_memory_gib": None}, "GiB peak;"),
        ({"gpu": "H200", "peak_gpu_memory_gib": 33.5}, "33.5 GiB peak on H200"),
        (
            {"gpu": "H200", "peak_gpu_memory_gib": 126.1, "peak_gpu_memory_by_device_gib": [113.4, 126.1]},
            "113.4 and 126.1 GiB peak on H200",
        ),
    ],
    ids=["cpu", "gpu", "gpus"],
)
def test_a_report_says_what_the_run_needed(found, says, tmp_path) -> None:
    result = run_kl(schemes=["nvfp4@16"], tokens=20, output=tmp_path / "out")
    result["provenance"] |= found
    assert says in kl_markdown(result)
