"""CUDA graphs of decoding: the steps of one window are captured once and replayed, window after window.

A step starts some hundred kernels, which takes Python longer than it takes a GPU to run them. All rows flush at the same
steps, so a window of L steps has L shapes; with every tensor at a fixed place those are L graphs. Noise is keyed by positions,
which a captured launch cannot be told: every window is launched as the first one was, and what its positions lag behind is
kept on the device (`Group.lag`). The kernels are those of the scan, and the bits are too.

Where nothing can be captured (Triton's interpreter on a CPU, or a model that looks at values while it runs) the same steps run
as they are.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionLayer, StaticLayer

from .attention import NAME
from .session import Session


class StepGraphs:
    """One decoding step after the other for a fixed batch: called with tokens `[B]`, returns logits `[B, vocabulary]`.

    window: steps from flush to flush. steps: taken so far. The logits hold until the next call. Rows may be moved, and anything else
    be done with cache or session, only after `close`, at the end of a window.
    """

    def __init__(self, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int):
        self.model, self.session, self.cache = model, session, cache
        self.carries = list(session._carries.values())
        self.groups = [group for carry in self.carries for group in carry.groups]
        self.window = session.rows[0].scheme.window
        self.steps = self.replayed = 0
        self.graphs: list[torch.cuda.CUDAGraph] | None = [] if positions.is_cuda else None  # None: run as they are
        self.logits: list[Tensor] = []
        self.positions = positions.clone()
        self.ids = torch.zeros_like(positions)
        seen = visible.shape[1]
        self.slot = torch.tensor([seen], device=positions.device)
        self.mask = torch.nn.functional.pad(visible, (0, room))[:, None, None]
        lag = torch.tensor([row.padding for row in session.rows], dtype=torch.int32, device=positions.device)
        # One tensor for all layers: they hold the same rows in the same order.
        self.lag = lag[torch.tensor(self.groups[0].rows, device=lag.device)]
        for group in self.groups:
            group.lag = self.lag
        cache.layers = [_static(layer, seen, room) if isinstance(layer, DynamicLayer) else layer for layer in cache.layers]

    @classmethod
    def begin(cls, model: Any, session: Session, cache: Any, positions: Tensor, visible: Tensor, room: int) -> "StepGraphs | None":
        """For the sequences that `cache` and `session` hold; None if they cannot be decoded so.

        positions `[B, 1]`: position ids of the next token. visible: bool `[B, tokens in the cache]`, False for padding. room: tokens
        that may follow.
        """
        carries = list(session._carries.values())
        alike = all(len(carry.groups) == 1 and carry.groups[0].rows == carries[0].groups[0].rows for carry in carries)
        at_start = alike and all(carry.groups[0].records[0].shape[1] == 0 for carry in carries)
        scheduled = all(row.flushes is None for row in session.rows)
        known = all(type(layer) in (DynamicLayer, StaticLayer, LinearAttentionLayer, DummyLayer) for layer in cache.layers)
        known &= all(layer < len(cache.layers) and type(cache.layers[layer]) is LinearAttentionLayer for layer in session.layers)
        masked = model.config.get_text_config()._attn_implementation == NAME or not any(
            isinstance(layer, (DynamicLayer, StaticLayer)) for layer in cache.layers
        )
        if not (session.backend == "triton" and carries and at_start and scheduled and known and masked):
            return None
        return cls(model, session, cache, positions, visible, room)

    def __call__(self, tokens: Tensor) -> Tensor:
        self.ids.copy_(tokens[:, None])
        place = self.steps % self.window
        # The first window compiles and makes the tables that the captured launches read.
        if self.graphs == [] and self.steps >= self.window and place == 0:
            self._capture()
        self.steps += 1
        if self.graphs:
            self.graphs[place].replay()
            self.replayed += place == self.window - 1
            return self.logits[place]
        logits = self._step(place)
        if place == self.window - 1:
            self._rewind()
        return logits

    def visible(self) -> Tensor:
        """`visible` of `begin`, with the tokens since."""
        return self.mask[:, 0, 0, : int(self.slot)]

    def close(self) -> None:
        """Leave cache and session as if every step had been launched by itself. Only at the end of a window."""
        assert self.steps % self.window == 0
        for group in self.groups:
            group.lag = None
            group.flushes += self.replayed
        for carry in self.carries:
            carry.position += self.steps
        for token in self._tokens():
            token[:, 1] += self.steps

    def _step(self, place: int) -> Tensor:
        self.mask.index_fill_(3, self.slot, True)
        masks = None if self.model.config.model_type == "mamba2" else {"full_attention": self.mask, "linear_attention": None}
        logits = self.model(
            input_ids=self.ids, position_ids=self.positions, attention_mask=masks, cache=self.cache, use_cache=True
        ).logits[:, -1]  # fmt: skip
        self.slot += 1
        self.positions += 1
        if place == self.window - 1:
            self.lag -= self.window
            for token in self._tokens():
                token[:, 1] -= self.window
        return logits

    def _tokens(self) -> list[Tensor]:
        """What `Session.scan` left in the cache, of every state layer."""
        return [self.cache.layers[layer].recurrent_states[0] for layer in self.session.layers]

    def _rewind(self) -> None:
        """The next window is launched with the positions of this one."""
        for carry in self.carries:
            carry.position -= self.window

    def _capture(self) -> None:
        held = [(carry.position, carry.groups[0].records, carry.groups[0].flushes) for carry in self.carries]
        pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            for place in range(self.window):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.logits.append(self._step(place))
                graphs.append(graph)
            self.graphs = graphs
        except RuntimeError as error:
            warnings.warn(f"decoding without CUDA graphs, which is slower: {str(error).splitlines()[0]}", stacklevel=2)
            self.graphs = None
        # Capturing computed nothing: nothing has been folded, and where the window began there were no records.
        for carry, (position, records, flushes) in zip(self.carries, held, strict=True):
            carry.position, carry.groups[0].flushes = position, flushes
            if self.graphs is None:
                carry.groups[0].records = records


def _static(layer: DynamicLayer, seen: int, room: int) -> StaticLayer:
    """The keys and values of a layer with room for as many tokens."""
    static, keys, values = StaticLayer(seen + room), layer.keys, layer.values
    assert keys is not None
    assert values is not None
    static.lazy_initialization(keys, values)
    for whole, part in ((static.keys, keys), (static.values, values)):
        assert whole is not None
        whole[:, :, :seen] = part
    static.cumulative_length.fill_(seen)
    return static
