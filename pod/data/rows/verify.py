"""Is prepared data whole? Compares every byte with its checksum, then the arrays with the manifest."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pod.data.rows.held_out import map_held_out
from pod.data.rows.length_pictures import PICTURE_NAME
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import (
    MANIFEST_NAME,
    check_file,
    check_manifest_bytes,
    listed_files,
    read_manifest,
)
from pod.errors import one_line


class DamagedData(ValueError):
    """A folder of prepared data has damaged or missing files. The message names the file in one line."""


def open_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder.

    Raises:
        DamagedData: the folder has shards, but the manifest is missing or damaged.
        ValueError: the folder has no prepared data, or data of another version of the format.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: give the folder that `pod data` wrote")
    has_shards = any(folder.glob("shard-*.npy"))
    if not (folder / MANIFEST_NAME).is_file() and not has_shards:
        inside = folder / "data"
        is_run = (inside / MANIFEST_NAME).is_file()
        hint = f"did you mean {inside}?" if is_run else "give the folder that `pod data` wrote"
        raise ValueError(f"{folder} has no prepared data (no {MANIFEST_NAME}): {hint}")
    try:
        return read_manifest(folder)
    except ValueError as error:
        # A manifest of another version is not damaged. Beside shards, every other error means damage.
        other_version = re.search(r"schema version \d", str(error))
        kind = DamagedData if has_shards and not other_version else ValueError
        raise kind(one_line(error)) from None


def verify(
    folder: Path, manifest: dict[str, Any], advance: Callable[[int], object] = lambda count: None
) -> Iterator[str]:
    """One line for each damage of the data in `folder`; nothing when it is whole.

    Args:
        manifest: the manifest of the folder.
        advance: called with the number of bytes each time a file has been read.
    """
    faults = _fault(check_manifest_bytes, folder, manifest)
    if faults:  # a damaged manifest cannot be trusted about the other files
        yield faults[0]
        return
    damages = list(_strangers(folder, manifest))
    for entry in listed_files(manifest):
        damages += _fault(check_file, folder, entry, True)
        advance(entry["bytes"])
    # Faults that no checksum finds, because the files were written with them.
    if not damages:
        damages += _fault(PackedDataset, folder)
        damages += _fault(map_held_out, folder, manifest)
    yield from damages


def _strangers(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """A line for each file of the folder that the manifest does not name."""
    known = {entry["file"] for entry in listed_files(manifest)} | {MANIFEST_NAME, PICTURE_NAME}
    for file in sorted(folder.iterdir()):
        if file.name not in known:
            yield f"{file} does not belong to the data (the manifest does not name it): move it away"


def _fault(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """The message of a check that raises `ValueError` or `OSError`, as a list of one line.

    [] when all is well.
    """
    try:
        check(*arguments)
    except (ValueError, OSError) as error:
        return [one_line(error)]
    return []
