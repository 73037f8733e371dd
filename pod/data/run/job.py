"""What one preparation is: settings, tokenizer, work shards in the order of reading, and where its work lies.

    <output_dir>.work/work.json       what the work is for; work for anything else is kept unless `overwrite`
                                      is asked for
    <output_dir>.work/unit-*.bin      kept tokens, one file per finished work shard
    <output_dir>.work/shard-*.json    entries of finished shards
    <output_dir>.work/rows/           the shards, renamed to <output_dir> at the end

Every file appears in one step and is used again when it is there. So a run can be killed at any moment and
called again.
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
        tokenizer: a tokenizer, or its folder, file or hub id (then the job can be pickled). `args.tokenizer`
            wins.
        seed: seed of the order of reading, the draw and the order of rows.
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
        return {name: self.__dict__[name] for name in asked}  # what follows from it is made once per process

    # What is asked for

    @cached_property
    def tokenizer(self) -> Any:
        """Loaded once per process."""
        return load_tokenizer(self._source_of_tokenizer)

    @cached_property
    def boundary(self) -> BoundaryTokens:
        """Ids before and after each document."""
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
        """Texts → ids."""
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
        """Make here what each forked worker would otherwise make for itself."""
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

        No source is looked at.
        """
        try:
            return self.is_answered_by(PackedDataset(self.output_dir).manifest)
        except ValueError:
            return False

    def is_answered_by(self, manifest: dict[str, Any]) -> bool:
        """Whether data of this manifest answers this request.

        It must be of this request, with as much held-out text or more, and with no ids that the model lacks.
        """
        if manifest.get("vocab_size", 0) > self.vocab_size:  # made when the model's size was not asked for
            return False
        held_out = (manifest.get("held_out") or {}).get("asked", 0)
        return manifest.get("request") == self.request and held_out >= self.held_out_tokens

    # Where the work lies

    @property
    def work_dir(self) -> Path:
        """Folder of everything that is removed in the end."""
        return self.output_dir.parent / f"{self.output_dir.name}.work"

    @property
    def staging_dir(self) -> Path:
        """Folder of the shards until they are complete."""
        return self.work_dir / "rows"

    @property
    def lock_file(self) -> Path:
        """Lock that the run which works on this output holds."""
        return self.output_dir.parent / f"{self.output_dir.name}.lock"

    def work_shard_file(self, number: int) -> WorkShardFile:
        """The file of work shard `number`."""
        return WorkShardFile(
            self.work_dir / f"unit-{number}-{self._fingerprints[number][:16]}.bin", self.dtype
        )

    def entry_file(self, number: int) -> Path:
        """The manifest's entry of shard `number`, once it is written."""
        return self.work_dir / f"shard-{number:05d}.json"

    def open_work(self, overwrite: bool = False) -> None:
        """Make the work folder. What the same request left there of other sources is removed.

        The policy for what cannot be read is no part of the request: finished work stays when it is relaxed.

        Raises:
            ValueError: where another request left finished work, unless `overwrite` lets it be removed.
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
        """Whether the work folder belongs to this request, with whatever held-out text and sources.

        It also counts when it holds no finished work shard.
        """
        found = self._found_work()
        return found["request"] == self._of_work if found else not any(self.work_dir.glob("unit-*"))

    def clean(self) -> None:
        """Remove the work.

        What it was for goes last, so that work shards which a kill leaves are not of unknown origin.
        """
        for work_shard in self.work_dir.glob("unit-*"):
            work_shard.unlink(missing_ok=True)
        shutil.rmtree(self.work_dir, ignore_errors=True)

    @cached_property
    def _fingerprints(self) -> list[str]:
        return [work_shard.fingerprint() for work_shard in self.work_shards]

    @property
    def _of_work(self) -> dict[str, Any]:
        request = json.loads(json.dumps(self.request))
        request["settings"].pop("unreadable")
        return request

    def _found_work(self) -> dict[str, Any]:
        file = self.work_dir / WORK_NAME
        return read_json(file) if file.is_file() else {}


def _source_sha256(name: str | None) -> str | None:
    """Identity of a user's filter: its source text, else its name."""
    if name is None:
        return None
    function = imported_filter(name)
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__qualname__", function))
    return hashlib.sha256(text.encode()).hexdigest()
