"""The 198 number-format vectors: codes agreed on by several libraries, dequantised to fp32 bit patterns."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from replayssm_emulation import get_format, quantize_with_noise
from replayssm_emulation.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16
from replayssm_emulation.rounding import round_elements

from tests.helpers.tensors import same_bits

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["vectors"]
ELEMENTS = {"fp16": FP16, "bf16": BF16, "e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2}
SCALED = {"e4m3": "fp8", "e5m2": "fp8-e5m2"}
MX = {"mxe4m3": "mxfp8", "mxe5m2": "mxfp8-e5m2", "mxe2m3": "mxfp6", "mxe3m2": "mxfp6-e3m2", "mxe2m1": "mxfp4"}


def from_bits(words: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32).copy())


def stored(vector: dict) -> torch.Tensor:
    x, kind = from_bits(vector["input"]), vector["kind"]
    if kind == "element":
        if vector["rounding"] == "rne":
            return round_elements(x, ELEMENTS[vector["format"]])
        bits = vector["nbits"]
        noise = torch.tensor(vector["rbits"], dtype=torch.int64) << (32 - bits)
        return round_elements(x, ELEMENTS[vector["format"]], noise, bits)
    if kind == "int":
        return quantize_with_noise(x.view(-1, vector["block"]), get_format(vector["format"]), None)
    if kind == "fp8_scaled":
        return quantize_with_noise(x.view(-1, vector["block"]), get_format(SCALED[vector["format"]]), None)
    if kind == "mx":
        rule = vector["scale_rule"].split("(")[0]
        name = MX[vector["format"]] + ("" if rule == "floor" else f"-{rule}")
        return quantize_with_noise(x.view(-1, 32), get_format(name), None)
    if kind == "nvfp4":
        return quantize_with_noise(x.view(vector["shape"]), get_format("nvfp4"), None)
    assert kind == "nvfp4_4over6"
    variant = replace(
        get_format("nvfp4-4over6"), four_over_six=vector["err"].lower(), scale_max=float(vector["e4m3_max"])
    )
    return quantize_with_noise(x.view(vector["shape"]), variant, None)


def test_all_vectors_are_here() -> None:
    assert len(VECTORS) == 198


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['id']}-{v['format']}-{v['rounding']}")
def test_vector(vector: dict) -> None:
    assert same_bits(stored(vector), from_bits(vector["expected"]))
