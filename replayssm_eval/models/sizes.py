"""What a model keeps per sequence: states, records and copies, beside its KV cache. Reads configs, never weights."""

from pathlib import Path
from typing import Any

from replayssm_emulation import Rule, Scheme, UsageError, parse_scheme
from replayssm_emulation.scheme import Copy

from .loading import auto_class, location_of
from .registry import REGISTRY

SCHEMES = ("fp32@1", "fp16@16", "fp8@16", "nvfp4@16", "fp8/fp16@16", "nvfp4/fp16@16")


def model_sizes(name: str) -> dict[str, Any]:
    """JSON-able facts of a registry name, local folder or cached hub id. Bytes are per sequence and cover all layers.

    state_bytes: fp32 states. record_bytes_per_token: inputs in 16 bits and gates in fp32. kv_bytes_per_token: keys and
    values in bf16, or their latent form if the model caches that. crossover_tokens: the context length at which the KV
    cache outgrows the states. schemes: bytes of the copies, and of the records of one window if the scheme keeps one.
    Raises UsageError for a model that cannot be found.
    """
    import torch
    from replayssm_tasks.hub import hub_reachable
    from transformers import AutoConfig, AutoModelForCausalLM

    from .families import family_of

    entry = REGISTRY.get(name)
    if entry is not None and entry.shape is not None:
        config = AutoConfig.for_model(**entry.shape)
    else:
        location = location_of(name)
        try:
            config = AutoConfig.from_pretrained(
                location, local_files_only=Path(location).is_dir() or not hub_reachable()
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"model {name} ({location}): no config: {' '.join(str(error).split())[:200]}") from None
    text = config.get_text_config()
    family = family_of(text)
    with torch.device("meta"):
        kind = auto_class(text)
        model = kind.from_config(text if kind is AutoModelForCausalLM else config)
    layers = family.state_layers(model)
    heads, groups, d_v, d_k = family.shape(next(iter(layers.values())))
    record = len(layers) * (2 * (heads * d_v + groups * d_k) + 4 * heads * _gates_per_head(family.rule, d_k))
    elements = len(layers) * heads * d_v * d_k
    attention = sum(kind in ("full_attention", "hybrid", "indexed_attention") for kind in text.layer_types)
    kv = 2 * attention * family.kv_width(text)
    return {
        "name": name,
        "type": text.model_type,
        "parameters": model.num_parameters(),
        "confirmed": entry.confirmed if entry else "",
        "layers": text.num_hidden_layers,
        "state_layers": len(layers),
        "heads": heads,
        "groups": groups,
        "d_v": d_v,
        "d_k": d_k,
        "state_bytes": 4 * elements,
        "record_bytes_per_token": record,
        "kv_bytes_per_token": kv,
        "crossover_tokens": 4 * elements // kv if kv else None,
        "schemes": {str(s): _stored(s, elements, d_v, d_k, record) for s in map(parse_scheme, SCHEMES)},
    }


def _gates_per_head(rule: Rule, d_k: int) -> int:
    """Gates that a record keeps: log α and β. Mamba-2 makes both from its Δ."""
    if rule.per_channel:
        return d_k + 1
    return 2 if rule.delta else 1


def _stored(scheme: Scheme, elements: int, d_v: int, d_k: int, record: int) -> dict[str, int]:
    def copy(copy: Copy | None) -> int:
        return 0 if copy is None else round(elements * copy.format.bits_per_element(d_v, d_k) / 8)

    records = record * scheme.window if scheme.window > 1 else 0
    return {"copies": copy(scheme.recurrence) + copy(scheme.read), "records": records}
