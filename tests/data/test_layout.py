"""The folders of pod/data import one way: read ← tokens ← balance ← rows ← run."""

import ast
from pathlib import Path

DATA = Path(__file__).parents[2] / "pod" / "data"
ORDER = ["args", "read", "tokens", "balance", "rows", "run", "cli", "__init__"]


def test_imports_point_one_way():
    seen = set()
    for file in DATA.rglob("*.py"):
        own = file.relative_to(DATA).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pod.data."):
                other = str(node.module).split(".")[2]
                assert ORDER.index(other) <= ORDER.index(own), f"{file} imports {node.module}"
                seen.add((own, other))
    assert ("run", "rows") in seen and ("rows", "read") in seen
