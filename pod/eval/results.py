"""Result files: one JSON per method with everything needed to trust it and to know whether it is still valid.

`<output_dir>/eval/<method>.json` holds `parts` (one per task), each with the fingerprint of its inputs: a part is reused as long
as its fingerprint stays the same, so that an interrupted run continues where it was and a changed model is measured again.
"""

import datetime
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pod.eval.methods import safe_name
from pod.files import read_json, sha256_file, write_json

SCHEMA_VERSION = 2
_HASHED_WHOLE = 1 << 20  # bytes; smaller files are identified by content, weights by size and time of change
_PACKAGES = ("pod-kv", "torch", "transformers", "numpy", "lm-eval")
_DECISIVE = ("torch", "transformers", "lm-eval", "rouge", "rouge_score", "rapidfuzz", "jieba", "flash-attn")
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = (
    *("models.py", "modeling/**/*.py", "kernels/**/*.py", "engine/**/*.py"),
    *("eval/*.py", "eval/lm/*.py", "eval/runners/base.py", "eval/suites/*.py"),
)


class RunResults:
    """The result file of one run (a method, or the speeds of all), written after every part.

    path: the JSON file; writes: False on ranks that only help; header: what is the same for all parts (method, config …). An existing file of another schema or
    method is replaced, an unreadable one too: results can be measured again.
    """

    def __init__(self, path: str | os.PathLike, method: str, header: dict[str, Any], writes: bool = True):
        self.path, self.writes = Path(path), writes
        old = _read_or_none(self.path)
        old = old if old and old.get("method") == method else {}
        self.content = {
            "schema": SCHEMA_VERSION,
            "method": method,
            "status": "running",
            "error": None,
            "failed": {},
            **header,
            "model": old.get("model"),
            "environment": environment(),
            "refused": {},
            "parts": old.get("parts", {}),
        }

    def keep(self, wanted: dict[str, str]) -> None:
        """Forget every part but those measured with the given fingerprints, so that the file never mixes old and new.

        The file with the forgotten parts stays in the folder `replaced`.
        """
        parts = self.content["parts"]
        self.content["parts"] = {
            name: parts[name] for name, inputs in wanted.items() if self.finished(name, inputs)
        }
        if self.writes and len(self.content["parts"]) < len(parts):
            self._set_aside()

    def _set_aside(self) -> None:
        """Copy the file into the folder `replaced`: hours of work, maybe, of tasks that this run merely does not name."""
        when = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        place = self.path.parent / "replaced"
        place.mkdir(exist_ok=True)
        shutil.copy2(self.path, place / f"{self.path.stem}.{when}.json")

    def finished(self, part: str, fingerprint: str) -> bool:
        """Whether this part was measured before with exactly these inputs."""
        return self.content["parts"].get(part, {}).get("fingerprint") == fingerprint

    def store(self, part: str, fingerprint: str, seconds: float, payload: dict[str, Any]) -> None:
        """Keep a finished part and write the file. seconds: how long it took."""
        self.content["parts"][part] = {
            "fingerprint": fingerprint,
            "seconds": round(seconds, 3),
            "environment": environment(),
            **payload,
        }
        self.write()

    def finish(self) -> None:
        """Mark the run finished."""
        self.content |= {"status": "finished", "error": None, "failed": {}}
        self.write()

    def fail(self, part: str, error: Exception) -> None:
        """Record the error of a part in one line (`failed`, by part; `error` has all of them). Parts that finished stay."""
        self.content["failed"][part] = one_line(error)
        self.content["status"] = "failed"
        self.content["error"] = "; ".join(f"{name}: {text}" for name, text in self.content["failed"].items())
        self.write()

    def write(self) -> None:
        """Write the file as it stands, atomically."""
        if self.writes:
            write_json(self.path, self.content)


def load_results(folder: str | os.PathLike, methods: list[str] | None = None) -> dict[str, dict]:
    """Results by method name, in the order of `methods` (default: every method file there, by name).

    Raises: ValueError when the folder holds none of them.
    """
    files = sorted(Path(folder).glob("*.json"))
    if methods is not None:
        files = [Path(folder) / f"{safe_name(name)}.json" for name in methods]
    found = [_read_or_none(file) for file in files]
    results = {content["method"]: content for content in found if content and content.get("method")}
    if methods is not None:
        results = {name: results[name] for name in methods if name in results}
    if not results:
        raise ValueError(f"{folder} holds no evaluation results: run launch/run_eval.py first")
    return results


def fingerprint(inputs: Any) -> str:
    """SHA-256 of the canonical JSON of `inputs`, with the schema version."""
    text = json.dumps({"schema": SCHEMA_VERSION, "inputs": inputs}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def identity(path: str | os.PathLike) -> Any:
    """What tells one model file or folder from another: small files by content, large ones by size and time of change.

    A name that is no local path (a hub id) is its own identity.
    """
    root = Path(path)
    if not root.exists():
        return str(path)
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    return [[file.name, *_file_identity(file)] for file in files]


def with_files(options: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a method with what the files that they name hold (as `razor`'s `heads`): a file may change under its name."""
    return {
        name: [value, identity(value)] if isinstance(value, str) and Path(value).is_file() else value
        for name, value in options.items()
    }


def _file_identity(file: Path) -> list[Any]:
    status = file.stat()
    return [status.st_size, sha256_file(file) if status.st_size < _HASHED_WHOLE else status.st_mtime_ns]


@functools.cache
def code_identity(more: str = "") -> str:
    """What decides answers besides a task's own files: versions of the libraries under it, sources of model, kernels, caches and scoring.

    An upgrade or an edit makes older results outdated; what only draws them (`report/`) does not, and of `runners/` and `tasks/`
    each task counts its own. more: a pattern of further sources, below the package.
    """
    patterns = (*_CODE, more) if more else _CODE
    files = [file for pattern in patterns for file in sorted(_PACKAGE.glob(pattern))]
    sources = [[file.relative_to(_PACKAGE).as_posix(), sha256_file(file)] for file in files]
    return fingerprint({"versions": {name: _version(name) for name in _DECISIVE}, "sources": sources})[:16]


def environment() -> dict[str, Any]:
    """Date (UTC), versions, commit of this package's checkout, hardware, threads."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def one_line(error: BaseException) -> str:
    """The error as one line: its message, or its class when it has none or is of an unexpected kind."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that this package runs from, `+` when files differ from it; None outside a checkout."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "HEAD")
        return name + "+" if _git(root, "status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read_or_none(path: Path) -> dict | None:
    """The file's content when it is a result file of this schema."""
    try:
        content = read_json(path)
    except (ValueError, OSError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA_VERSION else None
