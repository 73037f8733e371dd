"""pod-kv: long-context language models that hold less memory without forgetting (PoD, Proximal over Distant)."""

from pod import kernels as _kernels  # registers its implementations of attention
from pod.engine import attach_for_generation as _attach_for_generation
from pod.modeling.cache_files import load_cache, save_cache
from pod.modeling.loading import load_model, load_tokenizer
from pod.modeling.methods import make_cache, methods
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM, PodModel
from pod.modeling.shipped.sharing import SharingPlan

__all__ = [
    "PodCache",
    "PodConfig",
    "PodForCausalLM",
    "PodModel",
    "SharingPlan",
    "load_cache",
    "load_model",
    "load_tokenizer",
    "make_cache",
    "methods",
    "save_cache",
]

_kernels.register()
PodCache.attach_engine = staticmethod(_attach_for_generation)
