"""What a method declares about itself, and how a spec such as ``pod+snapkv+int4`` becomes a cache.

A cache is made along three independent axes. The *layout* says which layers hold keys and values, the
*selection* which tokens stay, and the *codec* in which form they are held. (A fourth, *channels*, goes with
some selections: which channels of keys stay.) A spec names at most one method of each axis, joined by ``+``.
Selections take a prompt in one of two ways: whole, or chunk by chunk.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from math import floor
from typing import Any, Literal, NamedTuple

from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import LAYOUTS, PodConfig
from pod.modeling.model.generation import planned_codec
from pod.modeling.model.rows import FixedChunks, GroupedCache
from pod.modeling.model.step import CacheLayer
from pod.modeling.model.stores import NATIVE, KVQuantizer
from pod.notation import Part, Spec, parse, unknown, unknown_parameter


class Parameter(NamedTuple):
    """A parameter that a user may give a method.

    Its value has the type of the default and lies within the bounds or among the choices. A default of None
    means that None may be given; other values then have the type of ``least``. The meaning names the unit.
    """

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def refusal(self, value: Any) -> str | None:
        """What a value must be, as text for an error; None when the value is allowed."""
        if value is self.default:
            return None
        like = self.least if self.default is None else self.default
        if (kind := _kind_missed(like, value)) is not None:
            return f"must be {kind}, as {like!r}"
        if self.choices and value not in self.choices:
            return f"is unknown; choose {', '.join(self.choices[:-1])} or {self.choices[-1]}"
        if self.most is not None and not (self.least or 0) <= value <= self.most:
            return f"must lie between {self.least or 0:g} and {self.most:g}"
        return None if self.least is None or value >= self.least else f"must be at least {self.least}"


def _kind_missed(default: Any, value: Any) -> str | None:
    if isinstance(default, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        return None if is_number else "a number"
    kind = {bool: "True or False", int: "a whole number", str: "a string"}.get(type(default))
    return None if type(value) is type(default) else kind


def round_half_up(value: Fraction) -> int:
    """The nearest integer; halves go up."""
    return floor(value + Fraction(1, 2))


def round_sums(sizes: Iterable[Fraction]) -> list[int]:
    """Integers in place of ``sizes``, with the running sums of ``sizes`` rounded; halves go up."""
    totals = map(round_half_up, accumulate(sizes, initial=Fraction(0)))
    return [stop - start for start, stop in pairwise(totals)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ``make_cache`` asks a method to build.

    Attributes:
        spec: the methods without parameters and budget, for reports and errors.
        params: every parameter of the methods in the spec, with defaults filled in.
        budget: tokens per KV head and layer; 0 for methods that take no budget.
        codec: makes the stores.
        inner: what stands in brackets behind the selection, such as ``snapkv`` in ``imdc(snapkv)``.
    """

    spec: str
    params: dict[str, Any]
    budget: int = 0
    codec: KVQuantizer = NATIVE
    inner: str | None = None

    def below_budget(self, name: str) -> int:
        """The value of a parameter in tokens; ``ValueError`` unless the budget exceeds it."""
        value = self.params[name]
        if self.budget <= value:
            raise ValueError(
                f"{self.spec}: budget = {self.budget} must exceed {name} = {value}: raise the budget"
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named rule for what a cache holds.

    Attributes:
        name: as in ``make_cache(model, name)``.
        paper: the source.
        frees: what is no longer held.
        build: makes a ``PodCache`` from ``(config, request)``; a codec's makes a ``KVQuantizer``.
        axis: what the method decides.
        parameters: by name, each given as a ``Parameter`` or as a tuple of its fields.
        wraps: for the channels axis: makes a codec around the request's from ``(config, request)``.
        behind: for the channels axis: the selections that it can be combined with.
        takes_budget: whether the method takes a ``budget``; if so, it is required.
        inner: methods that may stand in brackets behind the name; the first one is the default.
        trained: whether the model's weights were trained with this layout, so that no selection fits it.
        refuses_pod: why the method cannot be combined with the layout ``pod``; None when it can.
        together: gives, from the number of layers, the groups of layers that must lie on one device because
            their tokens are held in common; None = there are none.
    """

    name: str
    paper: str
    frees: str
    build: Callable[[PodConfig, Request], Any]
    axis: Literal["layout", "selection", "channels", "codec"] = "selection"
    wraps: Callable[[PodConfig, Request], KVQuantizer] | None = None
    behind: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    takes_budget: bool = False
    inner: tuple[str, ...] = ()
    trained: bool = False
    refuses_pod: str | None = None
    together: Callable[[int], list[tuple[int, ...]]] | None = None

    def __post_init__(self) -> None:
        parameters = {name: Parameter(*fields) for name, fields in self.parameters.items()}
        object.__setattr__(self, "parameters", parameters)


PREFILL_PARAMETERS = {
    "prefill": Parameter(
        "exact",
        "exact: compress when the prompt ends; streaming: after every chunk_size tokens of it",
        choices=("exact", "streaming"),
    ),
    "chunk_size": (512, "tokens of a prompt after which streaming prefill compresses (tokens)", 1),
}


def cache_of(
    make_layer: Callable[..., CacheLayer], takes_any_rows: bool = False, **grouped: Any
) -> Callable[[PodConfig, Request], PodCache]:
    """``Method.build`` of a selection.

    Args:
        make_layer: ``(config, layer_idx, request) -> CacheLayer``; raises ``ValueError`` for a request that
            it cannot serve.
        takes_any_rows: whether its layers see the whole batch, with rows of unlike length. With packed stores
            they never do.
        grouped: arguments of ``GroupedCache``.
    """

    def build(config: PodConfig, request: Request) -> PodCache:
        make_layer(config, 0, request)
        make = partial(make_layer, request=request)
        if takes_any_rows and request.codec is NATIVE:
            return PodCache(config, make, request.spec)
        is_streaming = request.params.get("prefill") == "streaming"
        chunks = FixedChunks(request.params["chunk_size"]) if is_streaming else None
        return GroupedCache(config, make, request.spec, chunks=chunks, **grouped)

    return build


AXES = {
    "layout": "which layers keep keys and values",
    "selection": "which tokens stay",
    "channels": "which channels of keys stay",
    "codec": "how many bits each number has",
}


def build_cache(
    registry: Mapping[str, Method],
    config: PodConfig,
    spec: Spec,
    budget: int | None,
    params: Mapping[str, Any],
) -> PodCache:
    """Build the cache of a spec whose parts stand in order; see ``make_cache``.

    Args:
        budget: tokens per KV head and layer; None for methods that take no budget.
        params: the parameters in the spec and those given beside it.
    """
    name = spec.plain
    # for a model with windows of its own and no plan, 'full' is built as 'pod', which holds them as they are
    windows_alone = config.layer_windows is not None and config.lead is None
    chosen, inner = chosen_methods(registry, parse("pod") if name == "full" and windows_alone else spec)
    layout = chosen.get("layout") or registry["full"]
    selection, channels, codec = map(chosen.get, ("selection", "channels", "codec"))
    if (reason := refusal(layout, *chosen.values())) is not None:
        raise ValueError(f"{name!r} is not possible: {reason}")
    _check_model(registry, name, config, chosen)
    builder = selection or channels or layout
    # where a selection builds the cache, parameters that need the layout's own cache are not on offer
    offered = [method for method in chosen.values() if builder is layout or method is not layout]
    values = all_parameters(name, offered, params)
    _check_budget(name, builder, budget)
    request = Request(spec=name, params=values, budget=budget or 0, inner=inner)
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
            f"{spec} needs a budget, what to keep per KV head and layer: {spec}@4096 (tokens), "
            f"{spec}@25% (of each row's prompt), "
            f"or the same as budget=…, a list of tokens for the rows of a batch; got {budget!r}"
        )
    if not builder.takes_budget and budget is not None:
        raise ValueError(f"{spec} takes no budget: its parameters say what it keeps; leave the budget out")


def in_order(registry: Mapping[str, Method], spec: Spec) -> Spec:
    """The spec with its parts in the order in which they are built: layout, selection, channels, codec.

    Raises:
        ValueError: a name is not in the registry; the message gives the nearest one.
    """
    for part in spec.parts:
        if part.name not in registry:
            raise unknown("method", part.name, registry)
    places = {name: list(AXES).index(method.axis) for name, method in registry.items()}
    return spec.in_order(places.__getitem__)


def chosen_methods(registry: Mapping[str, Method], spec: Spec) -> tuple[dict[str, Method], str | None]:
    """The methods of a spec by axis, and the method inside the selection's brackets.

    Raises:
        ValueError: two methods decide the same axis, a method does not fit inside the brackets, or a
            parameter stands behind a part that is not its own.
    """
    chosen: dict[str, Method] = {}
    inner = None
    for part in spec.parts:
        method = registry[part.name]
        if method.axis in chosen:
            raise ValueError(
                f"{spec.plain!r}: {chosen[method.axis].name} and {method.name} both decide "
                f"{AXES[method.axis]}: use one of them"
            )
        if part.inner is not None and part.inner not in method.inner:
            allowed = ", ".join(f"{method.name}({name})" for name in method.inner) or f"{method.name} alone"
            raise ValueError(f"{part.plain!r} is not possible; choose {allowed}")
        if method.inner:
            inner = part.inner or method.inner[0]
        for name in part.params:
            if name not in method.parameters:
                _refuse_parameter(registry, spec, part, name)
        chosen[method.axis] = method
    return chosen, inner


def _refuse_parameter(registry: Mapping[str, Method], spec: Spec, part: Part, name: str) -> None:
    for other in spec.parts:
        if name in registry[other.name].parameters:
            raise ValueError(
                f"{part.plain} has no parameter {name!r}, {other.plain} has: "
                f"write {other.name}[{name}={part.params[name]}]"
            )
    raise unknown_parameter(part.plain, name, registry[part.name].parameters)


def refusal(layout: Method, *others: Method) -> str | None:
    """Why methods of different axes cannot be combined; None when they can."""
    if layout.trained and any(method.axis in ("selection", "channels") for method in others):
        return f"a model with layout {layout.name} was trained with a fixed cache: only a codec can change it"
    selections = [method.name for method in others if method.axis == "selection"]
    for method in others:
        if method.axis == "channels" and not {*selections} <= {*method.behind}:
            return (
                f"{method.name} works only after a method that ranks the prompt: {', '.join(method.behind)}"
            )
        if layout.name == "pod" and method.refuses_pod is not None:
            return method.refuses_pod
    return None


def _check_model(
    registry: Mapping[str, Method], spec: str, config: PodConfig, chosen: dict[str, Method]
) -> None:
    """Raise ``ValueError`` where a spec does not fit the model's layout; warn where ``pod`` shares nothing.

    A model of a trained layout takes the cache of that layout, alone or with a codec, and no other; and that
    cache takes no other model. A model with a sharing plan takes no ``full``.
    """
    named = chosen["layout"].name if "layout" in chosen else None
    if config.layout == "pod" and named in (None, "full") and not config.sharing_plan.is_dense:
        reason = refusal(registry["pod"], *(chosen[axis] for axis in chosen if axis != "layout"))
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


def all_parameters(spec: str, chosen: list[Method], params: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the methods in a spec, with defaults filled in.

    ValueError for a name that none of them has, and for a value that is not allowed.
    """
    known = {name: parameter for method in chosen for name, parameter in method.parameters.items()}
    for name, value in params.items():
        if name not in known:
            raise unknown_parameter(spec, name, known)
        if (reason := known[name].refusal(value)) is not None:
            raise ValueError(f"{spec}: {name} = {value!r} {reason}")
    return {name: parameter.default for name, parameter in known.items()} | dict(params)
