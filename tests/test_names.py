"""One name, one thing: no file name and no type name twice in pod."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

POD = Path(__file__).resolve().parents[1] / "pod"
ALLOWED = {"__init__.py", "__main__.py", "args.py"}
"""Every package may have these."""


def repeated(names: list[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names that stand more than once, with their files."""
    files = defaultdict(list)
    for name, file in names:
        files[name].append(file.as_posix())
    return {name: found for name, found in files.items() if len(found) > 1}


def file_names(root: Path) -> list[tuple[str, Path]]:
    files = sorted(root.rglob("*.py"))
    return [(file.name, file) for file in files if file.name not in ALLOWED]


def type_names(root: Path) -> list[tuple[str, Path]]:
    """Every class and every other name of a type, with its file. Classes inside functions count too."""
    found = []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [(node.name, file) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        found += [(name, file) for name in aliases(tree.body)]
    return found


def aliases(statements: list[ast.stmt]) -> list[str]:
    """The names that are given to types at the top of a file, as in `Log = Callable[[str], None]`.

    `X: TypeAlias = ...` and `type X = ...` count too, and so do both branches of an `if`. Type variables do
    not count: they stand for no type.
    """
    found = []
    for node in statements:
        if isinstance(node, ast.If):
            found += aliases(node.body) + aliases(node.orelse)
        elif isinstance(node, ast.Assign) and is_type(node.value):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
            found.append(ast.unparse(node.target))
        elif type(node).__name__ == "TypeAlias":  # Python 3.12: `type X = ...`
            found.append(ast.unparse(node.name))  # type: ignore[attr-defined]
    return [name for name in found if is_capitalised(name)]


def is_capitalised(name: str) -> bool:
    """Whether a name is written as those of classes are: `Row` and `_Row`, but not `ROWS` or `row`."""
    letters = name.lstrip("_")
    return letters[:1].isupper() and not letters.isupper()


def is_type(value: ast.expr) -> bool:
    """Whether an expression is a name, a subscript such as `dict[str, int]`, or several joined by `|`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return True
    return isinstance(value, (ast.Name, ast.Attribute, ast.Subscript))


@pytest.mark.parametrize("names", [file_names, type_names])
def test_no_name_stands_for_two_things(names):
    assert repeated(names(POD)) == {}


@pytest.mark.parametrize("names", [file_names, type_names])
def test_a_repeated_name_is_found(names, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.py").write_text("class Rows:\n    pass\n")
    assert len(repeated(names(tmp_path))) == 1


@pytest.mark.parametrize("again", ["Rows = dict[str, int]", "Rows: TypeAlias = list", "Rows = int | None"])
def test_an_alias_counts_as_a_name_of_a_type(again, tmp_path):
    (tmp_path / "first.py").write_text("class Rows:\n    pass\n")
    (tmp_path / "second.py").write_text(f"if True:\n    {again}\nROWS = rows[0]\nT = TypeVar('T')\n")
    assert [name for name, _ in type_names(tmp_path)] == ["Rows", "Rows"]
