"""The two switches of the recurrence: plain or delta rule, and one decay per head or per channel of d_k."""

from enum import Enum


class Rule(Enum):
    """How a layer updates its state. See `replayssm_emulation.recurrence` for the maths.

    PLAIN: S diag(α) + v kᵀ, one α per head (Mamba-2, lightning attention).
    DELTA: the delta rule with one α per head (Gated DeltaNet).
    DELTA_PER_CHANNEL: the delta rule with one α per channel of d_k (Kimi Delta Attention).
    """

    PLAIN = "plain"
    DELTA = "gdn"
    DELTA_PER_CHANNEL = "kda"

    @property
    def delta(self) -> bool:
        """Whether a write first subtracts what the state already says about its key."""
        return self is not Rule.PLAIN

    @property
    def per_channel(self) -> bool:
        """Whether every channel of d_k decays by itself."""
        return self is Rule.DELTA_PER_CHANNEL
