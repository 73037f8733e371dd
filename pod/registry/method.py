"""What an entry of the registry says about a method and about its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

AXES = {
    "layout": "which layers keep keys and values",
    "selection": "which tokens stay",
    "channels": "which channels of keys stay",
    "codec": "how many bits each number has",
}
"""What a method may decide. The parts of a spec stand in this order."""


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


@dataclass(frozen=True, kw_only=True)
class Method:
    """A named rule for what a cache holds: its entry in the registry.

    Attributes:
        name: as in ``pod.make_cache(model, name)``.
        axis: what the method decides.
        file: its file in ``pod/modeling/methods``, without ``.py``. The file builds it (``BUILDERS``).
        title: what it does, in a few words, for reports and the README.
        frees: what is no longer held.
        paper: the source.
        url: where to read the paper; empty where there is none.
        parameters: by name.
        takes_budget: whether the method takes a budget; if so, it is required.
        inner: methods that may stand in brackets behind the name; the first one is the default.
        behind: for the channels axis: the selections that it can be combined with.
        bits: for the codec axis: bits per number.
        trained: whether the model's weights were trained with this layout, so that no selection fits it.
        refuses_pod: why the method cannot be combined with the layout ``pod``; None when it can.
        grows: whether a token fed after the prompt adds a slot. If not, as many leave as come.
        unbounded: whether no distance grows with the prompt, so that the prompt may be longer than what the
            model was trained on.
        one_shot: whether one forward pass without a cache equals the decode path
            (``tests/eval/test_perplexity.py`` proves it), so that perplexity may be scored by that pass. A
            method that compresses must never say so.
        takes_chunks: whether tokens behind the prompt give the same result many at once as one by one.
        reads_in_chunks: whether it compresses while it reads a prompt, whatever its parameters.
    """

    name: str
    axis: Literal["layout", "selection", "channels", "codec"]
    file: str
    title: str
    frees: str
    paper: str
    url: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    takes_budget: bool = False
    inner: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    bits: int | None = None
    trained: bool = False
    refuses_pod: str | None = None
    grows: bool = True
    unbounded: bool = False
    one_shot: bool = False
    takes_chunks: bool = False
    reads_in_chunks: bool = False
