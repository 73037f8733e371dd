"""Result files, one JSON per method, and what tells one code from another.

`<output_dir>/eval/<method>.json` holds `parts`, one per task that was ever scored for this very row. A row
is one model, with its options and the plan behind its bytes. Parts are made of the answers in
`pod.eval.answer.answer_cache`, and can be made again at any time.
"""

import ast
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pod.files import read_mapping, write_json
from pod.identity import content_of
from pod.measure.machine import environment, version
from pod.registry import METHODS
from pod.registry.method import Method

SCHEMA_VERSION = 2
_DECISIVE = ("torch", "transformers", "lm-eval", "flash-attn")
_PACKAGE = Path(__file__).resolve().parents[1]
ANSWERING = ("answer_cache", "gates", "generate", "reading", "score")
"""Files of `pod.eval.answer` that decide what is said.

What the others decide (method, model, budget) stands in an answer's key or in the name of its cache.
"""
_CODE = (
    *("families.py", "models.py", "notation.py", "registry/combine.py"),
    *("modeling/**/*.py", "kernels/**/*.py", "engine/**/*.py"),
    *(f"eval/answer/{name}.py" for name in ANSWERING),
    *(f"eval/lm/{name}.py" for name in ("batches", "model")),
)
_WORDS = ("title", "frees", "paper", "url", "refuses_pod")
"""What a method's entry in the registry says for readers alone."""


class RunResults:
    """The result file of a method, written after every part.

    Parts of a file with another `row` (another model, plan or option) are `left_out`: they can be scored
    again where their answers are kept. An existing file of another schema or method is replaced, and so is an
    unreadable one.

    Args:
        path: the JSON file.
        header: what is the same for all parts (method, config …); its `row` is among them.
        writes: False on ranks that only help.
    """

    def __init__(self, path: str | os.PathLike, method: str, header: dict[str, Any], writes: bool = True):
        self.path, self.writes = Path(path), writes
        old = read_mapping(self.path) or {}
        if (old.get("schema"), old.get("method")) != (SCHEMA_VERSION, method):
            old = {}
        same = old.get("row") == header.get("row")
        self.left_out = [] if same else list(old.get("parts", {}))
        self.content = {
            "schema": SCHEMA_VERSION,
            "method": method,
            "status": "running",
            "failed": {},
            **header,
            "model": old.get("model") if same else None,
            "environment": environment(),
            "refused": {},
            "parts": old.get("parts", {}) if same else {},
        }

    def store(self, part: str, payload: dict[str, Any]) -> None:
        """Keep a finished part and write the file."""
        self.content["parts"][part] = payload
        self.write()

    def finish(self) -> None:
        """Mark the run finished."""
        self.content |= {"status": "finished", "failed": {}}
        self.write()

    def fail(self, part: str, error: Exception) -> None:
        """Record the error of a part in one line. Parts that finished stay."""
        self.content["failed"][part] = one_line(error)
        self.content["status"] = "failed"
        self.write()

    def write(self) -> None:
        """Write the file as it stands, atomically."""
        if self.writes:
            write_json(self.path, self.content)


def result_files(folder: str | os.PathLike) -> Iterator[tuple[str, dict]]:
    """File name and content of every result file of a folder, of any schema, one at a time."""
    for file in sorted(Path(folder).glob("*.json")):
        content = read_mapping(file)
        if content and content.get("method"):
            yield file.name, content


def fingerprint(inputs: Any) -> str:
    """SHA-256 of the canonical JSON of `inputs`, with the schema version."""
    text = json.dumps({"schema": SCHEMA_VERSION, "inputs": inputs}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_files(options: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a method, with the content of files in place of their names (as `razor`'s `heads`).

    A file may change under its name, and may be the same under another.
    """
    return {
        name: ["file", content_of(value)] if isinstance(value, str) and Path(value).is_file() else value
        for name, value in options.items()
    }


@functools.cache
def code_identity(*more: str) -> str:
    """A digest of what decides answers besides the question.

    That is: the versions of the libraries under it, the facts of the methods (not their titles), and the code
    of the model, its families, kernels, caches, budgets and of asking.
    Comments, docstrings and layout do not count. What makes prompts does not count either (prompts are in an
    answer's key), nor does what scores or draws.

    Args:
        more: patterns of further sources, below the package.
    """
    files = sorted({file for pattern in (*_CODE, *more) for file in _PACKAGE.glob(pattern)})
    sources = [[file.relative_to(_PACKAGE).as_posix(), _meaning(file)] for file in files]
    versions = {name: version(name) for name in _DECISIVE}
    methods = {name: _decisive_facts(method) for name, method in METHODS.items()}
    return fingerprint({"versions": versions, "methods": methods, "sources": sources})[:16]


def _decisive_facts(method: Method) -> dict[str, Any]:
    """What decides answers in a method's entry of the registry: all but words for readers."""
    facts = {key: value for key, value in vars(method).items() if key not in _WORDS}
    facts["parameters"] = {name: parameter.default for name, parameter in method.parameters.items()}
    return facts


def _meaning(file: Path) -> str:
    """A digest of what a Python file does."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a string that stands alone is a docstring
            body[:] = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def one_line(error: BaseException) -> str:
    """The message of an error as one line.

    Without a message it is the error's class. For an unexpected kind of error the class stands before the
    message.
    """
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
