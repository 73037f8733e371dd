"""A dataclass of dataclasses from YAML and back, with every key, type and range checked, and its fields' documentation for `--help`.

pydantic converts and checks; what it finds is told in one line: which field, what came, what is allowed.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

_Section = TypeVar("_Section")
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
AtLeast2 = Annotated[int, Field(ge=2)]


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def section(cls: type[_Section]) -> type[_Section]:
    """A dataclass for recipes: keyword arguments only, converted and checked wherever one is made.

    A `ValueError` of its `__post_init__`, which begins with a field's name where it is about one, says what types and ranges cannot.
    """
    settings = ConfigDict(coerce_numbers_to_str=True, extra="forbid")
    made: Any = checked_dataclass(kw_only=True, config=settings)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except ValidationError as error:
            raise ValueError(_told(error, made)) from None

    made.__init__ = checked
    return made


def to_yaml(recipe: Any, fields: Collection[str] | None = None) -> str:
    """A recipe (or a section) as the YAML that builds it again; of some fields only, if they are given."""
    content = plain(dataclasses.asdict(recipe))
    shown = {name: value for name, value in content.items() if fields is None or name in fields}
    return yaml.dump(shown, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def build(cls: type, content: Any, where: str = "") -> Any:
    """An instance of the section `cls` from a mapping as YAML gave it.

    where: dotted name of this place in the recipe, for messages. Raises: ValueError.
    """
    try:
        return cls(**_prepared(content, cls, where))
    except ValueError as error:
        raise ValueError(_located(str(error), cls, where)) from None


def _located(message: str, cls: type, where: str) -> str:
    """A message with its place: `num_sink_tokens is -1` → `model.num_sink_tokens is -1`."""
    if not where or message.startswith((where, "unknown key")):
        return message
    begins_with_field = re.split(r"\W", message, maxsplit=1)[0] in fields_of(cls)
    return f"{where}.{message}" if begins_with_field else f"{where}: {message}"


def _prepared(value: Any, wanted: Any, where: str) -> Any:
    """What pydantic shall convert: keys are known, comma-separated texts are lists, and truth values are no numbers."""
    if dataclasses.is_dataclass(wanted) and not dataclasses.is_dataclass(value):
        return _prepared_section({} if value is None else value, typing.cast(type, wanted), where)
    if get_origin(wanted) in (list, tuple):
        items = get_args(wanted)
        if isinstance(value, str):
            parts = _split_commas(value)
            value = parts if items[0] is str else [yaml.load(part, Loader=Loader) for part in parts]
        if isinstance(value, (list, tuple)):
            return [_prepared(item, items[0], f"{where}[{number}]") for number, item in enumerate(value)]
    is_number = {int, float} & set(get_args(wanted) or (wanted,))
    if is_number and isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}, expected {type_name(wanted)}")
    return value


def _prepared_section(value: Any, cls: type, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{where or 'the recipe'} is {value!r}, expected a mapping of {', '.join(fields_of(cls))}"
        )
    for key in value:
        check_key(cls, key, where)
    return {key: _prepared(item, hints_of(cls)[key], join(where, key)) for key, item in value.items()}


def _told(error: ValidationError, cls: type) -> str:
    """The first of pydantic's findings in one line, without the place of `cls`."""
    found: Any = error.errors()[0]
    where, hint, bounds = _place(found["loc"], cls)
    value, kind = found["input"], found["type"]
    if kind == "value_error":
        return _located(str(found["ctx"]["error"]), hint, where)
    if kind == "missing" and get_origin(hint) is not tuple:
        return f"{where} is missing: set it in the config or with --set {where}=…"
    if kind == "literal_error":
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        choices = [choice for part in literals for choice in get_args(part)]
        return f"{where} is {value!r}, allowed: {', '.join(map(str, choices))}{nearest(value, choices)}"
    if kind.startswith(("greater_than", "less_than")):
        return f"{where} is {value!r}, allowed are {_range(bounds, float in (hint, *get_args(hint)))}"
    return f"{where} is {value!r}, expected {type_name(hint)}"


def _place(path: tuple[str | int, ...], cls: Any) -> tuple[str, Any, dict[str, float]]:
    """Where a finding is: the dotted name, the type and the bounds there; what a branch of a union found belongs to the union."""
    where, hint, bounds = "", cls, dict[str, float]()
    for part in path:
        if dataclasses.is_dataclass(hint) and part in fields_of(hint):  # type: ignore[arg-type]
            bounds = bounds_of(hint)[part]  # type: ignore[arg-type, index]
            where, hint = join(where, part), hints_of(hint)[part]  # type: ignore[arg-type, index]
        elif get_origin(hint) is list or (get_origin(hint) is tuple and part in range(len(get_args(hint)))):
            where, hint = f"{where}[{part}]", get_args(hint)[0]
        elif get_origin(hint) is dict:
            where, hint = f"{where}.{part}", get_args(hint)[1]
        else:
            break
    return where, hint, bounds


def _range(bounds: dict[str, float], fractions: bool) -> str:
    """Allowed numbers in words: `1 and more`, `0 to 1`, `0 to below 1`, `numbers above 0`."""
    if fractions and "gt" in bounds:
        return f"numbers above {bounds['gt']:g}"
    low = bounds["ge"] if "ge" in bounds else bounds["gt"] + 1
    if "le" in bounds or "lt" in bounds:
        return f"{low:g} to {bounds['le']:g}" if "le" in bounds else f"{low:g} to below {bounds['lt']:g}"
    return f"{low:g} and more"


@functools.cache
def bounds_of(cls: type) -> dict[str, dict[str, float]]:
    """Field → its bounds: `ge`, `gt`, `le`, `lt`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: dict(_bounds(hint)) for name, hint in hints.items()}


def _bounds(hint: Any) -> typing.Iterator[tuple[str, float]]:
    for item in getattr(hint, "__metadata__", ()):
        for one in getattr(item, "metadata", None) or [item]:
            yield from ((name, getattr(one, name)) for name in ("ge", "gt", "le", "lt") if hasattr(one, name))
    for part in get_args(hint):
        yield from _bounds(part)


def _split_commas(text: str) -> list[str]:
    """Split at commas outside parentheses and brackets: `pod,d2o[merge=average,alpha=2]` has two parts."""
    parts = re.findall(r"(?:[^,()\[\]]|\([^()]*\)|\[(?:[^\[\]]|\[[^\[\]]*\])*\])+", text)
    return [part.strip() for part in parts if part.strip()]


def check_key(cls: type, key: Any, where: str) -> None:
    """Raises ValueError with the nearest valid key when the dataclass `cls` has no field `key`."""
    if key in fields_of(cls):
        return
    place = f" in {where}" if where else ""
    message = f"unknown key {str(key)!r}{place}{nearest(key, _known_keys(cls, where))}"
    raise ValueError(f"{message}; valid keys: {', '.join(fields_of(cls))}")


def _known_keys(cls: type, where: str) -> dict[str, str]:
    """Field name → dotted name: the section's own fields first, then, at the top, those of all sections."""
    known = {name: join(where, name) for name in fields_of(cls)}
    for name in list(known):
        section = hints_of(cls)[name]
        if dataclasses.is_dataclass(section):
            for inner in fields_of(typing.cast(type, section)):
                known.setdefault(inner, join(known[name], inner))
    return known


def nearest(word: Any, known: Sequence[Any] | dict[str, str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is near. A dict maps what to compare with to what to show."""
    names = known if isinstance(known, dict) else {str(choice): str(choice) for choice in known}
    match = difflib.get_close_matches(str(word), list(names), n=1, cutoff=0.5)
    return f" (did you mean {names[match[0]]!r}?)" if match else ""


class Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (`1e-5` is a float; PyYAML's 1.1 rules make it a string) and duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class Dumper(yaml.SafeDumper):
    """Lists of plain values on one line."""


def _dump_list(dumper: yaml.SafeDumper, value: list) -> yaml.Node:
    flow = all(not isinstance(item, (dict, list)) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flow)


Dumper.add_representer(list, _dump_list)


def plain(value: Any) -> Any:
    """`value` made of dicts, lists, strings and numbers only."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def explain(cls: type, where: str, skip_sections: bool = False) -> list[str]:
    """Lines for `--help`: per field its dotted name, type, default and documentation."""
    lines = []
    for name, item in fields_of(cls).items():
        hint = hints_of(cls)[name]
        if dataclasses.is_dataclass(hint) and skip_sections:
            continue
        lines.append(f"  {join(where, name)}  ({type_name(hint)}, {_default_text(item)})")
        lines += textwrap.wrap(
            field_docs(cls).get(name, ""), 100, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return lines


def _default_text(item: dataclasses.Field) -> str:
    if _is_required(item):
        return "required"
    if item.default is not dataclasses.MISSING:
        return f"default {item.default!r}"
    return f"default {typing.cast(Callable[[], Any], item.default_factory)()!r}"


def type_name(hint: Any) -> str:
    """A type as a reader of a YAML file would say it: `int or null`, `list of str`, `one of a | b`."""
    origin, items = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(item) for item in items)
    if origin is Literal:
        return "one of " + " | ".join(map(str, items))
    if origin in (list, tuple):
        shown = [item for item in items if item is not Ellipsis]
        return f"list of {', '.join(type_name(item) for item in shown)}"
    if origin is dict:
        return f"mapping of {type_name(items[0])} to {type_name(items[1])}"
    return getattr(hint, "__name__", str(hint))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field, read from the class's source; inherited fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        except (OSError, TypeError):
            continue  # a class made at run time has no source
        for before, after in itertools.pairwise(body):
            if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                docs[before.target.id] = " ".join(str(after.value.value).split())
    return docs


def fields_of(cls: type) -> dict[str, dataclasses.Field]:
    """Name → field, for the fields that a recipe may set."""
    return {item.name: item for item in dataclasses.fields(cls) if item.init}


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Name → resolved type annotation."""
    return typing.get_type_hints(cls)


def _is_required(item: dataclasses.Field) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def join(where: str, name: Any) -> str:
    """`where.name`, or `name` at the top."""
    return f"{where}.{name}" if where else str(name)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())
