"""From a spec such as ``pod+snapkv+int4`` to a cache: which methods it names, and whether they go together."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pod.modeling.methods.base import Method, Request
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import LAYOUTS, PodConfig
from pod.modeling.shipped.generation import planned_codec

AXES = {
    "layout": "which layers hold keys and values",
    "selection": "which tokens stay",
    "channels": "which channels of keys stay",
    "codec": "in which form they are held",
}


def build_cache(
    registry: Mapping[str, Method], config: PodConfig, spec: str, budget: int | None, params: dict[str, Any]
) -> PodCache:
    """The cache of a spec; see ``make_cache``."""
    if not isinstance(spec, str):
        raise ValueError(f"spec = {spec!r} must be a string, such as 'snapkv' or 'pod+int4'")
    chosen, inner = parse(registry, spec)
    layout = chosen.get("layout") or registry["full"]
    selection, channels, codec = map(chosen.get, ("selection", "channels", "codec"))
    if (reason := refusal(layout, *chosen.values())) is not None:
        raise ValueError(f"{spec!r} is not possible: {reason}")
    _check_model(spec, config, chosen)
    builder = selection or channels or layout
    # where a selection builds the cache, what only a layout's own cache can do is not on offer
    offered = [method for method in chosen.values() if builder is layout or method is not layout]
    values = all_parameters(spec, offered, params)
    _check_budget(spec, builder, budget)
    request = Request(spec=spec, params=values, budget=budget or 0, inner=inner)
    if codec is not None:
        request = replace(request, codec=codec.build(config, request))
    elif layout.name == "pod":
        request = replace(request, codec=planned_codec(config))
    if channels is not None and channels.wraps is not None:
        request = replace(request, codec=channels.wraps(config, request))
    return builder.build(config, request)


def _check_budget(spec: str, builder: Method, budget: int | None) -> None:
    if builder.takes_budget and (type(budget) is not int or budget < 1):
        raise ValueError(
            f"{spec} needs budget=…, the tokens to keep per KV head and layer, a whole number of at least 1; "
            f"got {budget!r}"
        )
    if not builder.takes_budget and budget is not None:
        raise ValueError(f"{spec} takes no budget: its parameters say what it keeps; leave budget out")


def parse(registry: Mapping[str, Method], spec: str) -> tuple[dict[str, Method], str | None]:
    """The methods of a spec by axis, and what stands in brackets behind the selection."""
    chosen: dict[str, Method] = {}
    inner = None
    for part in spec.split("+"):
        match = re.fullmatch(r"\s*([\w-]+)\s*(?:\(\s*([\w-]+)\s*\))?\s*", part)
        if match is None or match[1] not in registry:
            near = difflib.get_close_matches(part.strip().lower(), registry, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown method {part.strip()!r} in {spec!r}; {hint}choose from {', '.join(registry)}"
            )
        method = registry[match[1]]
        if method.axis in chosen:
            raise ValueError(
                f"{spec!r}: {chosen[method.axis].name} and {method.name} both say {AXES[method.axis]}; take one of them"
            )
        if match[2] is not None and match[2] not in method.inner:
            allowed = ", ".join(f"{method.name}({name})" for name in method.inner) or f"{method.name} alone"
            raise ValueError(f"{part.strip()!r} is not possible; choose {allowed}")
        if method.inner:
            inner = match[2] or method.inner[0]
        chosen[method.axis] = method
    return chosen, inner


def refusal(layout: Method, *others: Method) -> str | None:
    """Why methods of different axes cannot be combined; None when they can."""
    parts = layout, *others
    if layout.trained and any(method.axis in ("selection", "channels") for method in others):
        return f"models with layout {layout.name} were trained to hold just what they hold"
    for method in parts:
        for other in parts:
            if method.axis == "channels" and other.axis == "selection" and other.name not in method.behind:
                return f"{method.name} thins what a ranking of the prompt leaves: {', '.join(method.behind)}"
            if other.name in method.refuses:
                return method.refuses[other.name]
    return None


def _check_model(spec: str, config: PodConfig, chosen: dict[str, Method]) -> None:
    """Models of a trained layout and caches of that layout go together, and with nothing else than a codec."""
    named = chosen["layout"].name if "layout" in chosen else None
    if config.layout == "pod" and named in (None, "full") and not config.sharing_plan.is_dense:
        raise ValueError(
            f"{spec} needs a model without a sharing plan: load the dense checkpoint, or name the layout, as in "
            f"{'pod' if spec == 'full' else f'pod+{spec}'!r}"
        )
    if config.layout != "pod" and (named != config.layout or "selection" in chosen):
        raise ValueError(
            f"{spec!r} does not fit this model: it was trained with layout = {config.layout!r}, which decides what its "
            f"cache holds; use {config.layout!r}, alone or with a codec"
        )
    if config.layout == "pod" and named in LAYOUTS and named != "pod":
        raise ValueError(
            f"{spec!r} needs a model of that layout: load or train one with pod.load_model(…, layout={named!r})"
        )


def all_parameters(spec: str, chosen: list[Method], params: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the methods in a spec, defaults filled in."""
    known = {name: parameter for method in chosen for name, parameter in method.parameters.items()}
    for name, value in params.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"{spec} has no parameter {name!r}; {hint}")
        reason = known[name].refusal(value)
        if reason is not None:
            raise ValueError(f"{spec}: {name} = {value!r} {reason}")
    return {name: parameter.default for name, parameter in known.items()} | dict(params)
