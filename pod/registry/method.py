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

    A value has the type of the default, and lies within the bounds or among the choices. Where the default is
    None, None may be given too, and other values have the type of ``least`` (any type, if that is None).

    Attributes:
        default: the value that is taken when the user gives none.
        meaning: what the parameter does, and its unit.
        least: the smallest value that is allowed; None = no such bound, or 0 where there is a ``most``.
        most: the largest value that is allowed; None = no such bound.
        choices: the texts that are allowed; empty = no such list.
    """

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    def refusal(self, value: Any) -> str | None:
        """What is wrong with a value; None when the value is allowed.

        The text ends an error message, for example ``must be at least 1``.
        """
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
    """The type that a value should have, in words; None when it has the type of the default."""
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
        inner: methods that may stand in brackets behind the name, as in ``imdc(snapkv)``; the first one is
            the default.
        behind: for the channels axis: the selections that it can be combined with.
        bits: for the codec axis: bits per number.
        trained: whether the model's weights were trained with this layout, so that no selection fits it.
        refuses_pod: why the method cannot be combined with the layout ``pod``; None when it can.
        grows: whether every token that is fed after the prompt adds a slot to the cache. If not, the cache
            drops as many tokens as it takes in.
        reads_any_length: whether the prompt may be longer than what the model was trained on, because the
            distances between tokens stay below a bound that does not depend on it.
        one_shot: whether one forward pass without a cache equals the decode path
            (``tests/eval/test_perplexity.py`` proves it), so that perplexity may be scored by that pass. A
            method that compresses must leave this False.
        takes_chunks: whether several tokens that are fed at once after the prompt give the same result as one
            by one.
        reads_in_chunks: whether the method compresses while it reads a prompt, whatever its parameters are.
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
    reads_any_length: bool = False
    one_shot: bool = False
    takes_chunks: bool = False
    reads_in_chunks: bool = False
