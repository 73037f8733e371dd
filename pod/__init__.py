"""pod-kv: long-context language models that hold less memory without forgetting.

PoD stands for Proximal over Distant.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pod.modeling.cache_files import load_cache, save_cache
    from pod.modeling.loading import load_adapter, load_model
    from pod.modeling.methods import make_cache
    from pod.modeling.model.cache import PodCache
    from pod.modeling.model.config import PodConfig
    from pod.modeling.model.llama import PodForCausalLM, PodModel
    from pod.modeling.model.sharing import SharingPlan
    from pod.plan.calibration import calibrate_sinks
    from pod.registry import methods
    from pod.tokenizer import load_tokenizer

__version__ = "0.1.0"

__all__ = [
    "PodCache",
    "PodConfig",
    "PodForCausalLM",
    "PodModel",
    "SharingPlan",
    "calibrate_sinks",
    "load_adapter",
    "load_cache",
    "load_model",
    "load_tokenizer",
    "make_cache",
    "methods",
    "save_cache",
]

# Modules below `pod`, each with the public names that it defines. A name is imported when it is first used,
# so that `--help` of a launcher needs no torch.
_HOMES = {
    "modeling.cache_files": ("load_cache", "save_cache"),
    "modeling.loading": ("load_adapter", "load_model"),
    "modeling.methods": ("make_cache",),
    "modeling.model.cache": ("PodCache",),
    "modeling.model.config": ("PodConfig",),
    "modeling.model.llama": ("PodForCausalLM", "PodModel"),
    "modeling.model.sharing": ("SharingPlan",),
    "registry": ("methods",),
    "tokenizer": ("load_tokenizer",),
    "plan.calibration": ("calibrate_sinks",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"pod.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "transformers" in sys.modules:
    importlib.import_module("pod.modeling")  # makes our models known to transformers' auto classes
