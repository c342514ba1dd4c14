"""Per-token series of a run, and the file that holds them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ..inference.metrics import TokenMetrics
from .rows import RunRow

METRICS = tuple(TokenMetrics.__dataclass_fields__)


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


def compared(series: Sequence[Series], tokens: int) -> list[Series]:
    """The books that results are made of: whole ones, of `tokens` tokens. Without any, the book that was cut short."""
    return [one for one in series if one.tokens == tokens] or [one for one in series if one.chunks]


def stack_books(series: Sequence[Series]) -> TokenMetrics:
    """The metrics of several books as one, arrays `[R, books, tokens]`, up to the end of the shortest book."""
    tokens = min(one.tokens for one in series)
    return TokenMetrics(*(np.stack([one.get(metric)[:, :tokens] for one in series], axis=1) for metric in METRICS))


_TEXT = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    [
        ("book", pa.int32()),
        ("row", pa.int32()),
        ("scheme", _TEXT),
        ("seed", pa.uint64()),
        ("role", _TEXT),
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("kl", pa.float32()),
        ("same_top1", pa.bool_()),
        ("nll", pa.float32()),
        ("entropy", pa.float32()),
    ]
)


def parquet(rows: Sequence[RunRow], series: Sequence[Series], ids: Sequence[Tensor]) -> bytes:
    """The per-token file: one line per book, row and position. Equal runs give equal bytes.

    `token` is the token read at `position`; its metrics are those of the prediction that follows it.
    """
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, _SCHEMA, compression="zstd") as writer:
        for book, (one, tokens) in enumerate(zip(series, ids, strict=False)):
            if not one.chunks:
                continue
            count = one.tokens
            metrics = {metric: one.get(metric) for metric in METRICS}
            for index, row in enumerate(rows):
                columns: dict[str, Any] = {
                    "book": [book] * count,
                    "row": [index] * count,
                    "scheme": [str(row.scheme)] * count,
                    "seed": [row.seed] * count,
                    "role": [row.role] * count,
                    "position": np.arange(count),
                    "token": tokens[:count].numpy(),
                    **{metric: values[index] for metric, values in metrics.items()},
                }
                arrays = [pa.array(columns[field.name], field.type) for field in _SCHEMA]
                writer.write_table(pa.table(arrays, schema=_SCHEMA))
    return sink.getvalue()
