"""Writing files so that nothing half-written is ever kept: write under a temporary name, then rename."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil

PathLike = str | os.PathLike[str]

# Bytes. A write that fails while less space than this is free failed for lack of space.
_NEARLY_FULL = 1 << 20


def atomic_write_bytes(path: PathLike, data: bytes) -> None:
    """Write `data` to `path`, which holds afterwards either its old or its whole new content.

    Makes missing folders.

    Raises:
        OSError: the disk is full; one line says how much to free.
    """
    with explain_disk_full(path, needed_bytes=len(data)), atomic_stream(path) as stream:
        stream.write(data)


def atomic_write_text(path: PathLike, text: str) -> None:
    """Write `text` in UTF-8, as `atomic_write_bytes` does."""
    atomic_write_bytes(path, text.encode("utf-8"))


@contextlib.contextmanager
def atomic_stream(path: PathLike) -> Iterator[BinaryIO]:
    """Yield a binary stream: its content becomes `path` when the block ends, and is dropped if it raises."""
    temporary = _temporary_sibling(Path(path))
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: PathLike, replace: bool = True) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`, which becomes `path` when the block ends.

    The folder is removed when the block raises.

    Args:
        replace: True replaces an existing `path`. False keeps it and drops the new folder, as when two
            processes fill one cache.

    Raises:
        OSError: the disk is full; one line says how much to free.
    """
    target = Path(path)
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    try:
        with explain_disk_full(target, written=temporary):
            yield temporary
        move_into_place(temporary, target, replace)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def explain_disk_full(
    path: PathLike, needed_bytes: int | None = None, written: Path | None = None
) -> Iterator[None]:
    """When the disk is full, replace the error of the block by an OSError of one line that says what to do.

    Some libraries hide ENOSPC (NumPy, safetensors, torch). A failed write onto a disk with less than 1 MiB
    left therefore counts too.

    Args:
        path: what the block writes.
        needed_bytes: size of what is being written, when it is known.
        written: a folder whose size is the lower bound when `needed_bytes` is not known.
    """
    try:
        yield
    except Exception as error:  # not only OSError: safetensors' own class derives from Exception
        number = getattr(error, "errno", None)
        says_so = number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
        # FileNotFoundError and its like have an errno and say what is wrong. A hidden ENOSPC has no errno.
        hidden = isinstance(error, (OSError, RuntimeError)) and number is None
        target = Path(path)
        folder = target if target.is_dir() else target.parent
        if not says_so and not (hidden and shutil.disk_usage(folder).free < _NEARLY_FULL):
            raise
        if needed_bytes is None and written is not None:
            needed_bytes = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        megabytes = (needed_bytes or 0) // 10**6 + 1
        raise OSError(
            f"disk full while writing {target}: free at least {megabytes} MB or set another output_dir"
        ) from None


def check_can_write(folder: PathLike, setting: str) -> None:
    """Raise ValueError when files cannot be made in `folder`, or in the nearest folder above it that exists.

    Leaves nothing behind.

    Args:
        setting: the recipe's setting that the message names.
    """
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ValueError(
            f"{setting} = {folder}: {place} is not a folder; set another {setting} or remove this file"
        )
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # the writer knows how much space it needs, and says so
        raise ValueError(
            f"{setting} = {folder}: {place} is not writable ({os.strerror(error.errno or 0)}); "
            f"set another {setting}"
        ) from None


def write_json(path: PathLike, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically.

    Raises:
        ValueError: for NaN and infinity, which JSON does not have.
    """
    try:
        text = json.dumps(obj, indent=2, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"{path}: cannot be written as JSON ({error}); replace NaN and infinity by null"
        ) from None
    atomic_write_text(path, text + "\n")


def read_json(path: PathLike) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: the file is missing or not JSON; one line names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder, expected a JSON file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); delete it and write it again") from None


def read_mapping(path: PathLike) -> dict | None:
    """The mapping that a JSON file holds; None for anything else."""
    try:
        content = read_json(path)
    except (ValueError, OSError):
        return None
    return content if isinstance(content, dict) else None


def sha256_file(path: PathLike) -> str:
    """SHA-256 of a file's bytes as 64 hex digits, read in chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep_old(path: Path) -> Path | None:
    """Move a file out of the way of a new one, under a name with the hash of its content.

    Returns that path, or None where there is no file.
    """
    if not path.is_file():
        return None
    kept = path.with_name(f"{path.stem}-{sha256_file(path)[:8]}{path.suffix}")
    os.replace(path, kept)
    return kept


def move_into_place(temporary: Path, target: Path, replace: bool = True) -> None:
    """Rename a complete folder to `target` on the same file system.

    An older `target` is replaced, or kept with `replace=False`.
    """
    try:
        os.rename(temporary, target)  # this is atomic, and works where `target` is missing or empty
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    if replace:
        old = _temporary_sibling(target)
        os.rename(target, old)
        os.rename(temporary, target)
        _remove(old)


def _temporary_sibling(target: Path) -> Path:
    """A free hidden name beside `target`, made of the host's name and the process id.

    The folder that holds `target` is made. Files and folders that killed processes of this machine left under
    such names are removed, because a checkpoint can be large.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.tmp-{socket.gethostname()}-"
    for entry in target.parent.iterdir():
        pid = entry.name.removeprefix(prefix).split("-")[0]
        if entry.name.startswith(prefix) and pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(entry)
    return target.parent / f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
