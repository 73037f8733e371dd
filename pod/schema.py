"""Recipes as nested dataclasses: built from YAML with every key, type and range checked, and written as YAML.

`explain` also gives the documentation of the fields for `--help`. pydantic converts and checks. What it finds
becomes an error of one line: which field, what came, what is allowed.

Three words of this file: a *section* is a dataclass that `section` decorates. A *path* is a list of keys that
leads to a setting, as pydantic reports it: `("model", "num_sink_tokens")`. A *dotted name* is the same path
as users write it: `model.num_sink_tokens`.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import ArgsKwargs, to_jsonable_python

from pod.notation import split

_Section = TypeVar("_Section")
Share = Annotated[float, Field(ge=0, le=1)]
"""Type of a field: a number from 0 to 1."""
BelowOne = Annotated[float, Field(ge=0, lt=1)]
"""Type of a field: a number from 0 up to, but not including, 1."""
AtLeast2 = Annotated[int, Field(ge=2)]
"""Type of a field: a whole number of 2 or more."""

_SETTINGS = ConfigDict(
    coerce_numbers_to_str=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)
"""How pydantic builds a section.

A number is accepted for a text. Unknown keys, NaN and infinity are errors. The string under a field is its
description.
"""
_UNKNOWN = "unexpected_keyword_argument"
"""The type that pydantic gives to an error about a key that the section does not have."""
_VERY_NEAR = 0.8
"""How alike a mistyped key and a valid one must be, from 0 to 1, for the message to name this one key alone.

Where no valid key is so much alike, the message lists all keys of the section as well.
"""


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def section(cls: type[_Section]) -> type[_Section]:
    """Decorate a class as a section of a recipe: a dataclass that converts and checks its keyword arguments.

    The class may have a `__post_init__` for what types and ranges cannot say. It raises `ValueError`. A
    message about one field begins with the name of the field: `rank is 0: …`.

    Constructing the section raises `ValueError` of one line for a wrong key, type or value.
    """
    cls._prepare_section = model_validator(mode="before")(_prepare_section)  # type: ignore[attr-defined]
    made: Any = checked_dataclass(kw_only=True, config=_SETTINGS)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except ValidationError as error:
            raise ValueError(_describe_error(error, made, "")) from None

    made.__init__ = checked
    return made


def build(cls: Any, content: Any, where: str = "") -> Any:
    """Build a section from a mapping that was read from YAML.

    Args:
        cls: a class that `section` decorates.
        content: the mapping; None gives a section with all defaults.
        where: dotted name of the section, with which messages name its fields: `model`. Empty for a whole
            recipe.

    Raises:
        ValueError: a key, a type or a value is wrong.
    """
    try:
        return cls.__pydantic_validator__.validate_python(content)
    except ValidationError as error:
        raise ValueError(_describe_error(error, cls, where)) from None


def to_yaml(recipe: Any, fields: Collection[str] | None = None) -> str:
    """A recipe or a section as the YAML that builds it again.

    Args:
        fields: names of the outermost fields to write; None means all.
    """
    content = to_jsonable_python(recipe)
    shown = {name: value for name, value in content.items() if fields is None or name in fields}
    return yaml.dump(shown, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _prepare_section(cls: type, given: Any) -> Any:
    """Prepare the content of a section for pydantic.

    An empty section, as `model:` with nothing below it, becomes one with all defaults. A text with commas
    becomes a list where the field is a list. `true` and `false` are refused where the field is a number.
    """
    if isinstance(given, ArgsKwargs):
        return ArgsKwargs((), _prepare_section(cls, given.kwargs))
    if not isinstance(given, dict):
        return {} if given is None else given
    hints = hints_of(cls)
    return {str(key): _prepare_value(key, value, hints.get(key)) for key, value in given.items()}


def _prepare_value(name: Any, value: Any, hint: Any) -> Any:
    """Prepare one value of a section as `_prepare_section` says. `hint` is the type of its field."""
    kinds = _kinds(hint)
    if isinstance(value, bool) and kinds & {int, float}:
        raise ValueError(f"{name} is {value}: it should be a number")
    return _split_commas(str(value)) if list in kinds and isinstance(value, (str, int, float)) else value


@functools.cache
def _kinds(hint: Any) -> set[Any]:
    """The types that a hint is made of: int and None of `int | None`, list and str of `list[str]`."""
    return {get_origin(part) or part for part in (hint, *get_args(hint))}


def _split_commas(text: str) -> list[str]:
    """Split at commas outside parentheses and brackets: `pod,d2o[merge=average,alpha=2]` has two parts."""
    try:
        parts = split(text, ",")
    except ValueError:  # the field itself refuses brackets that do not close
        parts = text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _describe_error(error: ValidationError, cls: type, where: str) -> str:
    """Describe one of pydantic's findings in one line: an unknown key if there is any, else the first.

    Args:
        cls: the section that was built.
        where: its dotted name, as in `build`.
    """
    found: Any = min(error.errors(), key=lambda one: one["type"] != _UNKNOWN)
    *outer, name = found["loc"] or ("",)
    kind = found["type"]
    value = found["input"]
    if kind == _UNKNOWN:
        return _unknown_key(name, _section_at(cls, outer), _dotted_name(where, outer))
    dotted_name = _dotted_name(where, found["loc"])
    if kind == "value_error":
        return _located(str(found["ctx"]["error"]), _section_at(cls, found["loc"]), dotted_name)
    if kind == "missing":
        return f"{dotted_name} is missing: set it in the recipe or with --set {dotted_name}=…"
    choices = re.findall(r"'([^']*)'", found["msg"]) if kind == "literal_error" else []
    should = found["msg"].removeprefix("Input ")
    if kind == "dataclass_type":
        should = (
            f"should be a section with the settings {', '.join(fields_of(_section_at(cls, found['loc'])))}"
        )
    return f"{dotted_name or 'the recipe'} is {value!r}: it {should}{nearest(value, choices)}"


def _dotted_name(where: str, path: Sequence[str | int]) -> str:
    """Join a section's dotted name and a path: `train` and `["many", 0, "rate"]` → `train.many[0].rate`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return (where + "".join(parts)).removeprefix(".")


def _section_at(cls: Any, path: Sequence[str | int]) -> Any:
    """The type at the end of a path inside the section `cls`: `["model"]` in `Recipe` gives `ModelArgs`."""
    for part in path:
        inner = get_args(cls)
        if dataclasses.is_dataclass(cls):
            cls = hints_of(cls)[str(part)]
        else:
            cls = inner[-1] if inner else None
    return cls


def _located(message: str, cls: Any, where: str) -> str:
    """Name the section in a message: `num_sink_tokens is -1` → `model.num_sink_tokens is -1`.

    A message that does not begin with a field's name gets the section in front: `model: …`.

    Args:
        cls: the section that raised the message.
        where: its dotted name.
    """
    if not where or message.startswith(where):
        return message
    first = re.split(r"\W", message, maxsplit=1)[0]
    return f"{where}.{message}" if first in fields_of(cls) else f"{where}: {message}"


def _unknown_key(key: Any, cls: type, where: str) -> str:
    """The message about a key that a section does not have. It shows which key was probably meant.

    The key is compared with the fields of the section and of the sections inside it: at the top of a recipe,
    `num_sink_tokens` is answered with `model.num_sink_tokens`. Where no field is very much alike
    (`_VERY_NEAR`), the message also lists the fields of the section.

    Args:
        key: the unknown key.
        cls: the section.
        where: its dotted name; empty for the whole recipe.
    """
    of_section = f" in {where}" if where else ""
    known = {name: _dotted_name(where, [name]) for name in fields_of(cls)}
    for name in list(known):
        section = hints_of(cls)[name]
        inner = fields_of(section) if dataclasses.is_dataclass(section) else {}
        known = {one: _dotted_name(known[name], [one]) for one in inner} | known
    message = f"unknown key {key!r}{of_section}{nearest(key, known)}"
    if nearest(key, known, _VERY_NEAR):
        return message
    return f"{message}; valid keys: {', '.join(fields_of(cls)) or 'none'}"


def nearest(word: Any, known: Sequence[Any] | dict[str, str], cutoff: float = 0.5) -> str:
    """Suggest the known name that is most like `word`: ` (did you mean 'x'?)`. Empty when none is near.

    Args:
        word: what the user wrote.
        known: the valid names. A dict maps each name that is compared to the text that is shown for it.
        cutoff: how alike `word` and the name must be, from 0 to 1, as difflib measures it.
    """
    names = known if isinstance(known, dict) else {str(choice): str(choice) for choice in known}
    match = difflib.get_close_matches(str(word), list(names), n=1, cutoff=cutoff)
    return f" (did you mean {names[match[0]]!r}?)" if match else ""


class Loader(yaml.SafeLoader):
    """Reads the YAML of recipes: numbers are decimal, and a key that occurs twice is an error.

    `1e-5` is a float here. PyYAML follows YAML 1.1, where it is a string.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            problem = f"key {twice[0]!r} occurs twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBERS = {
    "int": r"[-+]?[0-9][0-9_]*$",
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?\.inf$|\.nan$"
    ),
}
"""Patterns of the texts that are numbers, by type. YAML 1.1 would also read 010 as 8, and 1:30 as 90."""
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rsplit(":", 1)[1] not in _NUMBERS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _pattern in _NUMBERS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list("-+.0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value.replace("_", "")))


class Dumper(yaml.SafeDumper):
    """Writes a list of plain values on one line."""


def _dump_list(dumper: yaml.SafeDumper, value: list) -> yaml.Node:
    flow = all(not isinstance(item, (dict, list)) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flow)


Dumper.add_representer(list, _dump_list)


def explain(cls: Any, where: str, skip_sections: bool = False) -> list[str]:
    """Lines for `--help`: the dotted name, type, default and documentation of each field.

    Args:
        cls: a section.
        where: its dotted name; empty for a whole recipe.
        skip_sections: leave out the fields that are sections themselves.
    """
    lines = []
    docs = field_docs(cls)
    indent = " " * 6
    for name, item in cls.__pydantic_fields__.items():
        hint, default = hints_of(cls)[name], "required"
        if dataclasses.is_dataclass(hint) and skip_sections:
            continue
        if not item.is_required():
            default = f"default {_as_yaml(item.get_default(call_default_factory=True))}"
        lines.append(f"  {_dotted_name(where, [name])}  ({type_name(hint)}, {default})")
        lines += textwrap.wrap(docs.get(name, ""), 100, initial_indent=indent, subsequent_indent=indent)
    return lines


def _as_yaml(value: Any) -> str:
    """A default as it stands in a recipe: null and true, not None and True."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def type_name(hint: Any) -> str:
    """A type as a reader of a YAML file would say it: `int | null`, `list[str]`, `'auto' | 'dense'`."""
    if get_origin(hint) in (Union, types.UnionType, Literal):
        return " | ".join(map(type_name, get_args(hint)))
    return "null" if hint is type(None) else inspect.formatannotation(hint)


def field_docs(cls: Any) -> dict[str, str]:
    """The string literal under each field, by the field's name."""
    fields = cls.__pydantic_fields__.items()
    return {name: " ".join(item.description.split()) for name, item in fields if item.description}


def fields_of(cls: Any) -> dict[str, dataclasses.Field]:
    """Name → field, for the fields that a recipe may set."""
    return {item.name: item for item in dataclasses.fields(cls) if item.init}


hints_of = functools.cache(typing.get_type_hints)
"""For a class: name → resolved type annotation."""


def is_setting(cls: Any, path: Sequence[str]) -> bool:
    """Whether a path leads to one value: not to a section, a mapping or an unknown name.

    Example: in a `Recipe`, `["seed"]` does. `["train"]` and `["eval", "models"]` do not.

    Args:
        cls: the section where the path begins.
    """
    for key in path:
        if not dataclasses.is_dataclass(cls) or key not in fields_of(cls):
            return False
        cls = hints_of(cls)[key]
    return not dataclasses.is_dataclass(cls) and get_origin(cls) is not dict
