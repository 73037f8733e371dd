"""Methods by name: a method is a cache that you hand to ``generate()``. One file each; registered here once."""

from functools import partial
from typing import Any

from pod.modeling.methods import (
    adakv,
    d2o,
    expected_attention,
    h2o,
    imdc,
    kvzip,
    layouts,
    minicache,
    pyramidkv,
    quest,
    razor,
    roco,
    shared_selection,
    simlayerkv,
    sliding,
    think,
    windowed,
)
from pod.modeling.methods.base import Method, build_cache
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.rows import GroupedCache
from pod.modeling.shipped.state import PACKAGES

PACKAGES.add(__name__)

_RANKINGS = shared_selection, pyramidkv, adakv, expected_attention, kvzip, h2o, roco, d2o
_OTHERS = simlayerkv, razor, quest, minicache, think
_ALONE = (module.METHOD for module in (sliding, *_RANKINGS, *_OTHERS))
_SELECTIONS = *windowed.METHODS, *_ALONE, *imdc.METHODS
_METHODS: dict[str, Method] = {
    method.name: method for method in (*layouts.LAYOUTS, *_SELECTIONS, *layouts.CODECS)
}


def methods() -> dict[str, Method]:
    """All methods by name: axis, paper, parameters with defaults and units, what they free and refuse."""
    return dict(_METHODS)


def make_cache(
    model: PodForCausalLM, spec: str | None = None, budget: int | list[int] | None = None, **params
) -> PodCache:
    """A new, empty cache for ``model``.

    Args:
        spec: a method, or methods of different axes joined by ``+``, as ``pod+snapkv+int4``; None = the model's own
            layout: ``full``, ``pod`` with a sharing plan, ``cla`` or ``window``.
        budget: tokens per KV head and layer, sinks and windows included; for methods that drop tokens. A list gives each row of
            the batch its own.
        params: parameters of the methods in the spec, see ``methods()``.

    Raises:
        ValueError: unknown name or parameter, methods that do not go together (with the reason), a budget that is too
            small, a method that does not fit the model.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "own_method"):
        kind = type(model).__name__
        raise ValueError(f"a {kind} has no PoD cache: give the model that pod.load_model(…) makes of it")
    name = config.own_method if spec is None else spec
    build = partial(build_cache, _METHODS, config, name, params=params)
    if isinstance(budget, list):
        sizes = list(dict.fromkeys(budget)) or [0]  # which is refused
        cache = GroupedCache.of_kinds([build(size) for size in sizes], [sizes.index(size) for size in budget])
    else:
        cache = build(budget)
    cache.made_with = budget, params
    return cache
