"""Caches in safetensors files: a model reads a prompt once, and any process can continue behind it.

The results are bit for bit those of a cache that was never saved.
"""

import hashlib
import json
import os
import re

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pod.engine import attach
from pod.files import atomic_write_bytes
from pod.modeling.methods import make_cache
from pod.modeling.model.cache import PodCache
from pod.modeling.model.cache_state import CacheState
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.placement import places_of

_KIND = "pod-kv cache"
_OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Finds the index of the layer in the name of a tensor."""


def save_cache(model: PodForCausalLM, cache: PodCache, path: str | os.PathLike) -> None:
    """Write everything that ``cache`` holds to a safetensors file of about ``cache.nbytes`` bytes.

    The file appears only when it is complete.

    Args:
        model: the model that filled the cache. ``load_cache`` refuses the file for a model with other
            weights.
        cache: the cache.
        path: the file to write. An existing one is replaced.

    Raises:
        ValueError: the cache is empty, its last pass failed, or it belongs to another model.
    """
    if not cache.is_initialized:
        raise ValueError("the cache is empty: feed a prompt before it is saved")
    cache.check_fits(model.config)
    state, engine, (budget, params) = cache.state(), cache.engine, cache.made_with
    made = {"spec": cache.spec, "budget": budget, "params": params, "engine": None}
    if engine is not None:
        capacity = cache.layers[0].capacity  # type: ignore[attr-defined]
        made["engine"] = {"capacity": capacity, "backend": engine.backend}
    metadata = {
        "kind": _KIND,
        "cache": json.dumps(made, default=os.fspath),
        "dtype": str(model.dtype),
        "facts": json.dumps(state.facts),
        "weights": _fingerprint(model),
    }
    # copied in host memory: a GPU that the cache fills has no room for a copy
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in state.tensors.items()}
    atomic_write_bytes(path, safetensors.torch.save(tensors, metadata))


def load_cache(model: PodForCausalLM, path: str | os.PathLike) -> PodCache:
    """Load the cache from a file that ``save_cache`` wrote.

    Each layer's tokens are put on the device of that layer, wherever they were when the cache was saved.

    Args:
        model: a model with the same configuration, dtype and weights as the one that filled the cache.
        path: the file.

    Raises:
        ValueError: the file does not exist, is damaged, or has another kind or schema; or the model has
            another shape, plan, windows, dtype or weights.
    """
    metadata, tensors = _read(path, places_of(model), model.device)
    try:
        if metadata["dtype"] != str(model.dtype):
            held = metadata["dtype"]
            raise ValueError(
                f"has a cache in {held}, the model is in {model.dtype}: load the model in {held}"
            )
        made = json.loads(metadata["cache"])
        facts = json.loads(metadata["facts"])
        cache = make_cache(model, made["spec"], made["budget"], **made["params"])
        if made["engine"] is not None and cache.engine is None:
            attach(cache, **made["engine"])
        cache.from_state(CacheState(tensors, facts))
        if metadata["weights"] != _fingerprint(model):
            raise ValueError(
                "this cache was filled by a model with other weights: load that model, or fill a new cache"
            )
        cache.check_integrity()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): save the cache again") from None
    return cache


def _fingerprint(model: PodForCausalLM) -> str:
    """16 hex digits: a hash of the rotation (RoPE) and of the first 32 numbers of every weight."""
    found = hashlib.sha256(json.dumps(model.config.rope_parameters, sort_keys=True, default=str).encode())
    for weight in model.parameters():
        found.update(weight.detach().flatten()[:32].float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _read(
    path: str | os.PathLike, devices: list[torch.device], others: torch.device
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file. Tensors of layer i are put on ``devices[i]``, others on ``others``."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise ValueError(f"{path} is not a cache that pod.save_cache wrote: name such a file")
            tensors = {}
            for name in list(file.keys()):
                found = _OF_LAYER.search(name)
                layer = int(found[1]) if found else len(devices)
                device = devices[layer] if layer < len(devices) else others
                # copied to memory of its own, aligned like a tensor that a pass made: sums keep their order
                tensors[name] = file.get_tensor(name).to(device, copy=True)
            return metadata, tensors
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}): save the cache again") from None
