"""Load a model by name: of the registry, any other hub id or a local folder."""

import hashlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replayssm_emulation import RunError, UsageError
from replayssm_emulation.errors import require

from .options import CheckpointOptions, ModelOptions
from .registry import REGISTRY, ModelEntry

_ASSETS = Path(__file__).parents[1] / "assets"


@dataclass
class Loaded:
    """A model in eval mode with its tokenizer. info: what goes into results (name, location, dtype, device, ...)."""

    model: Any
    tokenizer: Any
    info: dict[str, Any]


def weights_digest(model: Any) -> str:
    """SHA-256 over the name, shape and ends of every weight: tells two checkpoints apart without reading them whole."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        ends = (flat[:512].float().cpu().numpy().tobytes(), flat[-512:].float().cpu().numpy().tobytes())
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype))).encode() + b"".join(ends))
    return digest.hexdigest()


def location_of(name: str) -> str:
    """Folder or hub id of a registry name; other names are their own location."""
    entry = REGISTRY.get(name)
    return name if entry is None else str(_ASSETS / entry.location) if entry.testbed else entry.location


def auto_class(config: Any) -> Any:
    """The transformers class that builds a model of `config` with a language head.

    Some families have no class for text alone, only one for images and text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def load(wanted: str | CheckpointOptions, **changes: Any) -> Loaded:
    """The model that the options name: a registry name, a hub id or a local folder.

    wanted: a name, or the options of a command. changes: fields of `ModelOptions`, which win over the options.
    Random weights are the same in every run on the same number of GPUs.
    Raises UsageError when the model cannot be had or was not loaded completely.
    """
    import torch
    import transformers
    from replayssm_tasks.hub import hub_reachable
    from transformers import AutoConfig, AutoTokenizer

    from .families import family_of

    named = ModelOptions(model=wanted) if isinstance(wanted, str) else ModelOptions.part(wanted)
    options = replace(named, **changes)
    options.check_model()
    name, dtype, device = options.model, options.dtype, options.device
    device_map, revision = options.device_map, options.revision
    entry = REGISTRY.get(name)
    location = location_of(name)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device} cannot be used: {str(error).strip().splitlines()[0]}") from None
    if device_map:
        require("accelerate", "multi-gpu", "--device-map")
    if options.random_weights:
        return _random(name, entry, dtype, device, device_map)
    torch_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and entry and entry.testbed:
        torch_dtype = torch.float32
    # Notices about optional fast kernels would send users after packages that are replaced here anyway.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    local = Path(location).is_dir()
    # Without network the cache may still hold the model; asking for it alone spares minutes of retries.
    offline = not local and not hub_reachable()
    common = {
        "revision": revision,
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": local or offline,
    }
    try:
        config = AutoConfig.from_pretrained(location, **common)
        family_of(config.get_text_config())  # refuse before the weights are fetched
        tokenizer = AutoTokenizer.from_pretrained(location, **common)
        placement = {"device_map": device_map} if device_map else {}
        # From transformers 5.25 on, kernels of the hub replace whole layers by default, and bypass our functions.
        loaded: Any = auto_class(config).from_pretrained(
            location,
            dtype=torch_dtype,
            output_loading_info=True,
            use_safetensors=True,
            use_kernels=False,
            **placement,
            **common,
        )
    except UsageError:
        raise
    except Exception as error:  # damaged files raise whatever their parser raises
        reason = (
            "the hub cannot be reached and the model is not in the local cache"
            if offline
            else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )
        advice = "pass --model tiny-mamba2 (in the package), or a folder with config.json, safetensors and tokenizer"
        raise UsageError(f"model {name} ({location}) cannot be loaded: {reason}; {advice}") from None
    model, report = loaded
    faults = {
        kind: sorted(report[kind])[:3]
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")
        if report.get(kind)
    }
    if faults:
        raise UsageError(
            f"model {name}: weights do not fit the model: {faults}; a result would come from made-up weights"
        )
    if not device_map:
        model = model.to(device)
    model = model.eval()
    found = getattr(config, "_commit_hash", None) or revision
    return Loaded(model, tokenizer, _facts(name, entry.location if entry else name, model, found))


def _random(name: str, entry: ModelEntry | None, dtype: str, device: str, device_map: str | None) -> Loaded:
    """The true shape of `entry` with random weights, and a testbed's tokenizer: its ids fit every vocabulary."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    if entry is None or entry.shape is None:
        known = ", ".join(e.name for e in REGISTRY.values() if e.shape)
        raise UsageError(f"--random-weights: the true shape of {name} is not registered; known: {known}")
    config = AutoConfig.for_model(**entry.shape)
    torch_dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        empty = auto_class(config).from_config(config, dtype=torch_dtype)
    if device_map is None:
        placement = {"": device}
        needed = sum(p.numel() * p.itemsize for p in empty.parameters())
        gpu = torch.device(device).type == "cuda"
        there = torch.cuda.mem_get_info(device)[1] if gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise UsageError(
                f"{name}: its weights need {needed / 2**30:.0f} GiB in {torch_dtype}, "
                f"and {device} has {there / 2**30:.0f}"
            )
    else:
        placement = _spread(name, empty, device_map)  # sizes the devices itself
    places = {torch.device(place) for place in placement.values()}
    with torch.random.fork_rng(devices=[place for place in places if place.type == "cuda"]):
        torch.manual_seed(0)
        model = _filled(empty, placement)
    tokenizer = AutoTokenizer.from_pretrained(_ASSETS / "tiny-mamba2")
    return Loaded(
        model,
        tokenizer,
        {**_facts(name, entry.location, model, None), "random_weights": True, "tokenizer": "tiny-mamba2"},
    )


def _spread(name: str, empty: Any, device_map: str) -> dict[str, Any]:
    """Device by module of a model without weights, as transformers spreads checkpoints over GPUs."""
    import torch
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map != "auto":
        raise UsageError(f"--device-map {device_map}: random weights are spread by auto only")
    options = {"no_split_module_classes": empty._no_split_modules, "dtype": empty.dtype}
    placement = infer_auto_device_map(empty, max_memory=get_balanced_memory(empty, **options), **options)
    gpus = torch.cuda.device_count()
    if elsewhere := {str(place) for place in placement.values()} & ({"cpu", "disk"} if gpus else {"disk"}):
        raise UsageError(
            f"{name}: its weights do not fit on {gpus or 'no'} GPUs, some would go to {', '.join(sorted(elsewhere))}"
        )
    return placement


def _filled(empty: Any, placement: dict[str, Any]) -> Any:
    """A model that was built without weights, with random ones where `placement` says."""
    import torch

    for at, place in placement.items():
        empty.get_submodule(at).to_empty(device=place)
    floating = {at: x for at, x in [*empty.named_parameters(), *empty.named_buffers()] if x.is_floating_point()}
    with torch.no_grad():
        for x in floating.values():
            x.fill_(torch.nan)
    for module in empty.modules():
        module._is_hf_initialized = False  # they were, without memory
    empty.init_weights()
    if left := [at for at, x in floating.items() if x.isnan().any()]:
        raise RunError(f"{type(empty).__name__} leaves {left[:3]} without a value: random weights cannot be made")
    model = empty.eval()
    if len(placement) == 1:
        return model
    from accelerate import dispatch_model

    return dispatch_model(model, placement, skip_keys=model._skip_keys_device_placement)


def _facts(name: str, location: str, model: Any, revision: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "location": location,
        "revision": revision,
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "random_weights": False,
    }
