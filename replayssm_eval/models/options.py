"""Options that say which model to load, and how."""

from dataclasses import dataclass, fields
from typing import Any

from replayssm_emulation import UsageError

from ..results.options import Options, option

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE_HELP = "Device to run on: auto, cpu, cuda, cuda:1, ..."


def model_option(default: str) -> Any:
    """The field `model` of a command whose default is another model."""
    return option(default, "Name (see `models`), hub id or local folder.")


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Which checkpoint to load, in which type and on which device.

    model: a registry name, a hub id or a local folder. dtype: "auto" is float32 for a testbed and the checkpoint's own
    type otherwise. device: "auto" is the GPU when there is one. revision: branch, tag or commit of a hub model.
    """

    model: str = model_option("tiny-mamba2")
    dtype: str = option("auto", "Type of the weights: auto, float32, bfloat16 or float16.")
    device: str = option("auto", DEVICE_HELP)
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = option(False, "Run model code that comes with the checkpoint.")

    def check_model(self) -> None:
        """Raises UsageError for a type that weights cannot have."""
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


@dataclass(frozen=True)
class ModelOptions(CheckpointOptions):
    """All that `load` takes.

    device_map: how accelerate spreads the layers over devices. random_weights: build the true shape of a registered
    model with random bf16 weights and the testbed's tokenizer, for cost, memory and numerics, never for accuracy.
    """

    device_map: str | None = option(None, "Spread the layers over several devices (accelerate), e.g. auto.")
    random_weights: bool = option(
        False, "Build the true shape with random weights: for cost and memory, never for accuracy."
    )

    @classmethod
    def part(cls, options: CheckpointOptions) -> "ModelOptions":
        """The part of a command's options that concerns the model."""
        shared = {one.name for one in fields(cls)} & {one.name for one in fields(options)}
        return cls(**{name: getattr(options, name) for name in shared})
