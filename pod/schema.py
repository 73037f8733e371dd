"""A dataclass of dataclasses from YAML and back, with every key and type checked, and its fields' documentation for `--help`."""

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
from typing import Any, Literal, Union, get_args, get_origin

import yaml


def to_yaml(recipe: Any, fields: Collection[str] | None = None) -> str:
    """A recipe (or a section) as the YAML that builds it again; of some fields only, if they are given."""
    content = plain(dataclasses.asdict(recipe))
    shown = {name: value for name, value in content.items() if fields is None or name in fields}
    return yaml.dump(shown, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def build(cls: type, content: Any, where: str = "") -> Any:
    """An instance of the dataclass `cls` from a mapping, recursively, with every key and type checked.

    where: dotted name of this place in the recipe, for messages. Raises: ValueError.
    """
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{where or 'the recipe'} is {content!r}, expected a mapping of {', '.join(fields_of(cls))}"
        )
    hints = hints_of(cls)
    values = {}
    for key, value in content.items():
        check_key(cls, key, where)
        values[key] = convert(value, hints[key], join(where, key))
    for name, item in fields_of(cls).items():
        if name not in values and _is_required(item):
            raise ValueError(
                f"{join(where, name)} is missing: set it in the config or with --set {join(where, name)}=…"
            )
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(_located(str(error), cls, where)) from None


def _located(message: str, cls: type, where: str) -> str:
    """The message of a `__post_init__` with its place: `num_sink_tokens is -1` → `model.num_sink_tokens is -1`."""
    if not where or message.startswith(where):
        return message
    begins_with_field = re.split(r"\W", message, maxsplit=1)[0] in fields_of(cls)
    return f"{where}.{message}" if begins_with_field else f"{where}: {message}"


def convert(value: Any, wanted: Any, where: str) -> Any:
    """`value`, as YAML gave it, in the annotated type `wanted`. Raises ValueError: what came, what is allowed."""
    origin = get_origin(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, wanted, where)
    if origin is Literal:
        if value in get_args(wanted) and type(value) in {type(choice) for choice in get_args(wanted)}:
            return value
        raise ValueError(
            f"{where} is {value!r}, allowed: {', '.join(map(str, get_args(wanted)))}{nearest(value, get_args(wanted))}"
        )
    if origin in (list, tuple):
        return _convert_sequence(value, wanted, where)
    if origin is dict and isinstance(value, dict):
        key_type, value_type = get_args(wanted)
        return {convert(k, key_type, where): convert(v, value_type, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(wanted):
        return build(typing.cast(type, wanted), value, where)
    return _convert_scalar(value, wanted, where)


def _convert_scalar(value: Any, wanted: Any, where: str) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 5e9 tokens
    if wanted is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if wanted is Path and isinstance(value, str):
        return Path(value)
    accepted = isinstance(value, wanted) if isinstance(wanted, type) else False
    if not accepted or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{where} is {value!r}, expected {type_name(wanted)}")
    return value


def _convert_union(value: Any, wanted: Any, where: str) -> Any:
    choices = get_args(wanted)
    if value is None and type(None) in choices:
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    exact = [choice for choice in rest if isinstance(choice, type) and type(value) is choice]
    for choice in [*exact, *rest[:-1]]:
        try:
            return convert(value, choice, where)
        except ValueError:
            continue
    try:
        return convert(value, rest[-1], where)
    except ValueError as error:
        if len(rest) == 1:
            raise
        raise ValueError(f"{where} is {value!r}, expected {type_name(wanted)}") from error


def _convert_sequence(value: Any, wanted: Any, where: str) -> Any:
    """Lists and tuples; a plain string is a comma-separated list, so that `--set eval.methods=full,pod` works."""
    origin, items = get_origin(wanted), get_args(wanted)
    if isinstance(value, str):
        parts = _split_commas(value)
        value = parts if items[0] is str else [yaml.load(part, Loader=Loader) for part in parts]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is {value!r}, expected {type_name(wanted)}")
    if origin is tuple and items[-1] is not Ellipsis:
        if len(value) != len(items):
            raise ValueError(f"{where} has {len(value)} entries, expected {len(items)}")
        return tuple(
            convert(v, item, f"{where}[{i}]") for i, (v, item) in enumerate(zip(value, items, strict=True))
        )
    converted = [convert(v, items[0], f"{where}[{i}]") for i, v in enumerate(value)]
    return tuple(converted) if origin is tuple else converted


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
