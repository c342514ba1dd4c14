"""Which models hold a recurrent state, and where their modeling code computes it: one module per kind of recurrence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayssm_emulation import UsageError

from . import mamba2


@dataclass(frozen=True)
class Family:
    """modeling: the transformers module whose functions are replaced; mixer: the class name of its state layers.

    patches(session): the replacements by function name. delta: whether the recurrence is a delta rule.
    """

    modeling: str
    mixer: str
    patches: Callable[[Any], dict[str, Callable]]
    delta: bool = False


FAMILIES = {
    "mamba2": Family("transformers.models.mamba2.modeling_mamba2", "Mamba2Mixer", mamba2.patches),
    "nemotron_h": Family("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHMamba2Mixer", mamba2.patches),
}

_MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")


def family_of(config: Any) -> Family:
    """The family of a model's config. Raises UsageError, with the reason, for a model that cannot be emulated."""
    kind = getattr(config, "model_type", None)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in _MAMBA_1:
        raise UsageError(
            f"model type {kind!r} is Mamba-1: its decay differs for every state element, so a window has no matrix form, and "
            "its transformers code resets the state between calls; use a Mamba-2 model"
        )
    raise UsageError(f"model type {kind!r} has no recurrent state layers that are known here; known: {', '.join(FAMILIES)}")
