"""What the rest of the program must know about one family of models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayssm_emulation import Rule, UsageError


def attention_width(config: Any) -> int:
    """Elements that an attention layer keeps per token: keys and values of every key head."""
    heads = config.num_key_value_heads or config.num_attention_heads
    return 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def latent_width(config: Any) -> int:
    """Elements that a layer of latent attention keeps per token, with the keys of its indexer where it has one."""
    return config.kv_lora_rank + config.qk_rope_head_dim + getattr(config, "index_head_dim", 0)


@dataclass(frozen=True)
class Family:
    """Where a family computes its recurrent state, and where its models differ from those of other families.

    modeling: the transformers module whose functions are replaced. mixer: the class name of its state layers.
    patches(session): the replacements by function name, or by Class.method.
    shape(mixer): (heads, groups of keys, d_v, d_k). rule: how its layers update a state.
    cache(): an empty cache, for a model that does not take a DynamicCache.
    takes_masks: the model takes a dictionary of attention masks, one per kind of layer.
    chooses_keys: its attention layers read off the mask which keys they attend to, so a dense mask must be built.
    needs_attention: without attention layers, transformers still builds a causal mask, and crashes.
    kv_width(config): elements that an attention layer keeps per token.
    """

    modeling: str
    mixer: str
    patches: Callable[[Any], dict[str, Callable]]
    shape: Callable[[Any], tuple[int, int, int, int]]
    rule: Rule = Rule.PLAIN
    cache: Callable[[], Any] | None = None
    takes_masks: bool = True
    chooses_keys: bool = False
    needs_attention: bool = False
    kv_width: Callable[[Any], int] = attention_width

    def state_layers(self, model: Any) -> dict[int, Any]:
        """Layer index -> mixer of every layer that holds a recurrent state. Raises UsageError when there is none."""
        config = model.config.get_text_config()
        mixers = {m.layer_idx: m for m in model.modules() if type(m).__name__ == self.mixer}
        if not mixers:
            raise UsageError(
                f"this {config.model_type} model has no state layer (no {self.mixer}): there is nothing to round"
            )
        declared = getattr(config, "layer_types", None)
        if declared is not None:
            expected = [i for i, kind in enumerate(declared) if kind in ("linear_attention", "hybrid")]
            if sorted(mixers) != expected:
                raise UsageError(f"state layers found at {sorted(mixers)}, but the config declares {expected}")
        return dict(sorted(mixers.items()))
