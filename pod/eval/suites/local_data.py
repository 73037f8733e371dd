"""Tasks of lm-eval itself with local data: a copy of the hub's data set in `<data_dir>/<owner>/<name>` replaces the download.

The copy is what `hf download --repo-type dataset OWNER/NAME --local-dir …` writes: `[<subset>/|data/]<split>*.parquet`. Files in the other
formats of `pod.eval.suites.data` with the same stems work, too.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pod.eval.suites import data

_FILES = {"json", "csv", "parquet", "text"}  # builders of `datasets` that read files named in dataset_kwargs


@contextlib.contextmanager
def local_datasets() -> Iterator[None]:
    """Inside the block tasks of lm-eval read their data from the local folder, when there is one (see `data.use`)."""
    from lm_eval.api.task import ConfigurableTask

    original = ConfigurableTask.download

    def download(self: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        path = self.DATASET_PATH
        if callable(self.config.custom_dataset) or path in _FILES:
            original(self, dataset_kwargs, **more)
        elif data.data_dir() is not None:
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
            f"{reason}): connect, or set eval.data_dir (or {data.ENVIRONMENT}) to a folder with a copy in {task.DATASET_PATH}"
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
    folder = data.data_dir()
    assert folder is not None
    root = folder / path
    places = [root / subset] if subset else [root / "data", root]
    for place in places:
        if files := _files(place):
            return Splits(task, place, _splits(folder, files))
    if subset and (
        files := _files(root / "all")
    ):  # MMLU's subset of all subjects, with the subject in every row
        found = _splits(folder, files, subset)
        if found:
            return Splits(task, root / "all", found)
    looked = " or ".join(str(place) for place in places)
    raise ValueError(
        f"data of {task}: no file in {looked}: put a copy of the hub's data set {path} there ([subset/]<split>*.parquet, or .jsonl), or "
        f"unset eval.data_dir (and {data.ENVIRONMENT}) and connect to the hub"
    )


def _files(place: Path) -> list[Path]:
    return (
        sorted(file for file in place.glob("*") if file.name.endswith(data.FORMATS)) if place.is_dir() else []
    )


def _splits(folder: Path, files: list[Path], subject: str | None = None) -> dict[str, Any]:
    """Data sets by split, the first part of a file's name; subject: only the rows of one."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        split = re.split(r"[-.]", file.name)[0]
        with data.use(folder):
            found = data.load_rows("", str(file.relative_to(folder)))
        found = [row for row in found if subject is None or row.get("subject") == subject]
        rows.setdefault(split, []).extend(found)
    return {split: data.dataset(found, split)[split] for split, found in rows.items() if found}
