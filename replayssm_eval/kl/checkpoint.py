"""An unfinished KL run on disk: the metrics of every finished chunk, and the model's state to go on from.

parts/00000-00002048.npz   metrics of document 0, tokens [2048, ...), written after every chunk
parts/state.safetensors    all states and caches after the newest chunk, replaced after every chunk (less often when
                           writing takes long: at most a twentieth of the run)
"""

import io
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from replayssm_emulation import UsageError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from ..inference.kv_cache import KeysAndStateWithRoom, KeysWithRoom
from ..inference.metrics import TokenMetrics
from ..inference.session import Session
from ..results.files import write_atomic
from .result import LayerManifest
from .series import METRICS, Series

#: What decides the numbers of a run: a name such as "options" or "code in kernels", and its value or digest.
Fingerprint = Mapping[str, str]

_SHARE_OF_RUN = 1 / 20
_KNOWN = (KeysWithRoom, LinearAttentionLayer, KeysAndStateWithRoom, DummyLayer)


class Checkpoint:
    """The `parts` folder of one run.

    fingerprint: parts with another one are refused. manifest: of the newest chunk that was loaded.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, tokens: int):
        self.folder, self.fingerprint, self.tokens = folder, fingerprint, tokens
        self._state = folder / "state.safetensors"
        self._next_save = 0.0
        self.manifest: list[LayerManifest] = []

    def save_chunk(self, document: int, position: int, metrics: TokenMetrics, manifest: list[dict[str, Any]]) -> None:
        """Keep the metrics of the chunk that starts at `position`, and what was seen of the state layers after it."""
        sink = io.BytesIO()
        arrays: dict[str, Any] = {name: getattr(metrics, name) for name in METRICS}
        facts = {"fingerprint": self.fingerprint, "manifest": manifest}
        np.savez(sink, facts=np.array(json.dumps(facts)), **arrays)
        write_atomic(self.folder / f"{document:05d}-{position:08d}.npz", sink.getvalue())

    def save_state(self, document: int, position: int, session: Session, cache: DynamicCache) -> None:
        """Keep everything that the next chunk starts from, unless the last save is too recent for its cost.

        Caches of other kinds hold more than is kept here: their documents are then begun anew.
        """
        started = time.monotonic()
        if (
            started < self._next_save
            or type(cache) is not DynamicCache
            or not all(type(layer) in _KNOWN for layer in cache.layers)
        ):
            return
        tensors, meta = session.export()
        for index, layer in enumerate(cache.layers):
            for name, tensor in _cache_tensors(layer).items():
                tensors[f"cache.{index}.{name}"] = tensor
        meta |= {"fingerprint": self.fingerprint, "document": document, "position": position}
        data = save({k: _on_host(t) for k, t in tensors.items()}, metadata={"run": json.dumps(meta)})
        write_atomic(self._state, data)
        now = time.monotonic()
        self._next_save = now + (now - started) / _SHARE_OF_RUN

    def load_chunks(self) -> list[Series]:
        """Per document, the finished chunks that a run can continue from. The last document may end at the saved state.

        Raises UsageError for damaged parts and for parts of another run, with what differs.
        """
        by_document: dict[int, dict[int, TokenMetrics]] = {}
        for path in sorted(self.folder.glob("*.npz")):
            with _refusing_damage(path), np.load(path, allow_pickle=False) as part:
                facts = json.loads(str(part["facts"]))
                self._check(facts["fingerprint"], path)
                document, position = (int(n) for n in path.stem.split("-"))
                self.manifest = [LayerManifest.read(entry) for entry in facts["manifest"]]
                by_document.setdefault(document, {})[position] = TokenMetrics(*(part[n] for n in METRICS))
        saved_document, saved_position = self._saved_at() or (-1, 0)
        documents: list[Series] = []
        while len(documents) in by_document:
            chunks = by_document[len(documents)]
            covered, saved = _covered(chunks), saved_position if saved_document == len(documents) else 0
            stop = self.tokens if covered >= self.tokens else saved if covered >= saved else 0
            documents.append(Series([chunks[p] for p in sorted(chunks) if p < stop]))
            if stop < self.tokens:
                break
        return documents

    def load_state(self, session: Session, cache: DynamicCache, devices: dict[int, Any]) -> None:
        """Put back what `save_state` kept, into an attached session and an empty cache; devices: of each layer."""
        with safe_open(str(self._state), framework="pt") as file:
            meta = json.loads(file.metadata()["run"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            session.restore({k: t for k, t in tensors.items() if k.startswith("state.")}, meta)
            for index in range(len(cache.layers)):
                mine = {k.split(".")[2]: t for k, t in tensors.items() if k.startswith(f"cache.{index}.")}
                stored = {name: tensor.to(devices[index]) for name, tensor in mine.items()}
                if "keys" in stored:
                    cache.update(stored["keys"], stored["values"], index)
                if "conv" in stored:
                    cache.update_conv_state(stored["conv"], index)
                if "recurrent" in stored:
                    cache.update_recurrent_state(stored["recurrent"], layer_idx=index)

    def remove(self) -> None:
        """Delete our parts: the run is complete, or starts anew."""
        for path in [*self.folder.glob("*.npz"), self._state]:
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _saved_at(self) -> tuple[int, int] | None:
        if not self._state.exists():
            return None
        with _refusing_damage(self._state), safe_open(str(self._state), framework="pt") as file:
            meta = json.loads(file.metadata()["run"])
        self._check(meta["fingerprint"], self._state)
        return meta["document"], meta["position"]

    def _check(self, saved: Fingerprint, path: Path) -> None:
        """Raises UsageError with the names of what differs from the run that wrote `path`."""
        names = dict.fromkeys([*self.fingerprint, *saved])
        if differing := [name for name in names if saved.get(name) != self.fingerprint.get(name)]:
            raise UsageError(
                f"{path} belongs to a run with other {', '.join(differing)}: "
                "pass --overwrite, or go on as that run began"
            )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy row by row. `.cpu()` on a padded view would first clone the whole tensor on the GPU."""
    if tensor.is_contiguous():
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    for place, row in zip(host, tensor, strict=True):
        place.copy_(row)
    return host


@contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    """A cut or foreign file is one clear line, never half a run."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, EOFError, KeyError, ValueError, TypeError, BadZipFile, SafetensorError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}): delete it, or pass --overwrite") from None


def _covered(chunks: dict[int, TokenMetrics]) -> int:
    """Tokens covered without a gap from 0 on."""
    position = 0
    while position in chunks:
        position += chunks[position].kl.shape[1]
    return position


def _cache_tensors(layer: Any) -> dict[str, Any]:
    """Tensors of a transformers cache layer: keys and values, or the conv and recurrent state of a state layer."""
    tensors = {"keys": getattr(layer, "keys", None), "values": getattr(layer, "values", None)}
    tensors["conv"] = getattr(layer, "conv_states", {}).get(0)
    tensors["recurrent"] = getattr(layer, "recurrent_states", {}).get(0)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.numel()}
