"""Is prepared data whole? Every byte against its checksum, then every row and count against the manifest."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pod.data.rows.held_out import HELD_OUT_TOKENS, map_held_out
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import (
    MANIFEST_NAME,
    REPAIR,
    check_file,
    check_manifest_bytes,
    listed_files,
    read_manifest,
)
from pod.data.rows.pictures import PICTURE_NAME


class DamagedData(ValueError):
    """A data folder that this program wrote and that is not whole any more; the message names the file in one line."""


def open_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder.

    Raises `DamagedData` when it is broken or gone, `ValueError` when `folder` is something else or of another version.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: give the folder that `pod data` wrote")
    has_shards = any(folder.glob("shard-*.npy"))
    if not (folder / MANIFEST_NAME).is_file() and not has_shards:
        inside = folder / "data"
        is_run = (inside / MANIFEST_NAME).is_file()
        hint = f"did you mean {inside}?" if is_run else "give the folder that `pod data` wrote"
        raise ValueError(f"{folder} holds no prepared data (no {MANIFEST_NAME}): {hint}")
    try:
        return read_manifest(folder)
    except ValueError as error:
        # A manifest of another version is whole; anything else that goes wrong beside shards is damage.
        other_version = re.search(r"schema version \d", str(error))
        kind = DamagedData if has_shards and not other_version else ValueError
        raise kind(" ".join(str(error).split())) from None


def verify(
    folder: Path, manifest: dict[str, Any], advance: Callable[[int], object] = lambda count: None
) -> Iterator[str]:
    """One line for each damage of the data in `folder`; nothing when it is whole. `advance(bytes)` is called while reading."""
    faults = _fault(check_manifest_bytes, folder, manifest)
    if faults:  # what it says of the other files cannot be trusted
        yield faults[0]
        return
    damages = list(_strangers(folder, manifest))
    for entry in listed_files(manifest):
        damages += _fault(check_file, folder, entry, True)
        advance(entry["bytes"])
    yield from damages or _disagreements(folder, manifest)


def _strangers(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    known = {entry["file"] for entry in listed_files(manifest)} | {MANIFEST_NAME, PICTURE_NAME}
    for file in sorted(folder.iterdir()):
        if file.name not in known:
            yield f"{file} does not belong to the data (the manifest does not name it): move it away"


def _disagreements(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """What no checksum finds, because a wrong program wrote it: rows that do not fit, counts that do not add up."""
    try:
        data = PackedDataset(folder)
        counted = _count_rows(data)
        held_out = _count_held_out(folder, manifest)
    except ValueError as error:
        yield " ".join(str(error).split())
        return
    claims = []
    for number, name in enumerate(("tokens", "documents")):
        claims.append((f"num_{name}", manifest[f"num_{name}"], counted[number]))
        if intervals := manifest.get("intervals"):
            told = sum(one[f"{name}_after"] for one in intervals)
            claims.append((f"intervals' {name}_after", told, counted[number]))
        if held_out:
            claims.append((f"held_out {name}", manifest["held_out"][name], held_out[number]))
    for name, told, found in claims:
        if told != found:
            yield f"{folder / MANIFEST_NAME} says {name} {told:,}, the files hold {found:,}: {REPAIR}"


def _count_rows(data: PackedDataset) -> tuple[int, int]:
    """Tokens and documents of all rows; `ValueError` for one that is not a row, or whose padding is not padding."""
    tokens = documents = 0
    for index in range(len(data)):
        lengths, row = data.row(index)
        used = int(lengths.sum())
        if (row[used:] != data.manifest["pad_token_id"]).any():
            raise ValueError(f"row {index} of {data.path} holds other ids than padding at its end: {REPAIR}")
        tokens, documents = tokens + used, documents + len(lengths)
    return tokens, documents


def _count_held_out(folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens and documents of the held-out text, None without any; `ValueError` for what is none."""
    if not (manifest.get("held_out") or {}).get("files"):
        return None
    documents = map_held_out(folder, manifest)
    if any(len(one) and int(one.max()) >= manifest["vocab_size"] for one in documents):
        raise ValueError(
            f"{folder / HELD_OUT_TOKENS} holds token ids above {manifest['vocab_size'] - 1:,}, the last of the vocabulary: {REPAIR}"
        )
    return sum(map(len, documents)), len(documents)


def _fault(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """The message of a check that raises `ValueError` or `OSError`, as a list of one line; [] when all is well."""
    try:
        check(*arguments)
    except (ValueError, OSError) as error:
        return [" ".join(str(error).split())]
    return []
