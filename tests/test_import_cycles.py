"""No module of pod imports itself by way of others."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, root: Path, known: set[str]) -> set[str]:
    """Modules of `known` that a file imports anywhere, inside functions and for types alone too."""
    package = file.relative_to(root).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {longest_known(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # a name of a package's own is in its __init__; a module of it is not
            found |= {longest_known(f"{origin}.{alias.name}", known) for alias in node.names}
    return found - {None, module_name(file, root)}


def longest_known(name: str, known: set[str]) -> str | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), None)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach one another."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {frozenset({b for b in reached[a] if a in reached[b]} | {a}) for a in graph if a in reached[a]}
    return [set(group) for group in groups]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        new = graph[stack.pop()] - seen
        seen |= new
        stack += new
    return seen


def import_graph(root: Path) -> dict[str, set[str]]:
    files = {module_name(file, root): file for file in sorted((root / "pod").rglob("*.py"))}
    return {name: imports(file, root, set(files)) for name, file in files.items()}


def test_no_import_goes_round():
    assert [sorted(group) for group in cycles(import_graph(ROOT))] == []


def test_the_search_for_cycles_sees_every_kind_of_import(tmp_path):
    (tmp_path / "pod" / "kernels").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "kernels/__init__": "",
        "kernels/a": "from . import b\n",
        "kernels/b": "def f():\n    from pod.kernels.c import g\n",
        "kernels/c": "import pod.kernels.a\n",
        "kernels/d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .e import x\n",
        "kernels/e": "from .d import y\n",
    }.items():
        (tmp_path / "pod" / f"{name}.py").write_text(text)
    found = cycles(import_graph(tmp_path))
    assert sorted(map(sorted, found)) == [
        ["pod.kernels.a", "pod.kernels.b", "pod.kernels.c"],
        ["pod.kernels.d", "pod.kernels.e"],
    ]
