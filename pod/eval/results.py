"""Result files, one JSON per method, and a digest of the code that can change answers.

`<output_dir>/eval/<method>.json` describes one *row*: a method with its options, its model, and the plan and
windows that its byte budget follows. It holds `parts`, one per task that was ever scored for this row. A part
is computed from the answers in `pod.eval.answer.answer_cache`, and can be computed again at any time.
"""

import ast
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pod.errors import one_line
from pod.files import read_mapping, write_json
from pod.identity import content_of
from pod.measure.machine import environment, version
from pod.registry import METHODS
from pod.registry.method import Method

SCHEMA_VERSION = 2
_DECISIVE = ("torch", "transformers", "lm-eval", "flash-attn")
_PACKAGE = Path(__file__).resolve().parents[1]
ANSWERING = ("answer_cache", "gates", "generate", "reading", "score")
"""Files of `pod.eval.answer` whose code can change an answer.

What the other files decide (method, model, budget) is part of an answer's key or of its cache's name.
"""
_CODE = (
    *("families.py", "models.py", "notation.py", "registry/combine.py"),
    *("modeling/**/*.py", "kernels/**/*.py", "engine/**/*.py"),
    *(f"eval/answer/{name}.py" for name in ANSWERING),
    *(f"eval/lm/{name}.py" for name in ("batches", "model")),
)
_WORDS = ("title", "frees", "paper", "url", "refuses_pod")
"""Fields of a method's entry in the registry that are text for readers and change no answer."""


class RunResults:
    """The result file of a method, written after every part.

    The parts of an existing file are kept if its `row` is the same. If its row is another (another model,
    plan or option), its parts are left out; they can be scored again where their answers are kept. A file of
    another schema or method is replaced, and so is an unreadable one.

    Args:
        path: the JSON file.
        method: the method's name.
        header: fields that are the same for all parts (title, spec, config …), `row` among them.
        writes: False on ranks that only help: they write no file.

    Attributes:
        left_out: names of the parts of the existing file that are left out.
        content: what the file holds.
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
        """Mark the run finished, without errors, and write the file."""
        self.content |= {"status": "finished", "failed": {}}
        self.write()

    def fail(self, part: str, error: Exception) -> None:
        """Record the error of a part in one line, mark the run failed, and write. Finished parts stay."""
        self.content["failed"][part] = one_line(error, with_class=True)
        self.content["status"] = "failed"
        self.write()

    def write(self) -> None:
        """Write the file as it stands, atomically."""
        if self.writes:
            write_json(self.path, self.content)


def result_files(folder: str | os.PathLike) -> Iterator[tuple[str, dict]]:
    """File name and content of every result file of a folder, of any schema, one at a time.

    JSON files that name no method are skipped.
    """
    for file in sorted(Path(folder).glob("*.json")):
        content = read_mapping(file)
        if content and content.get("method"):
            yield file.name, content


def fingerprint(inputs: Any) -> str:
    """SHA-256 of the canonical JSON of `inputs`, with the schema version."""
    text = json.dumps({"schema": SCHEMA_VERSION, "inputs": inputs}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_files(options: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a method, in which a digest of a file's content replaces the file's name.

    An example is `razor`'s `heads`. So a file that changed counts as another one, and a renamed file counts
    as the same.
    """
    return {
        name: ["file", content_of(value)] if isinstance(value, str) and Path(value).is_file() else value
        for name, value in options.items()
    }


@functools.cache
def code_identity(*more: str) -> str:
    """A digest (16 hex digits) of the code and the versions that can change a method's answers.

    It covers the versions of the libraries in `_DECISIVE`, the facts of the methods (not their titles), and
    the code of the models, families, kernels, caches and budgets, and of answering (`ANSWERING`, and two
    files of `pod.eval.lm`). It does not cover comments, docstrings and layout; nor the code that makes
    prompts (they are in an answer's key), scores answers or draws pictures.

    Args:
        more: glob patterns of further source files, relative to the folder of the package `pod`.
    """
    files = sorted({file for pattern in (*_CODE, *more) for file in _PACKAGE.glob(pattern)})
    sources = [[file.relative_to(_PACKAGE).as_posix(), _meaning(file)] for file in files]
    versions = {name: version(name) for name in _DECISIVE}
    methods = {name: _decisive_facts(method) for name, method in METHODS.items()}
    return fingerprint({"versions": versions, "methods": methods, "sources": sources})[:16]


def _decisive_facts(method: Method) -> dict[str, Any]:
    """The fields of a method's entry in the registry that can change answers: all but `_WORDS`."""
    facts = {key: value for key, value in vars(method).items() if key not in _WORDS}
    facts["parameters"] = {name: parameter.default for name, parameter in method.parameters.items()}
    return facts


def _meaning(file: Path) -> str:
    """A digest of a Python file that ignores comments, docstrings and layout."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a string that stands alone is a docstring
            body[:] = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
