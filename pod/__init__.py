"""pod-kv: long-context language models that hold less memory without forgetting (PoD, Proximal over Distant)."""

from functools import partial

from pod import engine as _engine
from pod.kernels import api as _api
from pod.kernels import statistics as _kernel_statistics
from pod.modeling import statistics as _statistics
from pod.modeling.loading import load_model, load_tokenizer
from pod.modeling.methods import make_cache, methods
from pod.modeling.shipped import attention as _attention
from pod.modeling.shipped import cache as _cache
from pod.modeling.shipped import reference as _reference
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
    "load_model",
    "load_tokenizer",
    "make_cache",
    "methods",
]


def _connect() -> None:
    """Give the kernels their reference, and the model the kernels."""
    _api.register(
        "reference",
        _api.Entry(
            _reference.causal_attention, _reference.pod_attention, _reference.window_attention, lambda q: None
        ),
    )
    operations = _attention.Backend._fields
    for name in ("auto", *_api.BACKENDS):
        if name != "reference":
            chosen = (partial(getattr(_api, operation), backend=name) for operation in operations)
            _attention.register_backend(name, _attention.Backend(*chosen))
    _statistics.OPERATIONS |= {
        name: getattr(_kernel_statistics, name) for name in ("attention_column_sums", "attention_rows")
    }
    _cache.ENGINE_HOOKS |= {
        "attach": _engine.attach,
        "generate": _engine.attach_for_generation,
        "packed_layer": _engine.packed_layer,
    }


_connect()
