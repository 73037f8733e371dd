"""Checks before a preparation replaces or removes a folder.

It must not remove files of somebody else, nor files that another run works with.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from pod.data.read.books import split_fragment
from pod.data.rows.manifest import MANIFEST_NAME

LOCK_SECONDS = 5.0
"""How long to wait for another run on the same data. Workers of a killed run end in less than a second."""
_OF_PREPARED_DATA = re.compile(
    r"manifest\.json|shard-\d+\.\w+\.npy|held_out\.(tokens\.bin|lengths\.npy)|(lengths|packing|sources)\.png"
    r"|\..+\.tmp-.+|\.DS_Store"
)
"""Names of the files in a folder of prepared data."""
OF_WORK = re.compile(r"work\.json|unit-.+|shard-\d+\.json|rows|\..+")
"""Names of the files in a work folder (see `pod.data.run.job`)."""


def check_replaceable(folder: Path, own: re.Pattern = _OF_PREPARED_DATA) -> None:
    """Refuse to replace or remove `folder` when somebody else put files there.

    Args:
        own: pattern of the names that `pod data` gives to its own files there.

    Raises:
        ValueError: the folder holds a file of another name, or is itself a file.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is a file, but prepared data needs a folder there: move the file, or set another "
            "output_dir"
        )
    strangers = sorted(file.name for file in folder.iterdir() if not own.fullmatch(file.name))
    if strangers:
        raise ValueError(
            f"{folder} has files that `pod data` did not write and would remove, for example "
            f"{strangers[0]!r} ({len(strangers)} in total): move them, or set another output_dir"
        )


def check_outside(output_dir: Path, sources: Iterable[str]) -> None:
    """Refuse an `output_dir` inside a source: its files would be documents of the next preparation.

    Raises:
        ValueError: `output_dir` lies in a folder of `sources`, or a `**` pattern matches files in it.
    """
    for source in sources:
        place = Path(split_fragment(source)[0]).expanduser().resolve()
        folder = output_dir.resolve()
        is_matched = "**" in place.parts and fnmatch(str(folder / MANIFEST_NAME), str(place))
        if is_matched or folder.is_relative_to(place):
            raise ValueError(
                f"output_dir {output_dir} is inside the source {source}: set another output_dir, or choose "
                "the files to read with data.include"
            )


@contextlib.contextmanager
def locked(file: Path, seconds: float, message: str) -> Iterator[None]:
    """Hold a lock while the block runs. The lock is a file that exists only for this time.

    Raises:
        ValueError: with `message`, when another process still holds the lock after `seconds`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise ValueError(message) from None
    try:
        yield
    finally:
        # The file is removed before the release: afterwards it could be the lock of the next run.
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()
