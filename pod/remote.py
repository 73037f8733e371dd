"""Files of other machines: found, watched, and copied here by their URLs.

A URL is s3://, gs://, https:// or anything else that fsspec knows.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any

_VERSION_KEYS = "ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime", "updated"
"""Keys under which a file system of fsspec may report something that changes when the file changes."""


def is_remote(place: str) -> bool:
    """Whether `place`, a source that may also be a local path, is a URL."""
    return "://" in place


def remote_files(url: str) -> list[str]:
    """The URLs of the files that a URL names: of one file, or all that match a pattern or lie below a folder.

    The URL of a folder ends in a slash. The result is sorted, and has no hidden files.

    Raises:
        ValueError: there is no such file, or the server cannot be asked; the message is one line.
    """
    with _asked(url) as (system, path):
        if url.endswith("/"):
            found = system.find(path)
        elif has_magic(path):
            found = system.glob(path)
        else:
            found = [path] if system.isfile(path) else []
        names = sorted(system.unstrip_protocol(name) for name in found)
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise ValueError(
            f"{url} names no file that can be seen from here; the URL of a folder ends in a slash"
        )
    return shown


def remote_state(url: str) -> tuple[int, int]:
    """The size of a file in bytes, and a number that changes when its content changes.

    The number is made of what the server reports (`_VERSION_KEYS`). If it reports nothing of this, the number
    never changes. The result is (-1, 0) for a missing file.
    """
    with _asked(url) as (system, path):
        try:
            told: dict[str, Any] = system.info(path)
        except FileNotFoundError:
            return -1, 0
    version = repr([str(told.get(name)) for name in _VERSION_KEYS])
    return told.get("size") or 0, int(hashlib.sha256(version.encode()).hexdigest()[:15], 16)


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Yield a copy of the file, under its own name in a temporary folder, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="pod-copy-") as folder:
        copy = Path(folder, url.rpartition("/")[2])
        with _asked(url) as (system, path):
            system.get_file(path, str(copy))
        yield copy


@contextmanager
def _asked(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of `url` and its path there.

    Any error becomes a ValueError that names the URL.
    """
    from fsspec.core import url_to_fs

    try:
        yield url_to_fs(url)
    except Exception as error:  # each file system has its own classes of errors
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{url} cannot be read ({type(error).__name__}: {said}): "
            "check the address, the network and your keys"
        ) from error
