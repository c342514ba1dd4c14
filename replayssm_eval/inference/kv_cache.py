"""Keys and values that stay where they are: a transformers cache layer with room for a whole text from the start.

transformers' own layer concatenates. Each chunk would copy all keys and values before it, and hold them twice for a
moment.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer


class _Room:
    """`update` for a `DynamicLayer`. room: tokens that fit in the memory; beyond it, everything is copied once."""

    room = 0
    _wholes: tuple[Tensor, ...] = ()

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[B, H, T, d]`; returns all keys and all values, views of the whole memory."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_seq_length()
        stop = seen + key_states.shape[2]
        held, wholes = (self.keys, self.values), []
        for index, (old, new) in enumerate(zip(held, (key_states, value_states), strict=True)):
            whole = self._wholes[index] if self._wholes else new[:0]
            # If other code has selected or cut rows, this memory is no longer ours.
            ours = seen and (old.data_ptr(), old.shape, old.stride()) == (
                whole.data_ptr(),
                whole[:, :, :seen].shape,
                whole.stride(),
            )
            if not ours or stop > whole.shape[2]:
                batch, heads, _, width = new.shape
                whole = new.new_empty(batch, heads, max(self.room, stop), width)
                if seen:
                    whole[:, :, :seen] = old
            whole[:, :, seen:stop] = new
            wholes.append(whole)
        self._wholes = tuple(wholes)
        self.keys, self.values = (whole[:, :, :stop] for whole in wholes)
        return self.keys, self.values

    def reset(self: Any) -> None:
        """Give the memory back too."""
        super().reset()  # type: ignore[misc]
        self._wholes = ()


class KeysWithRoom(_Room, DynamicLayer):
    """For an attention layer."""


class KeysAndStateWithRoom(_Room, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]  # as its base
    """For a layer that has attention and a state."""


_ROOMY = {DynamicLayer: KeysWithRoom, LinearAttentionAndFullAttentionLayer: KeysAndStateWithRoom}


def make_room(cache: Any, tokens: int) -> None:
    """Let layers of an empty cache hold `tokens` tokens without copying them. Other kinds of layers stay as is."""
    for index, layer in enumerate(cache.layers):
        if roomy := _ROOMY.get(type(layer)):
            cache.layers[index] = roomy()
            vars(cache.layers[index]).update(vars(layer), room=tokens)
