"""CUDA graphs of decoding: the steps of one window are captured once and replayed, window after window.

A step starts some hundred kernels. Python takes longer to start them than a GPU takes to run them. All rows flush at
the same steps, so a window of L steps has L shapes. With every tensor at a fixed place, those are L graphs. A
captured launch cannot be told a new position, but noise is keyed by positions. Every window is therefore launched as
the first one was, and the device keeps how far its positions lag behind (`Group.lag`). The kernels of the scan are
the same, and so are its bits. Attention runs over a cache with empty places and may round differently.

On a CPU, where nothing can be captured, the same steps run one by one.
"""

import warnings
from typing import Any

import torch
from replayssm_emulation import RunError
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionLayer, StaticLayer

from ..models.families import family_of
from .attention import NAME
from .forward import layer_devices
from .session import Session
from .states import lengthen, token_in_cache


class StepGraphs:
    """One decoding step after the other for a fixed batch: called with tokens `[B]`, returns logits `[B, vocabulary]`.

    window: steps from flush to flush. room: steps that can be taken. steps: taken so far. cache, session, model: in use
    until `close`. Only then may rows be moved, or cache and session be used for something else.
    The logits hold until the next call.
    """

    def __init__(self, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int):
        self.model, self.session, self.cache, self.room = model, session, cache, room
        self.window = session.rows[0].scheme.window
        self.steps = 0
        self.positions = positions.clone()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._may_capture = positions.is_cuda
        self._takes_masks = family_of(model.config.get_text_config()).takes_masks
        self._logits: Tensor | None = None
        self._ids = torch.zeros_like(positions)
        self._seen = visible.shape[1]
        self._slot = torch.tensor([self._seen], device=positions.device)
        self._mask = torch.nn.functional.pad(visible, (0, room))[:, None, None]
        rows = session.states.common_rows()
        assert rows is not None
        padding = torch.tensor([row.padding for row in session.rows], dtype=torch.int32, device=positions.device)
        # One tensor for all layers: they hold the same rows in the same order.
        self._lag = padding[torch.tensor(rows, device=padding.device)]
        session.states.set_lag(self._lag)
        cache.layers = [_with_room(layer, room) if type(layer) is DynamicLayer else layer for layer in cache.layers]

    @classmethod
    def begin(
        cls, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int
    ) -> "StepGraphs | None":
        """Steps for the sequences that `cache` and `session` hold; None if they cannot be replayed.

        positions `[B, 1]`: position ids of the next token. visible: bool `[B, tokens in the cache]`, False for padding.
        """
        replayable = (
            session.backend == "triton"
            and session.may_capture
            and _at_one_place(model, session, visible)
            and _at_window_start(session)
            and _fits(model, cache, session)
        )
        return cls(model, session, cache, positions, visible, room) if replayable else None

    def __call__(self, tokens: Tensor) -> Tensor:
        assert self.steps < self.room
        self._ids.copy_(tokens[:, None])
        place = self.steps % self.window
        # The first window compiles and makes the tables that the captured launches read.
        if self._may_capture and not self._graphs and self.steps >= self.window and place == 0:
            self._capture()
        self.steps += 1
        if self._graphs:
            with torch.cuda.device(self._slot.device):
                self._graphs[place].replay()
        else:
            self._step(place)
            if place == self.window - 1:
                # The next window is launched with the positions of this one; `close` adds the difference.
                self.session.states.advance(-1, self.window)
        assert self._logits is not None
        return self._logits

    def close(self) -> Tensor:
        """Leave cache and session as if every step had been launched by itself. Only at the end of a window.

        Returns `visible` as `begin` takes it.
        """
        assert self.steps % self.window == 0
        self.session.states.set_lag(None)
        self.session.states.advance(self.steps // self.window, self.window)
        self._lengthen_tokens(self.steps)
        length = self._seen + self.steps
        self.cache.layers = [
            _without_room(layer, length) if type(layer) is StaticLayer else layer for layer in self.cache.layers
        ]
        return self._mask[:, 0, 0, :length]

    def _step(self, place: int) -> None:
        self._mask.index_fill_(3, self._slot, True)
        masks = {"full_attention": self._mask, "linear_attention": None} if self._takes_masks else None
        logits = self.model(
            input_ids=self._ids, position_ids=self.positions, attention_mask=masks, cache=self.cache, use_cache=True
        ).logits[:, -1]  # fmt: skip
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._slot += 1
        self.positions += 1
        if place == self.window - 1:
            self._lag -= self.window
            self._lengthen_tokens(-self.window)

    def _lengthen_tokens(self, steps: int) -> None:
        """In every state layer's place in the cache."""
        for layer in self.session.layers:
            token = token_in_cache(self.cache, layer)
            assert token is not None
            lengthen(token, steps)

    def _capture(self) -> None:
        device = self._slot.device
        before_capture = self.session.states.snapshot()
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(device):  # both the graph and the kernels go by the current device
            pool = torch.cuda.graph_pool_handle()
            stream, outer_stream = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            try:
                for place in range(self.window):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        self._step(place)
                    graphs.append(graph)
                self._graphs = graphs
                self.session.graphs_captured += len(graphs)
            except RunError:
                torch.cuda.set_stream(outer_stream)  # a capture that fails leaves its own
                raise
            except Exception as error:  # whatever a model does that cannot be captured; the compiler has its own kind
                torch.cuda.set_stream(outer_stream)
                self._may_capture = self.session.may_capture = False
                warnings.warn(
                    f"decoding without CUDA graphs, which is slower: {str(error).splitlines()[0]}", stacklevel=2
                )
        # Capturing computed nothing: nothing has been folded, and where the window began there were no records.
        self.session.states.put_back(before_capture)


def _at_one_place(model: Any, session: Session, visible: Tensor) -> bool:
    """Whether the cache's masks cover exactly what the states have seen, with the whole model on one device."""
    return session.tokens == visible.shape[1] and len(set(layer_devices(model).values())) == 1


def _at_window_start(session: Session) -> bool:
    """Whether all rows flush at the same steps from here on, and a window has just ended."""
    scheduled = all(row.flushes is None and row.prompt <= session.tokens for row in session.rows)
    return scheduled and session.states.common_rows() is not None and session.states.at_window_start()


def _fits(model: Any, cache: Any, session: Session) -> bool:
    """Whether every layer of the cache can stay at a fixed place, and attention takes a mask over empty places."""
    layers = cache.layers
    known = all(type(layer) in (DynamicLayer, LinearAttentionLayer, DummyLayer) for layer in layers)
    known &= all(i < len(layers) and type(layers[i]) is LinearAttentionLayer for i in session.layers)
    attends = any(type(layer) is DynamicLayer for layer in layers)
    return known and (not attends or model.config.get_text_config()._attn_implementation == NAME)


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
