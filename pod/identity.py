"""Tell models and plans apart by their content. Where a file lies and when it was copied does not matter."""

import contextlib
import hashlib
import os
from pathlib import Path

from pod.files import read_mapping, sha256_file, write_json
from pod.models import cache_dir

# The digest of a file is remembered from this size in bytes.
_LARGE = 64 << 20
# Suffixes of model cards, and of an export's own modeling code, which pod does not run.
_BESIDE = {".md", ".py"}


def content_of(path: str | os.PathLike) -> str:
    """SHA-256 of a file, or of a model's folder, as 64 hex digits.

    For a folder it is taken over names and contents of the files that decide what the model says. A name that
    is no local path (a hub id) is returned as it is.
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
    """What a plan decides: roles, order of heads, bits, and constants that stand for the first tokens.

    How the plan was made is no part of it. Neither are its windows.

    Raises:
        ValueError: the file is no plan.
    """
    from pod.modeling.model.packed_bytes import RESIDUAL  # the package loads torch
    from pod.modeling.model.sharing import SharingPlan

    plan = SharingPlan.load(path)
    found: list = [plan.lead, plan.head_order, plan.bits]
    if plan.packs and plan.residual != RESIDUAL:
        found.append(["residual", plan.residual])
    if plan.sinks == "constant":
        constants = plan.sink_constants
        found.append(["constant", *(constants.tables().values() if constants else ())])
    return found


def _is_beside(file: Path) -> bool:
    return file.suffix in _BESIDE or file.name == "plan.json" or file.name.startswith("LICENSE")


def _digest(file: Path) -> str:
    """SHA-256 of a file.

    A large file is read again only when it changed, because gigabytes of weights take seconds.
    """
    status = file.stat()
    if status.st_size < _LARGE:
        return sha256_file(file)
    seen = cache_dir() / "digests.json"
    known = read_mapping(seen) or {}
    name, now = str(file.resolve()), [status.st_size, status.st_mtime_ns]
    if known.get(name, [])[:2] != now:
        known[name] = [*now, sha256_file(file)]
        with contextlib.suppress(OSError):  # without a writable cache, the digest is not remembered
            write_json(seen, known)
    return known[name][2]
