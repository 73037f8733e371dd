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
    """Every class, with its file. Classes inside functions count too."""
    found = []
    for file in sorted(root.rglob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        found += [(node.name, file) for node in nodes if isinstance(node, ast.ClassDef)]
    return found


@pytest.mark.parametrize("names", [file_names, type_names])
def test_no_name_stands_for_two_things(names):
    assert repeated(names(POD)) == {}


@pytest.mark.parametrize("names", [file_names, type_names])
def test_a_repeated_name_is_found(names, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.py").write_text("class Rows:\n    pass\n")
    assert len(repeated(names(tmp_path))) == 1
