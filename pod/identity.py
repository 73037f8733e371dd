"""What tells one model from another: the content of its files, wherever they lie and whenever they were copied."""

import contextlib
import hashlib
import os
from pathlib import Path

from pod.files import read_mapping, sha256_file, write_json
from pod.models import cache_dir

_LARGE = 64 << 20  # bytes from which a file's digest is remembered
_BESIDE = {".md", ".py"}  # suffixes of cards and of an export's own code, which is not what runs here


def content_of(path: str | os.PathLike) -> str:
    """SHA-256 of a file, or over names and contents of the files of a model's folder that decide what the model says.

    A name that is no local path (a hub id) is its own identity.
    """
    root = Path(path)
    if not root.exists():
        return str(path)
    if root.is_file():
        return _digest(root)
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and not _is_beside(file)]
    found = [f"{file.name} {_digest(file)}" for file in files]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def plan_of(path: str | os.PathLike) -> list:
    """What a plan decides: roles, order of heads, bits, and constants that stand for the first tokens; not where it
    came from. ValueError for a file that is no plan."""
    from pod.modeling.shipped.sharing import SharingPlan  # which loads torch

    plan = SharingPlan.load(path)
    found: list = [plan.lead, plan.head_order, plan.bits]
    if plan.sinks == "constant":
        constants = plan.sink_constants
        found.append(["constant", *((constants.logits, constants.values) if constants else ())])
    return found


def _is_beside(file: Path) -> bool:
    return file.suffix in _BESIDE or file.name == "plan.json" or file.name.startswith("LICENSE")


def _digest(file: Path) -> str:
    """SHA-256 of a file; large ones are read again only when they changed, gigabytes of weights take seconds."""
    status = file.stat()
    if status.st_size < _LARGE:
        return sha256_file(file)
    seen = cache_dir() / "digests.json"
    known = read_mapping(seen) or {}
    name, now = str(file.resolve()), [status.st_size, status.st_mtime_ns]
    if known.get(name, [])[:2] != now:
        known[name] = [*now, sha256_file(file)]
        with contextlib.suppress(OSError):  # a cache that cannot be written is not one
            write_json(seen, known)
    return known[name][2]
