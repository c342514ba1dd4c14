"""CUDA graphs of decoding: the steps of one window are captured once and replayed, window after window.

A step starts some hundred kernels, which takes Python longer than it takes a GPU to run them. All rows flush at the same
steps, so a window of L steps has L shapes; with every tensor at a fixed place those are L graphs. Noise is keyed by positions,
which a captured launch cannot be told: every window is launched as the first one was, and what its positions lag behind is
kept on the device (`Group.lag`). The kernels of the scan are the same, and so are its bits; attention runs over a cache with
empty places and may round differently.

On a CPU, where nothing can be captured, the same steps run as they are.
"""

import warnings
from typing import Any

import torch
from replayssm_emulation import RunError
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionLayer, StaticLayer

from .attention import NAME
from .forward import layer_devices
from .session import Session


class StepGraphs:
    """One decoding step after the other for a fixed batch: called with tokens `[B]`, returns logits `[B, vocabulary]`.

    window: steps from flush to flush. room: steps that can be taken. steps: taken so far. The logits hold until the next call.
    Rows may be moved, and anything else be done with cache or session, only after `close`.
    """

    def __init__(self, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int):
        self.model, self.session, self.cache, self.room = model, session, cache, room
        self.carries = list(session._carries.values())
        self.groups = [group for carry in self.carries for group in carry.groups]
        self.window = session.rows[0].scheme.window
        self.steps = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.may_capture = positions.is_cuda
        self.logits: Tensor | None = None
        self.positions = positions.clone()
        self.ids = torch.zeros_like(positions)
        self.seen = visible.shape[1]
        self.slot = torch.tensor([self.seen], device=positions.device)
        self.mask = torch.nn.functional.pad(visible, (0, room))[:, None, None]
        lag = torch.tensor([row.padding for row in session.rows], dtype=torch.int32, device=positions.device)
        # One tensor for all layers: they hold the same rows in the same order.
        self.lag = lag[torch.tensor(self.groups[0].rows, device=lag.device)]
        for group in self.groups:
            group.lag = self.lag
        cache.layers = [_with_room(layer, room) if type(layer) is DynamicLayer else layer for layer in cache.layers]

    @classmethod
    def begin(
        cls, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int
    ) -> "StepGraphs | None":
        """For the sequences that `cache` and `session` hold; None if they cannot be decoded so.

        positions `[B, 1]`: position ids of the next token. visible: bool `[B, tokens in the cache]`, False for padding.
        """
        carries = list(session._carries.values())
        alike = all(len(carry.groups) == 1 and carry.groups[0].rows == carries[0].groups[0].rows for carry in carries)
        at_start = alike and all(carry.groups[0].records[0].shape[1] == 0 for carry in carries)
        scheduled = all(row.flushes is None and row.prompt <= session.tokens for row in session.rows)
        whole = session.tokens == visible.shape[1] and len(set(layer_devices(model).values())) == 1
        known = all(type(layer) in (DynamicLayer, LinearAttentionLayer, DummyLayer) for layer in cache.layers)
        known &= all(
            layer < len(cache.layers) and type(cache.layers[layer]) is LinearAttentionLayer for layer in session.layers
        )
        attends = any(type(layer) is DynamicLayer for layer in cache.layers)
        masked = not attends or model.config.get_text_config()._attn_implementation == NAME
        if not (
            session.backend == "triton"
            and session.may_capture
            and at_start
            and scheduled
            and whole
            and known
            and masked
        ):
            return None
        return cls(model, session, cache, positions, visible, room)

    def __call__(self, tokens: Tensor) -> Tensor:
        assert self.steps < self.room
        self.ids.copy_(tokens[:, None])
        place = self.steps % self.window
        # The first window compiles and makes the tables that the captured launches read.
        if self.may_capture and not self.graphs and self.steps >= self.window and place == 0:
            self._capture()
        self.steps += 1
        if self.graphs:
            with torch.cuda.device(self.slot.device):
                self.graphs[place].replay()
        else:
            self._step(place)
            if place == self.window - 1:
                self._rewind()
        assert self.logits is not None
        return self.logits

    def close(self) -> Tensor:
        """Leave cache and session as if every step had been launched by itself; returns `visible` of `begin`. Only at the end
        of a window."""
        assert self.steps % self.window == 0
        for group in self.groups:
            group.lag = None
            group.flushes += self.steps // self.window
        for carry in self.carries:
            carry.position += self.steps
        for token in self._tokens():
            token[:, 1] += self.steps
        length = self.seen + self.steps
        self.cache.layers = [
            _without_room(layer, length) if type(layer) is StaticLayer else layer for layer in self.cache.layers
        ]
        return self.mask[:, 0, 0, :length]

    def _step(self, place: int) -> None:
        self.mask.index_fill_(3, self.slot, True)
        masks = (
            None
            if self.model.config.model_type == "mamba2"
            else {"full_attention": self.mask, "linear_attention": None}
        )
        logits = self.model(
            input_ids=self.ids, position_ids=self.positions, attention_mask=masks, cache=self.cache, use_cache=True
        ).logits[:, -1]  # fmt: skip
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)
        self.slot += 1
        self.positions += 1
        if place == self.window - 1:
            self.lag -= self.window
            for token in self._tokens():
                token[:, 1] -= self.window

    def _tokens(self) -> list[Tensor]:
        """What `Session.scan` left in the cache, of every state layer."""
        return [self.cache.layers[layer].recurrent_states[0] for layer in self.session.layers]

    def _rewind(self) -> None:
        """The next window is launched with the positions of this one; `close` counts what they lag behind."""
        for carry in self.carries:
            carry.position -= self.window
            carry.groups[0].flushes -= 1

    def _capture(self) -> None:
        device = self.slot.device
        held = [(carry.position, carry.groups[0].records, carry.groups[0].flushes) for carry in self.carries]
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(device):  # both the graph and the kernels go by the current device
            pool, stream, before = (
                torch.cuda.graph_pool_handle(),
                torch.cuda.Stream(device),
                torch.cuda.current_stream(device),
            )
            try:
                for place in range(self.window):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        self._step(place)
                    graphs.append(graph)
                self.graphs = graphs
            except RunError:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own
                raise
            except Exception as error:  # whatever a model does that cannot be captured; the compiler has its own kind
                torch.cuda.set_stream(before)
                self.may_capture = self.session.may_capture = False
                warnings.warn(
                    f"decoding without CUDA graphs, which is slower: {str(error).splitlines()[0]}", stacklevel=2
                )
        # Capturing computed nothing: nothing has been folded, and where the window began there were no records.
        for carry, (position, records, flushes) in zip(self.carries, held, strict=True):
            carry.position, carry.groups[0].records, carry.groups[0].flushes = position, records, flushes


def _with_room(layer: DynamicLayer, room: int) -> StaticLayer:
    """The keys and values of a layer, with room for more tokens at a fixed place."""
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    seen = keys.shape[2]
    static = StaticLayer(seen + room)
    static.lazy_initialization(keys, values)
    for whole, part in ((static.keys, keys), (static.values, values)):
        assert whole is not None
        whole[:, :, :seen] = part
    static.cumulative_length.fill_(seen)
    return static


def _without_room(layer: StaticLayer, length: int) -> DynamicLayer:
    """The first `length` keys and values."""
    assert layer.keys is not None
    assert layer.values is not None
    dynamic = DynamicLayer()
    dynamic.update(layer.keys[:, :, :length], layer.values[:, :, :length])
    return dynamic
