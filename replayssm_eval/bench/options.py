"""Options of the command `bench`: the keywords of `run_bench`."""

from collections.abc import Sequence
from dataclasses import dataclass

from replayssm_emulation import parse_scheme

from ..inference.options import ScanOptions, schemes_option
from ..models.options import DEVICE_HELP
from ..results.options import option

DEFAULT_SCHEMES = (
    *("fp32", "fp16@16", "fp8@16", "nvfp4@16", "nvfp4-rn@16", "nvfp4/fp16@16"),
    *("fp32@1", "fp8@1", "nvfp4@1"),
)


@dataclass(frozen=True)
class BenchOptions(ScanOptions):
    """What is timed, and where. The fields are explained in `run_bench`."""

    LAST = ("backend", "device", "repeats")

    schemes: Sequence[str] = schemes_option(
        DEFAULT_SCHEMES, "Scheme to time; repeatable. Default: a selection, then all of it in one batch."
    )
    shape: str | None = option(
        None, "State layer: HEADSxD_VxD_K[xGROUPS]. Default: 128x64x128x8 on a GPU, 8x64x64x8 on a CPU."
    )
    delta_shape: str | None = option(
        None, "Layer of the delta rule. Default: 32x128x128x16 on a GPU, 8x64x64x8 on a CPU."
    )
    tokens: int | None = option(None, "Tokens per call. Default: 8192 on a GPU, 256 on a CPU.")
    rows: int = option(9, "Batch rows that run together.")
    device: str = option("auto", DEVICE_HELP)
    repeats: int = option(5, "Timed calls of each kernel. The median counts.")

    def check(self) -> None:
        """Raises UsageError for a bad scheme. `run_bench` checks the rest."""
        for text in self.schemes:
            parse_scheme(text)
