"""Where the data of a benchmark comes from: the official files in a local folder, or the same files from the hub.

The folder is `eval.data_dir` of a recipe (`use` sets it) or, for lm-eval's own command line, the environment variable POD_EVAL_DATA. It
holds one folder per suite. With a folder nothing is ever downloaded; without one the files come from the hub (plain files only: no
script of a data set is ever run).

Tasks of lm-eval itself: a copy of the hub's data set in `<data_dir>/<owner>/<name>` replaces the download. It is what `hf download
--repo-type dataset OWNER/NAME --local-dir …` writes, `[<subset>/|data/]<split>*.parquet`; files in the other formats with the same stems
work, too.
"""

import contextlib
import contextvars
import csv
import gzip
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from pod.eval.suites.base import prompt_hash

ENVIRONMENT = "POD_EVAL_DATA"
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".tsv")
_HUGGING_FACE = {
    "json",
    "csv",
    "parquet",
    "text",
}  # builders of `datasets` that read files named in dataset_kwargs
_LIST_KEYS = ("data", "rows", "examples")  # where a .json file that is one object keeps its rows

_folder: contextvars.ContextVar[Path | None] = contextvars.ContextVar("data_dir", default=None)
_tokenizer: contextvars.ContextVar[Any] = contextvars.ContextVar("tokenizer", default=None)
_unsafe_code: contextvars.ContextVar[bool] = contextvars.ContextVar("unsafe_code", default=False)


@contextlib.contextmanager
def use(folder: str | os.PathLike | None, tokenizer: Any = None, unsafe_code: bool = False) -> Iterator[None]:
    """Inside the block: read data from `folder` (None: POD_EVAL_DATA, else the hub), build prompts of a length with `tokenizer`, and run
    what a model wrote even without a sandbox if `unsafe_code`."""
    given = {
        _folder: None if folder is None else Path(folder),
        _tokenizer: tokenizer,
        _unsafe_code: unsafe_code,
    }
    tokens = {variable: variable.set(value) for variable, value in given.items()}
    try:
        yield
    finally:
        for variable, token in tokens.items():
            variable.reset(token)


def unsafe_code() -> bool:
    """Whether the user allowed to run what a model wrote without a sandbox."""
    return _unsafe_code.get()


def data_dir() -> Path | None:
    """The folder with local data; None when data comes from the hub. Raises: ValueError when it does not exist."""
    folder, setting = _folder.get(), "eval.data_dir"
    if folder is None and os.environ.get(ENVIRONMENT):
        folder, setting = Path(os.environ[ENVIRONMENT]), ENVIRONMENT
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{setting} = {folder} is no folder: give one that holds a folder per benchmark")
    return folder


def load_tokenizer(metadata: dict[str, Any] | None = None) -> Any:
    """The tokenizer of the model under test, for tasks whose prompts have a length.

    In an evaluation it is the run's; under lm-eval's command line it is that of the model arguments (`tokenizer`, else `pretrained`),
    which lm-eval passes to `custom_dataset` functions with the task's metadata. Raises: ValueError when there is neither.
    """
    if _tokenizer.get() is not None:
        return _tokenizer.get()
    name = (metadata or {}).get("tokenizer") or (metadata or {}).get("pretrained")
    if not isinstance(name, str):
        raise ValueError(
            "this task builds prompts of a length: give the model's tokenizer as pretrained=… or tokenizer=…"
        )
    from transformers import AutoTokenizer

    from pod.models import resolve_model

    return AutoTokenizer.from_pretrained(resolve_model(name))


def load_rows(
    suite: str,
    file: str,
    hub_id: str | None = None,
    hub_file: str | None = None,
    fields: Sequence[str] = (),
    *,
    filled: bool = False,
    name: str = "row",
) -> list[dict[str, Any]]:
    """The rows of one data file, as dicts, in the file's order.

    Args:
        suite: folder in `data_dir`, the benchmark's short name.
        file: path in that folder, as the official release calls it; its ending says the format (see FORMATS).
        hub_id: data set on the hub, for runs without a local folder; None when the file is on no hub.
        hub_file: path in the hub's repository, `file` by default. `data.zip!data/qasper.jsonl` is a member of an archive; locally,
            too, the archive, or what was unpacked of it, may lie in the suite's folder instead of the file.
        fields: what every row must have, and if `filled` not empty; name: what a row is called where one lacks them.
    Raises: ValueError, in one line, that names the file, where it was looked for and how to provide it, or says what is wrong in it.
    """
    rows = _rows(suite, file, hub_id, hub_file)
    for number, row in enumerate(rows, start=1):
        if missing := [field for field in fields if field not in row or (filled and not row[field])]:
            lacks, expected = ", ".join(missing), ", ".join(fields)
            raise ValueError(f"{suite}/{file}, {name} {number}: no {lacks}; expected {expected}")
    return rows


def _rows(suite: str, file: str, hub_id: str | None, hub_file: str | None) -> list[dict[str, Any]]:
    folder, hub_file = data_dir(), hub_file or file
    if folder is None:
        return _parse(_split_archive(hub_file)[1] or hub_file, _from_hub(suite, file, hub_id, hub_file))
    place = folder / suite / file
    archive, member = _split_archive(hub_file)
    for path in (place, *((folder / suite / member,) if member else ())):
        if path.is_file():
            return _parse(str(path), path.read_bytes())
    if member and (folder / suite / archive).is_file():
        return _parse(f"{folder / suite / archive}: {member}", _member(folder / suite / archive, member))
    raise _missing(suite, file, f"{place} is not there", hub_id, hub_file)


def text_id(text: str) -> str | None:
    """SHA-256 of a text, 16 hex digits: the `cluster` of the rows that ask about it, which intervals draw together. None for no text."""
    return prompt_hash(text) if text else None


def dataset(rows: list[dict[str, Any]], split: str = "test") -> dict[str, Any]:
    """Rows as what lm-eval's `custom_dataset` functions return. Keys that a row lacks are None.

    Raises: ValueError when there is no row.
    """
    from datasets import Dataset

    if not rows:
        raise ValueError("the data hold no row for this task")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {split: Dataset.from_list([{key: row.get(key) for key in keys} for row in rows])}


def _from_hub(suite: str, file: str, hub_id: str | None, hub_file: str) -> bytes:
    if hub_id is None:
        raise _missing(suite, file, "it is on no hub", None, hub_file)
    from huggingface_hub import hf_hub_download

    archive, member = _split_archive(hub_file)
    try:
        path = Path(hf_hub_download(repo_id=hub_id, filename=archive, repo_type="dataset"))
    except Exception as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:160]
        raise _missing(
            suite, file, f"the hub gave {type(error).__name__}: {reason}", hub_id, hub_file
        ) from error
    return _member(path, member) if member else path.read_bytes()


def _missing(suite: str, file: str, why: str, hub_id: str | None, hub_file: str) -> ValueError:
    ways = f"put it there under a folder set by eval.data_dir (or {ENVIRONMENT}) as {suite}/{file}"
    if hub_id is not None:
        archive, member = _split_archive(hub_file)
        what = f"{member} in {archive}" if member else archive
        ways += f", or leave both unset and connect to the hub, where it is {what} of the data set {hub_id}"
    return ValueError(f"data of {suite}: {file} is missing ({why}): {ways}")


def _split_archive(path: str) -> tuple[str, str | None]:
    """`data.zip!data/a.jsonl`, also with a slash, → (`data.zip`, `data/a.jsonl`); (path, None) for a plain file."""
    found = re.fullmatch(r"(.+?\.zip)[!/](.+)", path)
    return (found[1], found[2]) if found else (path, None)


def _member(archive: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(member)
    except KeyError:
        raise ValueError(f"{archive} holds no {member}") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is no whole zip archive ({error}): copy it again") from None


def _parse(name: str, content: bytes) -> list[dict[str, Any]]:
    if name.endswith(".gz"):
        try:
            name, content = name.removesuffix(".gz"), gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"{name} is no whole gzip file ({error}): copy it again") from None
    if name.endswith(".parquet"):
        return _parquet_rows(name, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error})") from None
    if name.endswith(".jsonl"):
        rows = list(_json_lines(name, text))
    elif name.endswith(".json"):
        rows = _json_rows(name, text)
    elif name.endswith((".csv", ".tsv")):
        rows = [
            dict(row)
            for row in csv.DictReader(io.StringIO(text), delimiter="," if name.endswith(".csv") else "\t")
        ]
    else:
        raise ValueError(f"{name}: the ending must be one of {', '.join(FORMATS)}")
    if not rows:
        raise ValueError(f"{name} holds no row")
    return rows


def _json_lines(name: str, text: str) -> Iterable[dict[str, Any]]:
    # not splitlines(): texts hold U+2028 and other separators that are no line ends in JSON
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: a JSON object is expected, found {type(row).__name__}")
        yield row


def _json_rows(name: str, text: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
    if isinstance(content, dict):
        content = next((content[key] for key in _LIST_KEYS if isinstance(content.get(key), list)), content)
    if not isinstance(content, list) or any(not isinstance(row, dict) for row in content):
        keys = " or ".join(repr(key) for key in _LIST_KEYS)
        raise ValueError(f"{name}: a list of objects is expected, alone or under {keys}")
    return content


def _parquet_rows(name: str, content: bytes) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{name} is no whole parquet file ({error}): copy it again") from None


# -- tasks of lm-eval itself ---------------------------------------------------------------------------------


@contextlib.contextmanager
def local_datasets() -> Iterator[None]:
    """Inside the block tasks of lm-eval read their data from the local folder, when there is one (see `data.use`)."""
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(self: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        path = self.DATASET_PATH
        if callable(self.config.custom_dataset) or path in _HUGGING_FACE:
            original(self, dataset_kwargs, **more)
        elif data_dir() is not None:
            self.dataset = read_dataset(self.config.task, path, self.DATASET_NAME)
        else:
            _download(original, self, dataset_kwargs, more)

    with mock.patch.object(ConfigurableTask, "download", download):
        yield


def _download(
    original: Callable[..., None], task: Any, options: dict[str, Any] | None, more: dict[str, Any]
) -> None:
    try:
        original(task, options, **more)
    except Exception as error:
        subset = f" ({task.DATASET_NAME})" if task.DATASET_NAME else ""
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"data of {task.config.task}: the data set {task.DATASET_PATH}{subset} cannot be loaded from the hub ({type(error).__name__}: "
            f"{reason}): connect, or set eval.data_dir (or {ENVIRONMENT}) to a folder with a copy in {task.DATASET_PATH}"
        ) from error


class Splits(dict):
    """Data sets by split; a split that is not there is one line."""

    def __init__(self, task: str, where: Path, found: dict[str, Any]):
        super().__init__(found)
        self.task, self.where = task, where

    def __missing__(self, split: str) -> Any:
        raise ValueError(
            f"data of {self.task}: no file of the split {split!r} in {self.where} (found: {', '.join(sorted(self)) or 'none'}): put "
            f"{split}.parquet or {split}.jsonl there, as the hub has it"
        )


def read_dataset(task: str, path: str, subset: str | None) -> Splits:
    """The splits of a local copy of a hub data set, each a `datasets.Dataset`.

    Raises: ValueError that names the folder where a copy was looked for.
    """
    folder = data_dir()
    assert folder is not None
    root = folder / path
    places = [root / subset] if subset else [root / "data", root]
    for place in places:
        if found := _data_sets(place):
            return Splits(task, place, found)
    if subset and (
        found := _data_sets(root / "all", subset)
    ):  # MMLU's: all subjects, with the subject in every row
        return Splits(task, root / "all", found)
    looked = " or ".join(str(place) for place in places)
    raise ValueError(
        f"data of {task}: no file in {looked}: put a copy of the hub's data set {path} there ([subset/]<split>*.parquet, or .jsonl), or "
        f"unset eval.data_dir (and {ENVIRONMENT}) and connect to the hub"
    )


def _data_sets(place: Path, subject: str | None = None) -> dict[str, Any]:
    """Data sets by split, the first part of a file's name; subject: only the rows of one. Empty where there is no such folder."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(place.glob("*")):
        if file.name.endswith(FORMATS):
            found = _parse(str(file), file.read_bytes())
            found = [row for row in found if subject is None or row.get("subject") == subject]
            rows.setdefault(re.split(r"[-.]", file.name)[0], []).extend(found)
    return {split: dataset(found, split)[split] for split, found in rows.items() if found}
