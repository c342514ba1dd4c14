"""The rows of a run: one batch row each for the reference, the control and every scheme with every seed."""

from collections.abc import Sequence
from dataclasses import dataclass

from replayssm_emulation import Scheme, parse_scheme
from replayssm_emulation.scheme import Copy
from replayssm_kernels import BatchRow


@dataclass(frozen=True)
class RunRow:
    """One row of a run. role: "reference", "control" or "scheme"."""

    scheme: Scheme
    seed: int
    role: str

    @property
    def name(self) -> str:
        """For messages. The seed is always there, so that two seeds are told apart."""
        return f"{self.scheme} (seed {self.seed})" if self.role == "scheme" else self.role

    @property
    def label(self) -> str:
        return label(str(self.scheme), self.seed, self.role)

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The stored copies of the state."""
        return tuple(copy for copy in (self.scheme.recurrence, self.scheme.read) if copy is not None)

    @property
    def rounds_state(self) -> bool:
        return any(copy.lossy for copy in self.copies)

    def count_flushes(self, prompt: int, start: int, stop: int) -> int:
        """How often the schedule rounds the state in the tokens [start, stop), after a prompt of `prompt` tokens."""
        return sum(rounded for _, rounded in BatchRow(self.scheme, prompt=prompt).folds(start, stop))


def label(scheme: str, seed: int, role: str) -> str:
    """Name of a row in tables, figures and progress: the role or the scheme, and the seed unless it is 0."""
    name = scheme if role == "scheme" else role
    return f"{name} seed {seed}" if seed else name


def run_rows(schemes: Sequence[Scheme], seeds: Sequence[int]) -> list[RunRow]:
    """Reference and control, then every scheme with every seed.

    A scheme that draws no noise takes the first seed only.
    """
    fp32 = parse_scheme("fp32")
    rows = [RunRow(fp32, 0, "reference"), RunRow(fp32, 0, "control")]
    for scheme in schemes:
        first = RunRow(scheme, seeds[0], "scheme")
        stochastic = any(copy.lossy and copy.rounding == "stochastic" for copy in first.copies)
        rows += [RunRow(scheme, seed, "scheme") for seed in seeds] if stochastic else [first]
    return rows
