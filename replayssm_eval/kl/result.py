"""The result of a run, typed, and the one function that makes it kl.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..results.provenance import Provenance
from .rows import label
from .statistics import ENTROPY_EDGES, Bin, RowStatistics

SCHEMA = "replayssm-eval/kl@1"
_VOCABULARY_RULE = "every column of the output head counts, padding included"
_ENTROPY_MEANING = "reference, nats; the last bucket is open"


@dataclass(frozen=True)
class RowResult:
    """One row. flushes: how often its state was rounded in every layer."""

    scheme: str
    seed: int
    role: str
    statistics: RowStatistics
    flushes: int

    @property
    def label(self) -> str:
        return label(self.scheme, self.seed, self.role)

    @property
    def growth(self) -> float | None:
        """Mean KL of the last position bin over that of the first. None with one bin, or without a first KL."""
        means = self.statistics.kl_mean
        first, last = means[0], means[-1]
        return last / first if first and last is not None and len(means) > 1 else None


@dataclass(frozen=True)
class Records:
    """Dtypes in which the model supplies the inputs of a state layer."""

    v: str
    k: str
    beta: str
    log_decay: str


@dataclass(frozen=True)
class LayerManifest:
    """What was seen of one state layer at the end. Heads of `d_v` x `d_k` elements.

    state_held_in: dtypes. zeroed_share: by row, the share of non-zero elements that the newest read copy holds as zero.
    conv_state: dtype; None for a layer without a convolution.
    """

    layer: int
    heads: int
    d_v: int
    d_k: int
    state_held_in: list[str]
    zeroed_share: list[float]
    records: Records
    conv_state: str | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "LayerManifest":
        """From an entry of `Session.manifest`, or of the JSON that a checkpoint keeps."""
        return cls(**{**entry, "records": Records(**entry["records"])})


@dataclass(frozen=True)
class ModelFacts:
    """The model that ran. info: what `load` says of it (name, location, dtype, device, ...)."""

    info: Mapping[str, Any]
    state_layers: Sequence[LayerManifest]

    @property
    def name(self) -> str:
        return self.info["name"]

    @property
    def dtype(self) -> str:
        return self.info["dtype"]

    @property
    def device(self) -> str:
        return self.info["device"]

    @property
    def random_weights(self) -> bool:
        return bool(self.info.get("random_weights"))


@dataclass(frozen=True)
class BookFacts:
    """One text. source: its file or data set. sha256: of the UTF-8 text.

    tokens_read: fewer than asked for after an interrupt.
    """

    title: str
    source: str
    sha256: str
    characters: int
    tokens_read: int


@dataclass(frozen=True)
class CorpusFacts:
    """The texts. split: of pg19, else None."""

    name: str
    split: str | None
    special_tokens: str
    books: Sequence[BookFacts]


@dataclass(frozen=True)
class Timing:
    """Seconds by part; None for what did not take place. The first two are of the Triton scan."""

    compiled_kernels: int | None = None
    start_up_s: float | None = None
    reading_s: float | None = None


@dataclass(frozen=True)
class KlResult:
    """What a run found. status: "complete", "failed" (see problems) or "interrupted".

    tokens: of every book, the prompt included. options: as JSON. vocabulary: columns of the output head.
    entropy_tokens: tokens in each bucket of ENTROPY_EDGES. intervals: how they are made, in words.
    rows: the reference, the control, then the schemes.
    """

    status: str
    problems: Sequence[str]
    model: ModelFacts
    corpus: CorpusFacts
    tokens: int
    prompt_tokens: int
    backend: str
    options: Mapping[str, Any]
    vocabulary: int
    bins: Sequence[Bin]
    entropy_tokens: Sequence[int]
    intervals: str
    rows: Sequence[RowResult]
    provenance: Provenance
    timing: Timing

    @property
    def control(self) -> RowResult:
        return self.rows[1]

    @property
    def compared(self) -> Sequence[RowResult]:
        """All rows but the reference."""
        return self.rows[1:]

    @property
    def schemes(self) -> Sequence[RowResult]:
        return self.rows[2:]


def as_json(result: KlResult) -> dict[str, Any]:
    """What kl.json holds. The keys and their order are documented: a change needs another SCHEMA."""
    return {
        "schema": SCHEMA,
        "status": result.status,
        "problems": list(result.problems),
        "model": {**result.model.info, "state_layers": [_layer_json(layer) for layer in result.model.state_layers]},
        "corpus": asdict(result.corpus),
        "tokens": result.tokens,
        "prompt_tokens": result.prompt_tokens,
        "backend": result.backend,
        "options": dict(result.options),
        "vocabulary": {"columns": result.vocabulary, "rule": _VOCABULARY_RULE},
        "bins": list(result.bins),
        "entropy_buckets": {
            "edges": [*ENTROPY_EDGES, None],
            "tokens": list(result.entropy_tokens),
            "of": _ENTROPY_MEANING,
        },
        "intervals": result.intervals,
        "rows": [_row_json(row) for row in result.rows],
        "control": {"kl_max": result.control.statistics.kl_max},
        "provenance": {**result.provenance.as_json(), **_without_none(asdict(result.timing))},
    }


def _layer_json(layer: LayerManifest) -> dict[str, Any]:
    entry = asdict(layer)
    return entry if layer.conv_state is not None else _without_none(entry)


def _row_json(row: RowResult) -> dict[str, Any]:
    return {
        "scheme": row.scheme,
        "seed": row.seed,
        "role": row.role,
        **asdict(row.statistics),
        "flushes": row.flushes,
    }


def _without_none(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value is not None}
