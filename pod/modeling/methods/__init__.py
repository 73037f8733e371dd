"""Methods by name: a method is a cache that you hand to ``generate()``. One file each; registered here once."""

from pod.modeling.cache import PodCache
from pod.modeling.llama import PodForCausalLM
from pod.modeling.methods import layouts, snapkv, streamingllm
from pod.modeling.methods.base import Method

_METHODS: dict[str, Method] = {
    method.name: method for method in (*layouts.METHODS, streamingllm.METHOD, snapkv.METHOD)
}


def methods() -> dict[str, Method]:
    """All methods by name: paper, parameters with defaults and units, what they free, what they need."""
    return dict(_METHODS)


def make_cache(
    model: PodForCausalLM, spec: str | None = None, budget: int | None = None, **params
) -> PodCache:
    """A new, empty cache for ``model``.

    Args:
        spec: name of a method; None = the model's own layout (``pod`` with a sharing plan, else ``full``).
        budget: tokens per KV head and layer, sinks and windows included; for methods that drop tokens.
        params: the method's own parameters, see ``methods()``.

    Raises:
        ValueError: unknown name or parameter, a combination that does not exist, a budget that is too small, a
            method that does not fit the model.
    """
    if spec is None:
        spec = "full" if model.config.sharing_plan.is_dense else "pod"
    if "+" in spec:
        raise ValueError(f"{spec!r}: combinations are not available yet; choose one of {', '.join(_METHODS)}")
    if spec not in _METHODS:
        raise ValueError(f"unknown method {spec!r}; choose one of {', '.join(_METHODS)}")
    return _METHODS[spec].make(model.config, budget, params)
