"""How a transformers model is called here: its last hidden states, many tokens at a time or token by token."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..models.families import family_of
from .kv_cache import make_room


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Device of every layer that knows its index."""
    layers = ((m.layer_idx, next(m.parameters(), None)) for m in model.modules() if hasattr(m, "layer_idx"))
    return {index: weight.device for index, weight in layers if weight is not None}


def base_model(model: Any) -> Any:
    """The model without its head: the module whose output is the last hidden state."""
    return getattr(model, model.base_model_prefix)


def new_cache(model: Any, tokens: int = 0) -> Any:
    """An empty cache of the model's kind, with room for the keys and values of `tokens` tokens (see `make_room`)."""
    kind = family_of(model.config.get_text_config()).cache
    if kind is not None:
        return kind()
    cache = DynamicCache(config=model.config)
    make_room(cache, tokens)
    return cache


def hidden_states(model: Any, ids: Tensor, cache: Any, position: int) -> Tensor:
    """Last hidden states `[R, T, hidden]` of the tokens `ids` `[R, T]` at `position`, continuing `cache` (or None)."""
    inner = base_model(model)
    kwargs: dict[str, Any] = {"use_cache": cache is not None, "cache": cache}
    # Some families do not offset positions by the cache's length, and some cannot ask for it: always pass positions.
    if "position_ids" in inspect.signature(inner.forward).parameters:
        kwargs["position_ids"] = torch.arange(position, position + ids.shape[1], device=ids.device).expand(len(ids), -1)
    return inner(input_ids=ids, **kwargs).last_hidden_state


def hidden_states_by_token(model: Any, ids: Tensor, cache: Any, position: int) -> Tensor:
    """`hidden_states` as decoding computes them: one token after the other, through the one-token path of the model."""
    return torch.cat([hidden_states(model, ids[:, t : t + 1], cache, position + t) for t in range(ids.shape[1])], dim=1)
