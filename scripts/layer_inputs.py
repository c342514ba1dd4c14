"""What a model gives its state layers while it reads a text."""

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm_eval import attach
from replayssm_eval.inference.session import ScanInputs
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
    """By state layer, over the first tokens of Moby Dick."""
    loaded = load(name)
    text = load_books("builtin")[0].text[: 20 * tokens]
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])
    seen: dict[int, Layer] = {}
    with (
        torch.inference_mode(),
        attach(loaded.model, ["fp32"], backend=backend, probe=False) as session,
    ):

        def observe(layer: int, inputs: ScanInputs, o: Tensor) -> None:
            q, k, v, beta, log_decay = (x[0].double() for x in inputs)
            q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
            # The layer goes on to work in o: keep a copy.
            seen[layer] = Layer(q, k, v, beta, log_decay, o[0].clone(), session.rule.delta)

        with session.observed(observe):
            loaded.model(input_ids=ids[None].to(loaded.model.device), use_cache=False)
    return seen
