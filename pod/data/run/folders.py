"""What a preparation may replace and remove.

It leaves alone what somebody else put there and what another run works with.
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
OF_WORK = re.compile(r"work\.json|unit-.+|shard-\d+\.json|rows|\..+")


def check_replaceable(folder: Path, own: re.Pattern = _OF_PREPARED_DATA) -> None:
    """Check that `folder`, which is replaced or removed as a whole, holds nothing but files of `own` names.

    Raises:
        ValueError: when it is a file or holds anything else.
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
    """Check that `output_dir` does not lie in a folder that is read.

    Its files would be documents of the next preparation.

    Raises:
        ValueError: when it does.
    """
    for source in sources:
        place, folder = Path(split_fragment(source)[0]).expanduser().resolve(), output_dir.resolve()
        is_matched = "**" in place.parts and fnmatch(str(folder / MANIFEST_NAME), str(place))
        if is_matched or folder.is_relative_to(place):
            raise ValueError(
                f"output_dir {output_dir} is inside the source {source}: set another output_dir, or choose "
                "the files to read with data.include"
            )


@contextlib.contextmanager
def locked(file: Path, seconds: float, message: str) -> Iterator[None]:
    """Hold the lock `file`, which exists only meanwhile.

    Raises:
        ValueError: with `message`, when the lock is not free within `seconds`.
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
        # Before the release: afterwards it could be the lock of the next run.
        with contextlib.suppress(OSError):
            file.unlink()
        lock.release()
