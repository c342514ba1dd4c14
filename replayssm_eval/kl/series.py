"""Per-token series of a run, and the file that holds them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from replayssm_emulation import Scheme
from torch import Tensor

from ..inference.metrics import TokenMetrics

METRICS = tuple(TokenMetrics.__dataclass_fields__)


@dataclass(frozen=True)
class RowInfo:
    """One batch row: role is "reference", "control" or "scheme"."""

    scheme: Scheme
    seed: int
    role: str

    @property
    def short(self) -> str:
        """For progress: the seed only where it is not the usual one."""
        return f"{self.scheme} seed {self.seed}" if self.seed else str(self.scheme)

    @property
    def name(self) -> str:
        """For messages: unlike the scheme alone, it tells two seeds apart."""
        return f"{self.scheme} (seed {self.seed})" if self.role == "scheme" else self.role


@dataclass
class Series:
    """The metrics of one book, chunk by chunk."""

    chunks: list[TokenMetrics] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(c.kl.shape[1] for c in self.chunks)

    def get(self, metric: str) -> np.ndarray:
        """`[R, tokens]` of one of METRICS."""
        return np.concatenate([getattr(c, metric) for c in self.chunks], axis=1)


def stack(series: Sequence[Series], tokens: int) -> dict[str, np.ndarray]:
    """Every metric as `[R, books, tokens]`."""
    return {metric: np.stack([one.get(metric)[:, :tokens] for one in series], axis=1) for metric in METRICS}


def parquet(rows: Sequence[RowInfo], series: Sequence[Series], ids: Sequence[Tensor]) -> bytes:
    """The per-token file: one line per book, row and position; equal runs give equal bytes.

    `token` is the token read at `position`; its metrics are those of the prediction that follows it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.dictionary(pa.int32(), pa.string())
    types = {
        "book": pa.int32(),
        "row": pa.int32(),
        "scheme": text,
        "seed": pa.uint64(),
        "role": text,
        "position": pa.int32(),
    }
    types |= {
        "token": pa.int32(),
        "kl": pa.float32(),
        "same_top1": pa.bool_(),
        "nll": pa.float32(),
        "entropy": pa.float32(),
    }
    schema = pa.schema(list(types.items()))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for book, (one, tokens) in enumerate(zip(series, ids, strict=False)):
            if not one.chunks:
                continue
            values = {metric: one.get(metric) for metric in METRICS}
            count = one.tokens
            for index, row in enumerate(rows):
                constant = {"book": book, "row": index, "scheme": str(row.scheme), "seed": row.seed, "role": row.role}
                columns = {name: pa.array([value] * count, types[name]) for name, value in constant.items()}
                columns |= {
                    "position": pa.array(np.arange(count), types["position"]),
                    "token": pa.array(tokens[:count].numpy(), types["token"]),
                }
                columns |= {metric: pa.array(array[index], types[metric]) for metric, array in values.items()}
                writer.write_table(pa.table([columns[name] for name in types], schema=schema))
    return sink.getvalue()
