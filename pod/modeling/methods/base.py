"""What a method declares about itself, and what it is asked for.

A cache is made along three independent axes: the *layout* says which layers hold keys and values, the *selection*
which tokens stay, the *codec* in which form they are held. A spec names at most one method of each, joined by ``+``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Any, Literal, NamedTuple

from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.stores import NATIVE, Codec


class Parameter(NamedTuple):
    """What a user may give a method: of the kind of the default, within bounds or one of the choices. A default of None says nothing
    but that None may be given, and is else of the kind of ``least``. The meaning names the unit."""

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def refusal(self, value: Any) -> str | None:
        """What a value must be; None when it is."""
        if value is self.default:
            return None
        like = self.least if self.default is None else self.default
        kind = _kind_missed(like, value)
        if kind is not None:
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
    """Integers in place of ``sizes``, whose sums, from the first on, are those of ``sizes`` rounded; halves go up."""
    totals = map(round_half_up, accumulate(sizes, initial=Fraction(0)))
    return [stop - start for start, stop in pairwise(totals)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ``make_cache`` asks a method to build.

    Attributes:
        spec: as the user wrote it; for reports and errors.
        params: every parameter of the methods in the spec, defaults filled in.
        budget: tokens per KV head and layer; 0 for methods that take none.
        codec: makes the stores.
        inner: what stands in brackets behind the selection, as ``snapkv`` in ``imdc(snapkv)``.
    """

    spec: str
    params: dict[str, Any]
    budget: int = 0
    codec: Codec = NATIVE
    inner: str | None = None

    def below_budget(self, name: str) -> int:
        """A parameter in tokens; ``ValueError`` unless the budget exceeds it."""
        value = self.params[name]
        if self.budget <= value:
            what = f"budget = {self.budget} must exceed {name} = {value}"
            raise ValueError(f"{self.spec}: {what}: raise the budget")
        return value


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named rule for what a cache holds.

    Attributes:
        name: as in ``make_cache(model, name)``.
        paper: source.
        frees: what is not held any more.
        axis: what the method decides.
        build: ``(config, request)`` to a ``PodCache``; of a codec to a ``Codec``.
        parameters: by name, given as ``Parameter`` or as a tuple of its fields.
        wraps: of the channels axis: ``(config, request)`` to a codec around the request's.
        behind: of the channels axis: selections that it can be combined with.
        takes_budget: whether ``budget`` means something; then it is required.
        inner: methods that may stand in brackets behind the name; the first one is the default.
        trained: whether the model's weights were trained with this layout, so that no selection fits it.
        refuses: layouts and codecs that the method cannot be combined with, each with the reason.
    """

    name: str
    paper: str
    frees: str
    axis: Literal["layout", "selection", "channels", "codec"]
    build: Callable[[PodConfig, Request], Any]
    wraps: Callable[[PodConfig, Request], Codec] | None = None
    behind: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    takes_budget: bool = False
    inner: tuple[str, ...] = ()
    trained: bool = False
    refuses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = {name: Parameter(*fields) for name, fields in self.parameters.items()}
        object.__setattr__(self, "parameters", parameters)
