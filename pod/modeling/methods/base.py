"""How a method of the registry is built, and how a spec such as ``pod+snapkv+int4`` becomes a cache.

Methods belong to axes that are independent of each other. The *layout* decides which layers hold keys and
values, the *selection* which tokens stay, and the *codec* in which form they are stored. A fourth axis,
*channels*, goes with some selections and decides which channels of keys stay. A spec names at most one method
of each axis, joined by ``+``. A selection compresses a prompt in one of two ways: whole, or chunk by chunk.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from math import floor
from typing import Any

from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import LAYOUTS, PodConfig
from pod.modeling.model.generation import planned_quantizer
from pod.modeling.model.kv_quantizer import NATIVE, KVQuantizer
from pod.modeling.model.rows import FixedChunks, GroupedCache
from pod.modeling.model.step import CacheLayer
from pod.notation import Spec, parse
from pod.registry import METHODS
from pod.registry.combine import all_parameters, chosen_methods, refusal
from pod.registry.method import Method


def round_half_up(value: Fraction) -> int:
    """The nearest integer; halves go up."""
    return floor(value + Fraction(1, 2))


def round_sums(sizes: Iterable[Fraction]) -> list[int]:
    """Integers whose running sums are the rounded running sums of ``sizes``; halves go up.

    So they add up to the rounded sum of ``sizes``: 1.5, 1.5, 1.5 becomes 2, 1, 2.
    """
    totals = map(round_half_up, accumulate(sizes, initial=Fraction(0)))
    return [stop - start for start, stop in pairwise(totals)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The wishes of a caller of ``make_cache``, as a method's builder gets them.

    Attributes:
        spec: the methods without parameters and budget, for reports and errors.
        params: every parameter of the methods in the spec, with defaults filled in.
        budget: tokens per KV head and layer; 0 for methods that take no budget.
        quantizer: makes the buffers.
        inner: the method in brackets behind the selection, such as ``snapkv`` in ``imdc(snapkv)``.
    """

    spec: str
    params: dict[str, Any]
    budget: int = 0
    quantizer: KVQuantizer = NATIVE
    inner: str | None = None

    def below_budget(self, name: str) -> int:
        """The value of the parameter ``name``, in tokens. ``ValueError`` unless the budget exceeds it."""
        value = self.params[name]
        if self.budget <= value:
            raise ValueError(
                f"{self.spec}: budget = {self.budget} must exceed {name} = {value}: raise the budget"
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Builder:
    """How a method of the registry is built. ``BUILDERS`` of the method's file has one for its name.

    Attributes:
        build: ``(config, request) -> PodCache``; for a codec ``(config, request) -> KVQuantizer``.
        wraps: for methods of the channels axis, ``(config, request) -> KVQuantizer``: a quantizer that uses
            the one of the request. None for other methods.
        together: from the number of layers, the groups of layers that must be on one device because the
            method stores their tokens together. None = there are none.
    """

    build: Callable[[PodConfig, Request], Any]
    wraps: Callable[[PodConfig, Request], KVQuantizer] | None = None
    together: Callable[[int], list[tuple[int, ...]]] | None = None


def builder_of(method: Method) -> Builder:
    """The builder of a method, whose file is imported only now."""
    module = import_module(f"pod.modeling.methods.{method.file}")
    return module.BUILDERS[method.name]


def cache_of(
    make_layer: Callable[..., CacheLayer], takes_any_rows: bool = False, **grouped: Any
) -> Callable[[PodConfig, Request], PodCache]:
    """Make the ``Builder.build`` of a selection from its class of layers.

    Args:
        make_layer: ``(config, layer_idx, request) -> CacheLayer``; raises ``ValueError`` for a request that
            it cannot serve.
        takes_any_rows: whether the layers can handle rows of unequal length. Then they see the whole batch,
            except with packed buffers. False = a ``GroupedCache`` gives them rows of equal length.
        grouped: further arguments of ``GroupedCache``.
    """

    def build(config: PodConfig, request: Request) -> PodCache:
        make_layer(config, 0, request)
        make = partial(make_layer, request=request)
        if takes_any_rows and request.quantizer is NATIVE:
            return PodCache(config, make, request.spec)
        is_streaming = request.params.get("prefill") == "streaming"
        chunks = FixedChunks(request.params["chunk_size"]) if is_streaming else None
        return GroupedCache(config, make, request.spec, chunks=chunks, **grouped)

    return build


def build_cache(config: PodConfig, spec: Spec, budget: int | None, params: Mapping[str, Any]) -> PodCache:
    """Build the cache of a spec; see ``make_cache``.

    Args:
        config: the model's configuration.
        spec: the spec, its methods in the order of ``in_order``.
        budget: tokens per KV head and layer; None for methods that take no budget.
        params: the parameters in the spec and those that were given as arguments.

    Raises:
        ValueError: the methods do not fit each other, the model, the budget or the parameters.
    """
    name = spec.plain
    # for a model with windows of its own and no plan, 'full' is built as 'pod', which stores only the windows
    windows_alone = config.layer_windows is not None and config.lead is None
    chosen, inner = chosen_methods(parse("pod") if name == "full" and windows_alone else spec)
    layout = chosen.get("layout") or METHODS["full"]
    selection, channels, codec = map(chosen.get, ("selection", "channels", "codec"))
    if (reason := refusal(layout, *chosen.values())) is not None:
        raise ValueError(f"{name!r} is not possible: {reason}")
    _check_model(name, config, chosen)
    builds = selection or channels or layout
    # if a selection builds the cache, parameters of the layout's own cache are not allowed
    offered = [method for method in chosen.values() if builds is layout or method is not layout]
    values = all_parameters(name, offered, params)
    _check_budget(name, builds, budget)
    request = Request(spec=name, params=values, budget=budget or 0, inner=inner)
    if codec is not None:
        request = replace(request, quantizer=builder_of(codec).build(config, request))
    elif layout.name == "pod":
        request = replace(request, quantizer=planned_quantizer(config))
    wraps = None if channels is None else builder_of(channels).wraps
    if wraps is not None:
        request = replace(request, quantizer=wraps(config, request))
    return builder_of(builds).build(config, request)


def _check_budget(spec: str, method: Method, budget: int | None) -> None:
    if method.takes_budget and (type(budget) is not int or budget < 1):
        raise ValueError(
            f"{spec} needs a budget, what to keep per KV head and layer: {spec}@4096 (tokens), "
            f"{spec}@25% (of each row's prompt), "
            f"or the same as budget=…, a list of tokens for the rows of a batch; got {budget!r}"
        )
    if not method.takes_budget and budget is not None:
        raise ValueError(f"{spec} takes no budget: its parameters say what it keeps; leave the budget out")


def _check_model(spec: str, config: PodConfig, chosen: dict[str, Method]) -> None:
    """Raise ``ValueError`` if a spec does not fit the model's layout; warn if ``pod`` would share nothing.

    A model that was trained with the layout ``cla`` or ``window`` needs the cache of that layout, alone or
    with a codec. That cache serves no other models. A model with a sharing plan cannot have a ``full`` cache.
    """
    named = chosen["layout"].name if "layout" in chosen else None
    if config.layout == "pod" and named in (None, "full") and not config.sharing_plan.is_dense:
        reason = refusal(METHODS["pod"], *(chosen[axis] for axis in chosen if axis != "layout"))
        parts = ["pod", *(part for part in spec.split("+") if part.strip() != "full")]
        hint = f", or name the layout, as in {'+'.join(parts)!r}" if reason is None else f" ({reason})"
        whose = "a sharing plan: load the dense checkpoint"
        if config.layer_windows is not None:
            whose = "windows of its own: name nothing"
        raise ValueError(f"{spec} needs a model without {whose}{hint}")
    if config.layout == named == "pod" and config.sharing_plan.is_dense:
        what = "the model shares nothing, so 'pod' keeps the same cache as 'full'"
        warnings.warn(f"{what}: load it with pod.load_model(…, plan=…)", stacklevel=4)
    if config.layout != "pod" and (named != config.layout or "selection" in chosen):
        raise ValueError(
            f"{spec!r} does not fit this model: it was trained with layout = {config.layout!r}, which fixes "
            f"its cache: use {config.layout!r}, alone or with a codec"
        )
    if config.layout == "pod" and named in LAYOUTS and named != "pod":
        raise ValueError(
            f"{spec!r} needs a model of that layout: load or train one with "
            f"pod.load_model(…, layout={named!r})"
        )
