"""One preparation: its settings, its tokenizer, its work shards in the order of reading, and its work folder.

    <output_dir>.work/work.json       the request that the work is for; work for another request is removed
                                      with `overwrite` only
    <output_dir>.work/unit-*.bin      kept tokens, one file per finished work shard
    <output_dir>.work/shard-*.json    manifest entries of finished shards
    <output_dir>.work/rows/           the shards, renamed to <output_dir> at the end

Every file appears in one step, and is used again when it is there. So a run can be killed at any moment and
called again. The *request* is everything that decides the bytes of the result (see `Job.request`).
"""

import hashlib
import inspect
import json
import shutil
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.args import NOT_DECIDING, DataArgs
from pod.data.balance.sampling_keys import work_shard_order
from pod.data.read.filters import imported_filter
from pod.data.read.work_shards import WorkShard, plan_work_shards
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import token_dtype
from pod.data.run.workers import cores
from pod.data.tokens.token_file import WorkShardFile
from pod.data.tokens.tokenizers import (
    BoundaryTokens,
    Encoder,
    tokenizer_sha256,
)
from pod.files import read_json, write_json
from pod.tokenizer import load_tokenizer, model_vocabulary, pad_id

WORK_NAME = "work.json"


class Job:
    """One preparation of `args` into `output_dir`.

    Args:
        args: settings of the recipe's `data` section.
        tokenizer: a tokenizer, or its folder, file or hub id (then the job can be pickled). `args.tokenizer`
            wins.
        output_dir: the folder to make. A link to a folder is followed.
        seed: seed of the order of reading, the draw and the order of rows.

    Raises:
        ValueError: `args.target_tokens` is not set.
    """

    def __init__(self, args: DataArgs, tokenizer: Any, output_dir: str | Path, seed: int = 0):
        if args.target_tokens is None:
            raise ValueError(
                "data.target_tokens is not set: set it to the number of training tokens to prepare, or "
                "above the size of the corpus to take all of it"
            )
        self.args, self.seed, self.output_dir = args, seed, Path(output_dir)
        if self.output_dir.is_symlink():  # to a larger disk, say: the link stays
            self.output_dir = self.output_dir.resolve()
        self._source_of_tokenizer = args.tokenizer or tokenizer

    def __getstate__(self) -> dict[str, Any]:
        asked = ("args", "seed", "output_dir", "_source_of_tokenizer")
        # Each process makes the cached properties anew.
        return {name: self.__dict__[name] for name in asked}

    # The request

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which is loaded once per process."""
        return load_tokenizer(self._source_of_tokenizer)

    @cached_property
    def boundary(self) -> BoundaryTokens:
        """Token ids that are put before and after each document."""
        return BoundaryTokens.from_policy(self.args.boundary_tokens, self.tokenizer)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id that a document may hold."""
        return model_vocabulary(self.tokenizer)

    @property
    def dtype(self) -> np.dtype:
        """Type of the token ids on disk."""
        return token_dtype(self.vocab_size)

    @property
    def pad_token_id(self) -> int:
        """Id for positions without a token, as `pad_id` finds it."""
        return pad_id(self.tokenizer)

    @property
    def tokenizer_source(self) -> str | None:
        """Folder, file or hub id of the tokenizer; None when it came as an object."""
        source = self._source_of_tokenizer
        if not isinstance(source, (str, Path)):
            source = getattr(source, "name_or_path", None)
        return str(source) if source else None

    @cached_property
    def encoder(self) -> Encoder:
        """Turns texts into token ids."""
        return Encoder(self.tokenizer)

    @property
    def held_out_tokens(self) -> int:
        """Tokens to hold out of training."""
        return self.args.held_out_tokens or 0

    @property
    def workers(self) -> int:
        """Processes that read and write."""
        return self.args.workers or cores()

    def warm_up(self) -> None:
        """Compute the cached properties in this process, so that forked workers share them."""
        _ = self.work_shards, self.request, self.boundary, self.vocab_size, self.encoder

    @cached_property
    def work_shards(self) -> list[WorkShard]:
        """The work shards of all sources."""
        return plan_work_shards(self.args)

    def order(self) -> list[int]:
        """Numbers of the work shards in the order of reading."""
        sources = np.array([work_shard.source for work_shard in self.work_shards])
        return work_shard_order(sources, self.seed).tolist()

    @cached_property
    def request(self) -> dict[str, Any]:
        """All that decides the bytes of the result, except the sources' content and `held_out_tokens`."""
        settings = {name: value for name, value in asdict(self.args).items() if name not in NOT_DECIDING}
        settings["boundary_tokens"] = [list(self.boundary.before), list(self.boundary.after)]
        return {
            "settings": settings,
            "seed": self.seed,
            "tokenizer_sha256": tokenizer_sha256(self.tokenizer),
            "split_special_tokens": bool(getattr(self.tokenizer, "split_special_tokens", False)),
            "document_filter_sha256": _source_sha256(self.args.document_filter),
        }

    def is_current(self) -> bool:
        """Whether `output_dir` holds complete data of this request, with as much held-out text or more.

        The sources are not looked at, so they may have changed or be gone.
        """
        try:
            return self.is_answered_by(PackedDataset(self.output_dir).manifest)
        except ValueError:
            return False

    def is_answered_by(self, manifest: dict[str, Any]) -> bool:
        """Whether the data of a manifest can be used as it is for this job.

        It must be of this request, have as much held-out text or more, and have no token ids that the model
        lacks.
        """
        if manifest.get("vocab_size", 0) > self.vocab_size:  # older versions did not check the model's size
            return False
        held_out = (manifest.get("held_out") or {}).get("asked", 0)
        return manifest.get("request") == self.request and held_out >= self.held_out_tokens

    # Where the work lies

    @property
    def work_dir(self) -> Path:
        """Folder of the unfinished work, which is removed at the end."""
        return self.output_dir.parent / f"{self.output_dir.name}.work"

    @property
    def staging_dir(self) -> Path:
        """Folder of the shards until they are complete."""
        return self.work_dir / "rows"

    @property
    def lock_file(self) -> Path:
        """The lock that a run holds while it works on this output."""
        return self.output_dir.parent / f"{self.output_dir.name}.lock"

    def work_shard_file(self, number: int) -> WorkShardFile:
        """The file for the kept tokens of work shard `number`."""
        return WorkShardFile(
            self.work_dir / f"unit-{number}-{self._fingerprints[number][:16]}.bin", self.dtype
        )

    def entry_file(self, number: int) -> Path:
        """The file for the manifest entry of shard `number`. It exists once the shard is written."""
        return self.work_dir / f"shard-{number:05d}.json"

    def open_work(self, overwrite: bool = False) -> None:
        """Make the work folder, or go on with the work that an earlier run left there.

        Work of the same request is removed when its sources or `held_out_tokens` were others. A change of
        data.unreadable alone removes nothing.

        Args:
            overwrite: remove the work of another request too.

        Raises:
            ValueError: another request left finished work, and `overwrite` is False.
        """
        work_shards = hashlib.sha256("".join(self._fingerprints).encode()).hexdigest()
        wanted = {
            "request": self._of_work,
            "held_out_tokens": self.held_out_tokens,
            "units_sha256": work_shards,
        }
        found = self._found_work()
        if found == wanted:
            for rest in self.work_dir.glob(".unit-*"):  # of a killed run
                rest.unlink()
            return
        if any(self.work_dir.glob("unit-*")):
            work = "unfinished work with other settings, seed, tokenizer or sources"
            if not overwrite and found.get("request") != self._of_work:
                raise ValueError(
                    f"{self.work_dir} has {work}: run again with --overwrite to remove it, or set another "
                    "output_dir"
                )
            print(f"{self.work_dir}: removed {work}")
        self.clean()
        self.work_dir.mkdir(parents=True)
        write_json(self.work_dir / WORK_NAME, wanted)

    def has_work(self) -> bool:
        """Whether the work folder belongs to this request. Sources and `held_out_tokens` may differ.

        A folder without a work.json belongs to it when it holds no finished work shard.
        """
        found = self._found_work()
        return found["request"] == self._of_work if found else not any(self.work_dir.glob("unit-*"))

    def clean(self) -> None:
        """Remove the work folder.

        The files of work shards go first. So when this is killed, work.json still says whose the files are
        that are left.
        """
        for work_shard in self.work_dir.glob("unit-*"):
            work_shard.unlink(missing_ok=True)
        shutil.rmtree(self.work_dir, ignore_errors=True)

    @cached_property
    def _fingerprints(self) -> list[str]:
        return [work_shard.fingerprint() for work_shard in self.work_shards]

    @property
    def _of_work(self) -> dict[str, Any]:
        """The request as work.json stores it: without `unreadable`, which does not change finished work."""
        request = json.loads(json.dumps(self.request))
        request["settings"].pop("unreadable")
        return request

    def _found_work(self) -> dict[str, Any]:
        file = self.work_dir / WORK_NAME
        return read_json(file) if file.is_file() else {}


def _source_sha256(name: str | None) -> str | None:
    """SHA-256 of the source text of the user's filter, or of its name where the text cannot be had.

    Args:
        name: `module:function`, or None for no filter (the result is then None).
    """
    if name is None:
        return None
    function = imported_filter(name)
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__qualname__", function))
    return hashlib.sha256(text.encode()).hexdigest()
