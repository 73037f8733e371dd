"""How a method is written: on every command line, in every recipe and in `pod.make_cache`.

    pod+snapkv[window=16,kernel=7]+int4@25%

Parts are joined by `+`. Each part is the name of a method. `(…)` behind the name holds a second method that
works inside the first, as in `imdc(snapkv)`. `[…]` holds the parameters. The budget stands behind an `@`, at
the end. Values of parameters are JSON, a text without quotes, or `0-15` for the list of these whole numbers.
Inside brackets `;` may stand for `,`, because lm-eval splits its arguments at commas.

| budget | keeps, per KV head and layer |
|---|---|
| `@4096` | 4,096 tokens |
| `@25%`, `@0.25` | a quarter of the tokens of each row's prompt |
| `@pod` | as many tokens as fill the bytes that PoD holds at the same length |

`str(parse(text))` is the canonical spelling: no spaces, parameters sorted by name, `0.25` as `25%`.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

_OPENING = "([{"
_CLOSING = ")]}"
_NAME = r"[A-Za-z_][\w-]*(?::[\w-]+)?"
_PART = re.compile(
    rf"\s*(?P<name>{_NAME})\s*(?:\(\s*(?P<inner>{_NAME})\s*\)\s*)?(?:\[(?P<params>.*)\]\s*)?", re.DOTALL
)
_RANGE = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)", re.ASCII)
_BARE = re.compile(r"[^\s,;\"()\[\]{}](?:[^,;\"()\[\]{}\n]*[^\s,;\"()\[\]{}])?")
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?%?|[0-9](\.[0-9]{1,20})?e-[0-9]{1,2}", re.ASCII)
_LONGEST_RANGE = 1 << 20


@dataclass(frozen=True)
class Budget:
    """How much a method may keep: a number of tokens, or a share of the prompt's tokens.

    Without either, it may keep as many tokens as fill the bytes that PoD holds (`POD`).

    Attributes:
        tokens: tokens per KV head and layer, sinks and windows included, at least 1.
        share: share of the tokens of each row's prompt, more than 0 and at most 1.
    """

    tokens: int | None = None
    share: Fraction | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.share is not None:
            raise ValueError("a budget is tokens or a share, not both")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(f"a budget is at least 1 token, got {self.tokens!r}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"a share is more than 0 % and at most 100 %, got {_percent(self.share)}")

    @property
    def is_pod(self) -> bool:
        """Whether the budget is as much as PoD holds."""
        return self == POD

    def of_prompt(self, length: int) -> int:
        """Tokens to keep of a prompt of ``length`` tokens.

        A share is rounded down, but is at least 1 token: 25 % of 1,002 tokens are 250, and 25 % of 3 tokens
        are 1. A budget in tokens is the same for every prompt.

        Raises:
            ValueError: for the budget ``pod``, which depends on a plan.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is None:
            raise ValueError("the budget `pod` depends on a plan, not on the prompt alone")
        return max(1, math.floor(self.share * length))

    def __str__(self) -> str:
        if self.tokens is not None:
            return str(self.tokens)
        return "pod" if self.share is None else _percent(self.share)


POD = Budget()
"""The budget of as many tokens as fill the bytes that PoD holds."""
NO_LIMIT = 1 << 20
"""A budget in tokens so large that nothing is dropped, even where a method gives some layers fewer tokens."""


@dataclass(frozen=True)
class Part:
    """One method of a spec: `imdc(snapkv)[…]`.

    Attributes:
        name: name of the method, here `imdc`.
        inner: name of the method inside it, here `snapkv`; None without parentheses.
        params: the parameters in the brackets, by name.
    """

    name: str
    inner: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> str:
        """The method without its parameters: `imdc(snapkv)`."""
        return self.name if self.inner is None else f"{self.name}({self.inner})"

    def __str__(self) -> str:
        said = ",".join(f"{key}={write_value(self.params[key])}" for key in sorted(self.params))
        return f"{self.plain}[{said}]" if said else self.plain


@dataclass(frozen=True)
class Spec:
    """A method as it was written: its parts, in order, and its budget (None where none was written)."""

    parts: tuple[Part, ...]
    budget: Budget | None = None

    @property
    def plain(self) -> str:
        """The spec without parameters and budget: `pod+snapkv+int4`."""
        return "+".join(part.plain for part in self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in order."""
        return tuple(part.name for part in self.parts)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of all parts. Methods that go together share no parameter's name."""
        return {key: value for part in self.parts for key, value in part.params.items()}

    def in_order(self, sort_key: Callable[[str], int]) -> "Spec":
        """The same spec with its parts sorted.

        Args:
            sort_key: gives a number for the name of a part; parts with smaller numbers come first.
        """
        return replace(self, parts=tuple(sorted(self.parts, key=lambda part: sort_key(part.name))))

    def __str__(self) -> str:
        said = "+".join(map(str, self.parts))
        return said if self.budget is None else f"{said}@{self.budget}"


def parse(text: object) -> Spec:
    """Read a method from its text. Only the notation is checked.

    Whether these methods exist and go together is for the caller to check.

    Raises:
        ValueError: ``text`` is no text, or breaks the notation; the message is one line.
    """
    if not isinstance(text, str):
        raise ValueError(f"method {text!r} must be a text, such as 'snapkv@25%'")
    try:
        methods, *budgets = split(text, "@")
        parts = tuple(_part(part) for part in split(methods, "+"))
        if len(budgets) > 1 or any(sign in budget for budget in budgets for sign in "+[("):
            raise ValueError("the budget stands once, at the end, as in pod+snapkv[window=16]+int4@25%")
        return Spec(parts, parse_budget(budgets[0]) if budgets else None)
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None


def parse_budget(said: object) -> Budget:
    """A budget from a number or a text: 4096, "4096", "25%", 0.25, "pod".

    Raises:
        ValueError: it is anything else; the message is one line.
    """
    if isinstance(said, Budget):
        return said
    text = str(said).strip()
    if text.lower() == "pod" and isinstance(said, str):
        return POD
    if isinstance(said, bool) or not _NUMBER.fullmatch(text):
        raise ValueError(
            f"{text!r} is no budget; {_hint(text, ['pod'])}write tokens as 4096, "
            "a share of the prompt as 25% or 0.25, or pod"
        )
    if text.endswith("%"):
        return Budget(share=Fraction(text[:-1]) / 100)
    if text.isdecimal():
        return Budget(tokens=int(text))
    share = Fraction(text)
    if share >= 1:
        raise ValueError(f"{text} is no budget: tokens are whole numbers as 4096, a share is 25% or 0.25")
    return Budget(share=share)


def cut_budget(text: str) -> tuple[str, str]:
    """Split the text of a method into the method and its budget: `snapkv@25%` → (`snapkv`, `25%`).

    Where no budget stands behind the last `@`, as when it is inside brackets, the whole text is the method
    and the budget is empty.
    """
    name, _, budget = text.rpartition("@")
    if not name:
        return text, ""
    try:
        parse_budget(budget)
    except ValueError:
        return text, ""
    return name, budget


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that does not exist. It shows the nearest name that does."""
    names = list(known)
    return ValueError(f"unknown {kind} {name!r}; {_hint(str(name), names)}known: {', '.join(names)}")


def unknown_parameter(method: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a parameter that a method does not have. It shows the nearest one that it has."""
    names = list(known)
    hint = _hint(name, names) or f"it has {', '.join(names) or 'none'}"
    return ValueError(f"{method} has no parameter {name!r}; {hint.strip()}")


def _hint(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.4)
    return f"did you mean {found[0]!r}? " if found else ""


# -- the pieces of a text ------------------------------------------------------------------------------------


def split(text: str, separators: str) -> list[str]:
    """Cut a text at each character of `separators` that stands outside of brackets and quotes.

    Raises:
        ValueError: brackets or quotes do not close.
    """
    pieces, start, open_brackets = [], 0, ""
    for at, sign, is_quoted in _signs(text):
        if is_quoted:
            continue
        if sign in _OPENING:
            open_brackets += sign
        elif sign in _CLOSING:
            if not open_brackets or _OPENING.index(open_brackets[-1]) != _CLOSING.index(sign):
                raise ValueError(f"{sign!r} closes nothing")
            open_brackets = open_brackets[:-1]
        elif sign in separators and not open_brackets:
            pieces.append(text[start:at])
            start = at + 1
    if open_brackets:
        raise ValueError(f"{open_brackets[-1]!r} is not closed")
    return [*pieces, text[start:]]


def _signs(text: str) -> Iterator[tuple[int, str, bool]]:
    """(position, character, whether it is quoted) of each character. Quotation marks count as quoted.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    is_quoted = is_escaped = False
    for at, sign in enumerate(text):
        is_quote = sign == '"' and not is_escaped
        yield at, sign, is_quoted or is_quote
        is_quoted ^= is_quote
        is_escaped = is_quoted and sign == "\\" and not is_escaped
    if is_quoted:
        raise ValueError("a quote is not closed")


def swap_commas(text: str) -> str:
    """The text with `;` in place of every comma outside of quotes."""
    return "".join(";" if sign == "," and not is_quoted else sign for _, sign, is_quoted in _signs(text))


def _part(text: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text.strip()!r} is no part: write a name, and behind it its parameters, as snapkv[window=16]"
        )
    params = {} if found["params"] is None else _parameters(found["params"])
    return Part(found["name"], found["inner"], params)


def _parameters(text: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for piece in split(text, ",;"):
        before, _, after = piece.partition("=")
        key = before.strip()
        value = after.strip()
        if not key.isidentifier() or not value or key in params:
            raise ValueError(
                "in brackets stands each parameter once with its value, as d2o[merge=average,alpha=2]@25%"
            )
        params[key] = read_value(value)
    return params


def read_value(text: str) -> Any:
    """The value of a parameter: JSON, `0-15` for the list of these whole numbers, or the text itself."""
    ends = _RANGE.fullmatch(text)
    if ends and 0 <= int(ends[2]) - int(ends[1]) < _LONGEST_RANGE:
        return list(range(int(ends[1]), int(ends[2]) + 1))
    if text[0] in "[{":
        text = "".join("," if sign == ";" and not is_quoted else sign for _, sign, is_quoted in _signs(text))
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        if '"' in text or text[0] in "[{":
            raise ValueError(
                f"the value {text} is no JSON: close its lists, and put texts in it into quotes"
            ) from None
        return text


def write_value(value: Any) -> str:
    """The canonical text of a value, which ``read_value`` reads."""
    is_run = isinstance(value, list) and len(value) > 1 and all(type(item) is int for item in value)
    if is_run and value == list(range(value[0], value[0] + len(value))) and value[0] >= 0:
        return f"{value[0]}-{value[-1]}"
    if isinstance(value, str) and _BARE.fullmatch(value) and read_value(value) == value:
        return value
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def _percent(share: Fraction) -> str:
    """A share as `12.5%`. The digits are finite, because every share was read from a decimal text."""
    with localcontext(prec=200):
        number = Decimal(share.numerator * 100) / Decimal(share.denominator)
        return f"{number.normalize():f}%"
