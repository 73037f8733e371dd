"""The folder of packed rows: its format, its manifest, and the checks of its files.

A data folder holds `manifest.json` and, per shard, three plain `.npy` arrays (little-endian):

* `shard-00000.tokens.npy` uint16 (vocabularies up to 65,536) or uint32 [rows, context]: a row's documents one
  after another from position 0, then padding
* `shard-00000.lengths.npy` int32 [documents]: tokens of each document, row after row
* `shard-00000.starts.npy` int64 [rows + 1]: row r holds the documents `starts[r]` to `starts[r + 1] - 1`

Everything that attention and RoPE need follows from the lengths: the document of each token, and its position
in it. The manifest names every file with its size and SHA-256, has an `id` made of these, and ends with a
checksum of its own content.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pod.files import read_json, sha256_file

FORMAT = "pod-packed-rows"
SCHEMA_VERSION = 3
MANIFEST_NAME = "manifest.json"
MANIFEST_CHECKSUM = "manifest_sha256"
SHARD_ARRAYS = ("tokens", "lengths", "starts")
REPAIR = "prepare the data again with `pod data`"
"""What messages about damaged data advise."""
_NUMBERS = ("context_length", "num_rows", "num_documents", "num_tokens", "vocab_size", "pad_token_id")
_REQUIRED = {**dict.fromkeys(_NUMBERS, int), "tokenizer_sha256": str, "id": str, "shards": list}
"""Keys that every manifest must have, with the types of their values."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of the token ids on disk: two bytes when the vocabulary fits into them, else four."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The checked manifest of data folder `path`.

    Raises:
        ValueError: it is missing, incomplete, not written by this program, or of another schema version.
    """
    path = Path(path)
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise ValueError(f"{path} has no {MANIFEST_NAME}: run `pod data` first or set another output_dir")
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} is not a manifest of packed rows (no format {FORMAT!r}): {REPAIR}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {manifest.get('schema_version')}, but this program reads "
            f"{SCHEMA_VERSION}: {REPAIR}"
        )
    for name, kind in _REQUIRED.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"{file} lacks {name!r} ({kind.__name__}): {REPAIR}")
    if not manifest["shards"] or not all(map(_is_complete, manifest["shards"])):
        raise ValueError(f"{file} has an incomplete shard entry: {REPAIR}")
    return manifest


def pieces(manifest: dict[str, Any]) -> str:
    """The word for what the rows hold: "documents", or "pieces" where long documents were cut."""
    return "pieces" if (manifest.get("policies") or {}).get("cut_pieces") else "documents"


def data_id(manifest: dict[str, Any]) -> str:
    """16 hex digits made of the names and checksums of all files.

    Equal rows and held-out text have the same digits, in whichever folder they lie.
    """
    files = sorted((entry["file"], entry["sha256"]) for entry in listed_files(manifest))
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content without its own checksum."""
    content = {name: value for name, value in manifest.items() if name != MANIFEST_CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_manifest_bytes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise `ValueError` when the manifest is not, byte for byte, what was written."""
    file = folder / MANIFEST_NAME
    as_written = json.dumps(manifest, indent=2) + "\n"
    if (
        manifest.get(MANIFEST_CHECKSUM) != manifest_checksum(manifest)
        or file.read_bytes() != as_written.encode()
    ):
        raise ValueError(f"{file} does not match its checksum (changed or damaged): {REPAIR}")


def listed_files(content: Any) -> Iterator[dict[str, Any]]:
    """Every `{"file", "bytes", "sha256"}` inside a manifest, in its order: shards, held-out text and others.

    Args:
        content: a manifest, or a part of one.
    """
    if isinstance(content, dict) and content.keys() >= {"file", "bytes", "sha256"}:
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from listed_files(value)


def check_file(folder: Path, entry: dict[str, Any], verify: bool) -> Path:
    """Check that the file of a manifest entry has the recorded size. Returns its path.

    Args:
        verify: also compare the checksum, which reads the whole file.

    Raises:
        ValueError: the file is missing, lies outside the folder, or is not as recorded.
    """
    file = folder / entry["file"]
    if file.parent != folder:
        raise ValueError(f"{folder / MANIFEST_NAME}: file {entry['file']!r} is outside the folder")
    if not file.is_file():
        raise ValueError(f"{file} is missing: {REPAIR}")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{file} has {size} bytes, but the manifest says {entry['bytes']}: {REPAIR}")
    if verify and sha256_file(file) != entry["sha256"]:
        raise ValueError(f"{file} does not match its checksum (changed or damaged): {REPAIR}")
    return file


def open_array(folder: Path, manifest: dict[str, Any], shard: dict[str, Any], name: str) -> np.ndarray:
    """Array `name` of a shard, memory-mapped and read-only.

    Raises:
        ValueError: it cannot be read, or its shape or type is not what the manifest says.
    """
    file = folder / shard[name]["file"]
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a readable .npy array ({error}): {REPAIR}") from error
    shape, dtype = {
        "tokens": ((shard["rows"], manifest["context_length"]), token_dtype(manifest["vocab_size"])),
        "lengths": ((shard["documents"],), np.dtype("<i4")),
        "starts": ((shard["rows"] + 1,), np.dtype("<i8")),
    }[name]
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{file} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}: {REPAIR}"
        )
    return array


def _is_complete(shard: Any) -> bool:
    """Whether a shard's manifest entry has its counts, and one file for each of the three arrays."""
    if not isinstance(shard, dict) or not {"rows", "documents", *SHARD_ARRAYS} <= shard.keys():
        return False
    return all(len(list(listed_files(shard[name]))) == 1 for name in SHARD_ARRAYS)
