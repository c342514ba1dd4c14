"""What a model gives its state layers while it reads a text."""

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm_eval import attach
from replayssm_eval.inference import session
from replayssm_eval.kl.corpus import load_books
from replayssm_eval.models.loading import load


class Layer(NamedTuple):
    """Inputs of `replay_scan` without a batch axis, in float64 and with a key for every head; o: its fp32 outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    o: Tensor
    delta: bool


def layer_inputs(name: str, tokens: int, backend: str = "auto") -> dict[int, Layer]:
    """Of every state layer, over the first tokens of Moby Dick."""
    loaded = load(name)
    text = load_books("builtin")[0].text[: 20 * tokens]
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
    seen: dict[int, Layer] = {}
    original = session.replay_scan

    def spy(*inputs, layer, delta, **kwargs):
        o, carry = original(*inputs, layer=layer, delta=delta, **kwargs)
        q, k, v, beta, log_decay = (x[0].double() for x in inputs[:5])
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
        seen[layer] = Layer(q, k, v, beta, log_decay, o[0].clone(), delta)  # the layer goes on to work in o
        return o, carry

    session.replay_scan = spy
    try:
        with torch.inference_mode(), attach(loaded.model, ["fp32"], backend=backend, probe=False):
            loaded.model(input_ids=ids[None].to(loaded.model.device), use_cache=False)
    finally:
        session.replay_scan = original
    return seen
