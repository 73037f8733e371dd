"""The code of each method, and ``make_cache``: a method is a cache that you hand to ``generate()``.

``pod/registry`` describes each method. A file of this package implements it, and lists it in ``BUILDERS``.
"""

from typing import Any

from pod.modeling.methods import kvzip
from pod.modeling.methods.base import build_cache, builder_of
from pod.modeling.methods.budgets import cache_of_budget, one_budget
from pod.modeling.model.cache import PodCache
from pod.modeling.model.cache_state import PACKAGES
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.placement import is_spread, places_of
from pod.notation import Spec, parse
from pod.registry import METHODS
from pod.registry.combine import in_order

PACKAGES.add(__name__)


def make_cache(
    model: PodForCausalLM,
    spec: str | None = None,
    budget: int | float | str | list[int] | None = None,
    compression_ratio: float | None = None,
    **params: Any,
) -> PodCache:
    """Make a new, empty cache for ``model``.

    The spec can say everything, in the notation of recipes and the command line (``pod.notation``):
    ``make_cache(model, "pod+snapkv[window=16]+int4@25%")``. ``budget`` and ``params`` are for values that
    Python computes.

    Args:
        model: a model that ``pod.load_model`` made.
        spec: a method, or methods of different axes joined by ``+``. None = the model's own layout: ``full``,
            ``pod`` with a sharing plan, ``cla`` or ``window``.
        budget: for methods that drop tokens, how much to keep per KV head and layer, sinks and windows
            included. It means the same as behind the ``@`` of a spec. 4096 = tokens. ``"25%"`` or 0.25 = a
            share of the prompt. ``"pod"`` = as many tokens as take the bytes that the model's plan holds of
            the prompt. A list of tokens gives each row of the batch its own budget.
        compression_ratio: the share to drop, as in kvpress: 0.75 keeps a quarter, as ``@25%`` does.
        params: parameters of the methods in the spec, see ``pod.methods()``.

    A share is computed for each row from the length of its first prompt, when this begins, and rounded down.
    With 25 %, a row with a prompt of 1,002 tokens keeps 250, and another one with 403 tokens keeps 100. Later
    prompts and decoded tokens do not change these numbers. If a method needs more (``snapkv`` needs one token
    more than its ``window``), it gets the least that it takes, so that a short prompt stays whole.

    Methods that compress while a prompt is fed (``streamingllm``, ``imdc``, ``prefill=streaming``), and
    budgets that are shares, depend on the prompt's length. ``generate()`` announces it. If you feed a prompt
    in several forward passes, call ``cache.begin_prompt(columns)`` before the first one. Without that call,
    each pass counts as a prompt of its own, and a share is computed from the first pass.

    Raises:
        ValueError: a name or parameter is unknown, methods do not go together (the message gives the reason),
            the budget is too small, or a method does not fit the model.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "own_method"):
        kind = type(model).__name__
        raise ValueError(f"a {kind} has no PoD cache: give the model that pod.load_model(…) makes of it")
    written = in_order(parse(config.own_method if spec is None else spec))
    _check_devices(written, model)
    for name in params.keys() & written.params.keys():
        raise ValueError(f"{name} stands in {str(written)!r} and beside it: leave it out of one of them")
    kept = one_budget(written, budget, compression_ratio)
    params = kvzip.with_requests(model, written.names, written.params | params)

    def build(tokens: int | None) -> PodCache:
        return build_cache(config, written, tokens, params)

    cache = cache_of_budget(build, kept, written, config)
    if kept is None or isinstance(kept, list):
        cache.made_with = kept, params
    else:
        cache.made_with = kept.tokens or str(kept), params
    return cache


def _check_devices(written: Spec, model: PodForCausalLM) -> None:
    """Raise ``ValueError`` if layers whose tokens a method stores together are on different devices."""
    if not is_spread(model):
        return
    devices = places_of(model)
    for name in written.names:
        together = builder_of(METHODS[name]).together
        for layers in together(len(devices)) if together is not None else ():
            found = sorted({str(devices[layer]) for layer in layers})
            if len(found) > 1:
                raise ValueError(
                    f"{name} keeps tokens of layers {' and '.join(map(str, layers))} in common, which "
                    f"lie on {' and '.join(found)}: load the model with a device_map that keeps them together"
                )
