"""Read the data of a benchmark: its official files from a local folder, or the same files from the hub.

The folder is `eval.data_dir` of a recipe (`use` sets it) or, for lm-eval's own command line, the environment
variable POD_EVAL_DATA. It holds one folder per suite. With a folder nothing is ever downloaded. Without one
the files come from the hub (plain files only: no script of a data set is ever run).

For tasks of lm-eval itself, a copy of the hub's data set in `<data_dir>/<owner>/<name>` replaces the
download. The copy is what `hf download --repo-type dataset OWNER/NAME --local-dir …` writes:
`[<subset>/|data/]<split>*.parquet`. Files in the other formats with the same stems work, too.
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
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pod
from pod.errors import one_line
from pod.eval.suites.lm_eval_patch import patched
from pod.eval.suites.task_base import prompt_hash
from pod.tokenizer import template_arguments, with_template_variables

ENVIRONMENT = "POD_EVAL_DATA"
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv", ".tsv")
_HUGGING_FACE = ("json", "csv", "parquet", "text")  # builders of `datasets` that read files of dataset_kwargs
_LIST_KEYS = ("data", "rows", "examples")  # where a .json file that is one object keeps its rows
_AGAIN = ": copy it again"


@dataclass(frozen=True)
class _Used:
    """What `use` has set."""

    folder: Path | None = None
    tokenizer: Any = None
    unsafe_code: bool = False


_NOTHING = _Used()
_used: contextvars.ContextVar[_Used] = contextvars.ContextVar("used", default=_NOTHING)


@contextlib.contextmanager
def use(folder: str | os.PathLike | None, tokenizer: Any = None, unsafe_code: bool = False) -> Iterator[None]:
    """Inside the block, set where data comes from and how it is used.

    Args:
        folder: where data is read from; None = the folder POD_EVAL_DATA, else the hub.
        tokenizer: for tasks that build prompts to a length.
        unsafe_code: let a model's code run even without a sandbox.
    """
    token = _used.set(_Used(None if folder is None else Path(folder), tokenizer, unsafe_code))
    try:
        yield
    finally:
        _used.reset(token)


def unsafe_code() -> bool:
    """Whether the user allowed a model's code to run without a sandbox."""
    return _used.get().unsafe_code


def data_dir() -> Path | None:
    """The folder with local data; None when data comes from the hub.

    Raises:
        ValueError: when the folder does not exist.
    """
    folder, setting = _used.get().folder, "eval.data_dir"
    if folder is None and os.environ.get(ENVIRONMENT):
        folder, setting = Path(os.environ[ENVIRONMENT]), ENVIRONMENT
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"{setting} = {folder} is not a folder: give a folder that has one folder for each benchmark"
        )
    return folder


def load_tokenizer(metadata: dict[str, Any] | None = None) -> Any:
    """The tokenizer of the model under test, for tasks that build prompts to a length.

    In an evaluation it is the run's tokenizer. Under lm-eval's command line it is the tokenizer of the model
    arguments (`tokenizer`, else `pretrained`), which lm-eval passes to `custom_dataset` functions with the
    task's metadata.

    Raises:
        ValueError: when there is neither.
    """
    if _used.get().tokenizer is not None:
        return _used.get().tokenizer
    name = (metadata or {}).get("tokenizer") or (metadata or {}).get("pretrained")
    if not isinstance(name, str):
        raise ValueError(
            "this task builds prompts of a length: give the model's tokenizer as pretrained=… or tokenizer=…"
        )
    given = metadata or {}
    variables = template_arguments(given.get("enable_thinking"), given.get("chat_template_args"))
    # no warning of unused variables here: the model class has given it
    return with_template_variables(
        pod.load_tokenizer(name), variables, "chat_template_args", lambda line: None
    )


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
        hub_id: data set on the hub, for runs without a local folder; None if the hub does not have the file.
        hub_file: path in the hub's repository, `file` by default. `data.zip/data/qasper.jsonl` is a member of
            an archive. The local folder, too, may hold the archive or its unpacked members instead of `file`.
        fields: keys that every row must have.
        filled: whether their values must also not be empty.
        name: what the error message calls a row, for example `story`.

    Raises:
        ValueError: in one line. For a missing file it says where the file was looked for and how to provide
            it; for a damaged one, what is wrong in it.
    """
    path, member = _find(suite, file, hub_id, hub_file or file)
    rows = (
        _parse(f"{path}: {member}", _member(path, member)) if member else _parse(str(path), path.read_bytes())
    )
    for number, row in enumerate(rows, start=1):
        if missing := [field for field in fields if field not in row or (filled and not row[field])]:
            lacks = ", ".join(missing)
            expected = ", ".join(fields)
            raise ValueError(f"{suite}/{file}, {name} {number}: no {lacks}; expected {expected}")
    return rows


def _find(suite: str, file: str, hub_id: str | None, hub_file: str) -> tuple[Path, str]:
    """The path of a data file and an empty text; or the path of an archive and the name of its member."""
    archive, _, member = hub_file.partition(".zip/")
    archive += ".zip" if member else ""

    def missing(why: str) -> ValueError:
        ways = f"put it there under a folder set by eval.data_dir (or {ENVIRONMENT}) as {suite}/{file}"
        if hub_id is not None:
            what = f"{member} in {archive}" if member else archive
            ways += (
                f", or leave both unset and connect to the hub, where it is {what} of the data set {hub_id}"
            )
        return ValueError(f"data of {suite}: {file} is missing ({why}): {ways}")

    folder = data_dir()
    if folder is not None:
        place = folder / suite
        unpacked = [(place / member, ""), (place / archive, member)] if member else []
        for path, inside in ((place / file, ""), (place / f"{file}.gz", ""), *unpacked):
            if path.is_file():
                return path, inside
        raise missing(f"{place / file} is not there")
    if hub_id is None:
        raise missing("it is on no hub")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id=hub_id, filename=archive, repo_type="dataset")), member
    except Exception as error:
        reason = one_line(error).partition(". ")[0][:160]
        raise missing(f"the hub gave {type(error).__name__}: {reason}") from error


def text_id(text: str) -> str | None:
    """SHA-256 of a text, 16 hex digits; None for no text.

    It is the `cluster` of all rows that ask about the text: intervals count them as one.
    """
    return prompt_hash(text) if text else None


def dataset(rows: list[dict[str, Any]], split: str = "test") -> dict[str, Any]:
    """Rows in the form that lm-eval's `custom_dataset` functions return. Keys that a row lacks are None.

    Raises:
        ValueError: when there is no row.
    """
    from datasets import Dataset

    if not rows:
        raise ValueError("the data has no row for this task")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {split: Dataset.from_list([{key: row.get(key) for key in keys} for row in rows])}


@contextlib.contextmanager
def _readable(what: str, then: str = "") -> Iterator[None]:
    """Turn errors while a damaged file is read into a ValueError of one line.

    Args:
        what: what is wrong.
        then: what the user can do, at the end of the line.
    """
    try:
        yield
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{what} ({error}){then}") from None


def _member(archive: Path, member: str) -> bytes:
    """The content of a member of a zip archive."""
    with _readable(f"{archive} is not a complete zip archive", _AGAIN), zipfile.ZipFile(archive) as opened:
        if member in opened.namelist():
            return opened.read(member)
    raise ValueError(f"{archive} does not have {member}")


def _parse(name: str, content: bytes) -> list[dict[str, Any]]:
    """The rows of a file. The ending of its name says the format."""
    if name.endswith(".gz"):
        name = name.removesuffix(".gz")
        with _readable(f"{name} is not a complete gzip file", _AGAIN):
            content = gzip.decompress(content)
    if name.endswith(".parquet"):
        from pyarrow import parquet

        with _readable(f"{name} is not a complete parquet file", _AGAIN):
            return parquet.read_table(io.BytesIO(content)).to_pylist()
    with _readable(f"{name} is not UTF-8 text"):
        text = content.decode("utf-8-sig")
    if name.endswith(".jsonl"):
        rows = list(_json_lines(name, text))
    elif name.endswith(".json"):
        rows = _json_rows(name, text)
    elif name.endswith((".csv", ".tsv")):
        rows = list(csv.DictReader(io.StringIO(text), delimiter="," if name.endswith(".csv") else "\t"))
    else:
        raise ValueError(f"{name}: the ending must be one of {', '.join(FORMATS)}")
    if not rows:
        raise ValueError(f"{name} has no rows")
    return rows


def _json_lines(name: str, text: str) -> Iterable[dict[str, Any]]:
    # not splitlines(): texts hold U+2028 and other separators that are no line ends in JSON
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        with _readable(f"{name}, line {number}: no JSON"):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"{name}, line {number}: a JSON object is expected, found {type(row).__name__}")
        yield row


def _json_rows(name: str, text: str) -> list[dict[str, Any]]:
    with _readable(f"{name} is no JSON"):
        content = json.loads(text)
    if isinstance(content, dict):
        content = next((content[key] for key in _LIST_KEYS if isinstance(content.get(key), list)), content)
    if not isinstance(content, list) or any(not isinstance(row, dict) for row in content):
        keys = " or ".join(repr(key) for key in _LIST_KEYS)
        raise ValueError(f"{name}: a list of objects is expected, alone or under {keys}")
    return content


# -- tasks of lm-eval itself ---------------------------------------------------------------------------------


@contextlib.contextmanager
def local_datasets() -> Iterator[None]:
    """Inside the block tasks of lm-eval read their data from the local folder, if there is one (`use`)."""
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(self: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        path = self.DATASET_PATH
        if callable(self.config.custom_dataset) or path in _HUGGING_FACE:
            original(self, dataset_kwargs, **more)
        elif data_dir() is not None:
            self.dataset = read_dataset(self.config.task, path, self.DATASET_NAME)
        else:
            try:
                original(self, dataset_kwargs, **more)
            except Exception as error:
                subset = f" ({self.DATASET_NAME})" if self.DATASET_NAME else ""
                raise ValueError(
                    f"data of {self.config.task}: the data set {path}{subset} cannot be loaded from the hub "
                    f"({type(error).__name__}: {' '.join(str(error).split())[:160]}): connect, or set "
                    f"eval.data_dir (or {ENVIRONMENT}) to a folder with a copy in {path}"
                ) from error

    with patched(ConfigurableTask, "download", download):
        yield


class Splits(dict):
    """Data sets by split. Reading a split that is not there raises a ValueError of one line."""

    def __init__(self, task: str, where: Path, found: dict[str, Any]):
        super().__init__(found)
        self.task, self.where = task, where

    def __missing__(self, split: str) -> Any:
        raise ValueError(
            f"data of {self.task}: no file of the split {split!r} in {self.where} "
            f"(found: {', '.join(sorted(self)) or 'none'}): put "
            f"{split}.parquet or {split}.jsonl there, as the hub has it"
        )


def read_dataset(task: str, path: str, subset: str | None) -> Splits:
    """The splits of a local copy of a hub data set, each a `datasets.Dataset`.

    Args:
        task: name of the task, for messages.
        path: the data set, `owner/name`.
        subset: of the data set; None = it has none.
    Raises:
        ValueError: when there is no copy; the message names the folder where it should be.
    """
    folder = data_dir()
    assert folder is not None
    root = folder / path
    places = [(root / "data", None), (root, None)]
    if subset:  # MMLU has all subjects in one folder, with the subject in every row
        places = [(root / subset, None), (root / "all", subset)]
    for place, subject in places:
        if found := _data_sets(place, subject):
            return Splits(task, place, found)
    looked = " or ".join(str(place) for place, subject in places if subject is None)
    raise ValueError(
        f"data of {task}: no file in {looked}: put a copy of the hub's data set {path} there "
        f"([subset/]<split>*.parquet, or .jsonl), or "
        f"unset eval.data_dir (and {ENVIRONMENT}) and connect to the hub"
    )


def _data_sets(place: Path, subject: str | None) -> dict[str, Any]:
    """Data sets by split, which is the first part of a file's name. Empty if there is no such folder.

    Args:
        subject: read only the rows of this subject; None = all.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(place.glob("*")):
        if file.name.endswith(FORMATS):
            found = _parse(str(file), file.read_bytes())
            found = [row for row in found if subject is None or row.get("subject") == subject]
            rows.setdefault(re.split(r"[-.]", file.name)[0], []).extend(found)
    return {split: dataset(found, split)[split] for split, found in rows.items() if found}
