"""The benchmark runs on any machine, and counts work as one does by hand."""

import json

import pytest
import torch
from replayssm_emulation import UsageError, parse_scheme

from replayssm_eval.bench.run import Shape, _scan_work, run_bench


def test_it_times_kernels_and_peers() -> None:
    result = run_bench(
        ["fp32", "nvfp4/fp16@16", "fp8@1"], shape="2x16x32x1", delta_shape="2x16x16x1", tokens=32, rows=3, repeats=1
    )
    names = [k["name"] for k in result["kernels"]]
    assert names[:3] == ["scan fp32", "scan nvfp4/fp16@16", "scan fp8@1"]
    assert names[3] == "scan mixed: fp32, nvfp4/fp16@16, fp8@1"
    assert names[4].startswith("logits 3 x ")
    for kernel in result["kernels"]:
        assert kernel["ms"] > 0
        assert kernel["ratio_to_floor"] == pytest.approx(kernel["ms"] / kernel["floor_ms"])
    assert [p["name"] for p in result["peers"] if "ms" in p] == [
        "torch scan, fp32@16",
        "transformers mamba2_chunk_scan, no rounding",
        "transformers mamba2_selective_state_update, no rounding",
    ]
    delta = result["delta"]["kernels"]
    assert [k["name"] for k in delta[::5]] == ["plain fp32", "gdn fp32", "kda fp32"]
    assert delta[6]["ratio_to_plain"] == delta[6]["ms"] / delta[1]["ms"]
    json.dumps(result)


def test_work_is_counted_as_by_hand() -> None:
    layer, tokens = Shape.parse("2x16x32x1"), 64
    inputs = tuple(torch.zeros(1, tokens, *shape) for shape in ((1, 32), (1, 32), (2, 16), (2,), (2,)))
    state = 2 * 16 * 32
    read_and_written = 4 * tokens * (32 + 32 + 32 + 2 + 2) + 4 * tokens * 32 + 4 * 4 * state
    traffic, flops, operations = _scan_work(layer, [parse_scheme("nvfp4/fp16@16")], tokens, inputs)
    assert traffic == read_and_written
    # per token: the state is read and written by a product each; 16 keys are compared, 16 values are added
    assert flops == tokens * (2 * state + 2 * state + 2 * 16 * 32 + 2 * 16 * 2 * 16)
    assert operations == tokens / 16 * state * (8 + 8 + 14)  # nearest read copy, stochastic recurrence copy
    assert _scan_work(layer, [parse_scheme("fp8@1")], tokens, inputs) == (
        read_and_written,
        0,
        tokens * state * (4 + 8 + 14),
    )
    # The delta rule predicts values from every copy, and compares keys with keys too: of every head, where each has decays.
    more, each = _scan_work(layer, [parse_scheme("nvfp4/fp16@16")], tokens, inputs, "gdn"), 2 * 16 * (1 * 32 + 2 * 16)
    assert more == (read_and_written, tokens * (4 * 2 * state + 2 * each), operations)
    assert _scan_work(layer, [parse_scheme("fp32@16")], tokens, inputs, "kda")[1] == tokens * (
        3 * 2 * state + 2 * (each + 2 * 16 * 32)
    )


@pytest.mark.parametrize("shape", ["128x64", "128x64x128x7", "ax64x128", "0x64x64", "1x2x3x1x1"])
def test_bad_shapes_are_one_line(shape) -> None:
    with pytest.raises(UsageError, match=f"--shape {shape}: use HEADSxD_VxD_K"):
        Shape.parse(shape)


def test_bad_options_are_one_line() -> None:
    with pytest.raises(UsageError, match="--rows 0: must be at least 1"):
        run_bench(rows=0)
    with pytest.raises(UsageError, match="unknown backend 'cuda'"):
        run_bench(backend="cuda")
