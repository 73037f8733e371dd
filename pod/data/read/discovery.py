"""Which files a source names, in a fixed order.

A source is a file, a folder, a glob, a URL, a MosaicML folder, the standard library or a file of a package.
The functions here take a source without its fragment: `texts/a.json` of `texts/a.json#essays`.
"""

import glob
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from pod.data.read.mds import MdsShard, mds_shards, read_index
from pod.data.read.readers import is_known, kind_of
from pod.remote import is_remote, remote_files

_NOTES = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|dataset_?card)[\w-]*(\.(md|txt|rst|cff))?"
)
"""Names of files that describe a data set. Beside records they are not read."""
CACHES = frozenset({"__pycache__"})
"""Names of folders that are not read."""
STDLIB_OUTSIDE = CACHES | {"site-packages", "dist-packages"}
"""Names of folders inside the standard library's folder that are not read."""
MDS_INDEX = "index.json"


class FoundFile(NamedTuple):
    """A file of a source. For a file of a MosaicML data set, `shard` says how it is read; else it is None."""

    path: str
    shard: MdsShard | None = None


@dataclass
class Files:
    """The files of a source in reading order."""

    found: list[FoundFile] = field(default_factory=list)
    """The files to read."""
    tolerate: bool = False
    """Skip unreadable files even with `unreadable="error"`: the standard library has some on purpose."""
    left_out: list[str] = field(default_factory=list)
    """Files beside MosaicML shards, and notes beside records. They are not read; each has the reason."""
    unreadable: list[str] = field(default_factory=list)
    """Folders that cannot be listed, and files of an unknown type, each with the reason."""


def files_of(source: str, include: tuple[str, ...] = ()) -> Files:
    """The files of a source. Sources on the Hugging Face hub are not files (see `hub_spec`).

    Args:
        source: the source without its fragment.
        include: patterns of the names of files to read; empty = all files of a known type.

    Raises:
        ValueError: in one line: the source does not exist, or has no file that can be read.
    """
    if source.startswith("stdlib:"):
        folder = Path(sysconfig.get_paths()["stdlib"], source.removeprefix("stdlib:"))
        return replace(_folder_files(folder, ("*.py",), STDLIB_OUTSIDE), tolerate=True)
    if is_remote(source):
        return _found(remote_files(source), include)
    path = _local_path(source)
    if path.is_file():
        if not include and not is_known(path):
            raise ValueError(
                f"{_unknown(path)}; convert it to one of these, or name it in data.include to read it as "
                "one text"
            )
        return Files(_file_or_shards(str(path)))
    if path.is_dir():
        return _folder_files(path, include)
    if glob.has_magic(source):
        names = sorted(_matching(path))
        if names:
            return _found(names, include)
        raise _matches_nothing(source)
    raise _absent(source)


def check_sources(sources: Iterable[str]) -> None:
    """Refuse local sources that do not exist, and patterns that no file matches.

    This is quick: hub names and URLs are not looked up, folders are not listed, and a pattern is searched
    only until its first file.

    Args:
        sources: sources without fragments, as `files_of` takes them.

    Raises:
        ValueError: one of them does not exist or matches no file; the message is one line.
    """
    for source in sources:
        if source.startswith("stdlib:") or is_remote(source) or hub_spec(source) is not None:
            continue
        path = _local_path(source)
        if path.exists():
            continue
        if not glob.has_magic(source):
            raise _absent(source)
        if next(_matching(path), None) is None:
            raise _matches_nothing(source)


def _local_path(source: str) -> Path:
    return _package_path(source) if source.startswith("package:") else Path(source).expanduser()


def _matching(pattern: Path) -> Iterator[str]:
    """The files that a pattern names."""
    return (name for name in glob.iglob(str(pattern), recursive=True) if os.path.isfile(name))


def _matches_nothing(source: str) -> ValueError:
    return ValueError(f"no file matches {source!r}: correct data.sources")


def _absent(source: str) -> ValueError:
    return ValueError(
        f"source {source!r} does not exist here: give a file, folder or pattern on this machine, a URL "
        "(s3://, https://), hub:<id> for a data set of the Hugging Face hub, stdlib: or "
        "package:<name>/<file>"
    )


def hub_spec(source: str) -> tuple[str, str | None, str] | None:
    """(id, config, split) of a source `hub:<id>[:<config>][@<split>]`; None for any other source."""
    if not source.startswith("hub:"):
        return None
    rest, _, split = source.removeprefix("hub:").partition("@")
    name, _, config = rest.partition(":")
    return name, config or None, split or "train"


def _folder_files(folder: Path, include: tuple[str, ...], outside: frozenset[str] = CACHES) -> Files:
    """The files of a folder and of all folders below it, MosaicML shards among them.

    Args:
        outside: names of folders that are not read.

    Raises:
        ValueError: there is no file that can be read.
    """
    files = Files()
    folders = list(_walk(folder, files.unreadable, outside))
    indexed = {
        parent: _shards(Path(parent), index)
        for parent, names in folders
        if MDS_INDEX in names and (index := read_index(Path(parent, MDS_INDEX))) is not None
    }
    of_shards = {os.path.join(parent, MDS_INDEX) for parent in indexed}
    of_shards.update(
        name for shards in indexed.values() for one in shards if one.shard for name in one.shard.names
    )
    seen = set()
    for parent, names in folders:
        for shard in indexed.get(parent, []):
            # The index of a merged data set names the shards of the folders below it, which have an index of
            # their own too.
            if shard.path not in seen and _matches(shard.path, include):
                files.found.append(shard)
            seen.add(shard.path)
        others = [os.path.join(parent, name) for name in names]
        own = _found([path for path in others if path not in of_shards], include, bool(indexed))
        files.found += own.found
        files.left_out += own.left_out
        files.unreadable += own.unreadable
    if not files.found:
        wanted = f" matching {', '.join(include)}" if include else ""
        why = f" that can be read ({files.unreadable[0]})" if files.unreadable else ""
        raise ValueError(f"folder {folder} has no file{wanted}{why}: correct data.sources or data.include")
    return files


def _found(paths: list[str], include: tuple[str, ...], beside_shards: bool = False) -> Files:
    """Which files of a folder or a glob are read.

    They are the files that `include` names. Without it, they are the files of a known type, but no README,
    licence or the like beside records, and nothing beside MosaicML shards.

    Args:
        beside_shards: whether the files lie beside MosaicML shards.
    """
    if include:
        return Files([one for path in paths if _matches(path, include) for one in _file_or_shards(path)])
    files = Files()
    folders = {os.path.dirname(path) for path in paths if is_known(path) and kind_of(path) != "text"}
    for path in paths:
        folder, name = os.path.split(path)
        if beside_shards or (folder in folders and _NOTES.fullmatch(name.lower())):
            what = "MDS shards" if beside_shards else "records"
            files.left_out.append(
                f"{path} is next to {what} and is not read; to read it, name it in data.include"
            )
        elif is_known(path):
            files.found += _file_or_shards(path)
        else:
            files.unreadable.append(_unknown(path))
    return files


def _file_or_shards(path: str) -> list[FoundFile]:
    """The file, or the shards that it names when it is the index of a MosaicML data set."""
    index = read_index(Path(path)) if os.path.basename(path) == MDS_INDEX else None
    return [FoundFile(path)] if index is None else _shards(Path(path).parent, index)


def _unknown(path: str | Path) -> str:
    known = "jsonl, json, csv, parquet, arrow, and text by its suffix"
    return f"{path} has an unknown file type (known are {known})"


def _matches(path: str, include: tuple[str, ...]) -> bool:
    return not include or any(fnmatch(os.path.basename(path), one) for one in include)


def _shards(folder: Path, index: dict) -> list[FoundFile]:
    return [FoundFile(shard.path, shard) for shard in mds_shards(folder, index)]


def _walk(
    folder: str | Path, unreadable: list[str], outside: frozenset[str], above: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[str]]]:
    """(folder, its file names) of a folder and all folders below it, in a fixed order, without hidden ones.

    Links to folders are followed, except to a folder that contains them.

    Args:
        unreadable: gets a message for each folder that cannot be listed.
        outside: names of folders that are left out.
        above: real paths of the folders that contain this one.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        with os.scandir(folder) as entries:
            found = sorted((one.name, one.is_dir()) for one in entries if not one.name.startswith("."))
    except OSError as error:
        unreadable.append(f"folder {folder} cannot be listed ({error.strerror})")
        return
    yield str(folder), [name for name, is_folder in found if not is_folder]
    for name, is_folder in found:
        if is_folder and name not in outside:
            yield from _walk(os.path.join(folder, name), unreadable, outside, above | {real})


def _package_path(source: str) -> Path:
    """The file of `package:<import name>/<relative file>`, found without importing the package."""
    name, _, relative = source.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(
            f"source {source!r}: package {name!r} is not installed; install it with pip, or remove this "
            "source"
        )
    paths = [Path(folder, relative) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])
