"""Checkpoints: written under a temporary name, published by a rename, rotated, and refused when they belong elsewhere.

`<output_dir>/train/` holds `step-00000100/` (DeepSpeed's own ZeRO files, `checkpoint.json`, `plan.json`, the model's
configuration and one random state per rank) and `latest`, a text file with the newest folder's name. `latest` is
written after the folder is complete, so that a run killed at any moment leaves the last complete checkpoint.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pod.files import atomic_write_text, explain_disk_full, read_json, write_json
from pod.modeling.sharing import SharingPlan

SCHEMA_VERSION = 1
STATE_NAME = "checkpoint.json"
LATEST_NAME = "latest"
_IDENTITY_ADVICE = {
    "plan_sha256": ("another sharing plan", "the plan that it was trained with (plan.json in its folder)"),
    "model_sha256": ("another model", "the model that it was started from"),
    "data_sha256": ("other data", "the data that it was trained on"),
    "method": ("another train.method or other LoRA settings", "the same train.method and lora_* settings"),
    "dtype": ("another train.dtype", "the same train.dtype"),
}


@dataclass(kw_only=True)
class TrainState:
    """What a checkpoint stores besides the engine's own state; JSON."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    cursor: dict[str, int] = field(default_factory=dict)
    """Position in the data (RowCursor.state_dict)."""
    guard: dict[str, Any] = field(default_factory=dict)
    """What the guard remembers of earlier steps (Guard.state_dict)."""
    world_size: int = 1
    """Ranks that wrote it."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What it belongs to: see `identity_of`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe, for the record."""
    lora: dict[str, Any] | None = None
    """LoRA settings; None for full fine-tuning."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding."""


def identity_of(
    model: torch.nn.Module, plan: SharingPlan, manifest: dict[str, Any], method: Any, dtype: str
) -> dict:
    """Fingerprints that a resumed run must share with its checkpoint.

    The model's is taken over names, shapes and a sample of 16 values of every weight, before training starts.
    """
    model_hash = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().reshape(-1)
        sample = values[:: max(1, values.numel() // 16)][:16].float()
        model_hash.update(f"{name}{tuple(parameter.shape)}{sample.tolist()}".encode())
    data = {name: manifest[name] for name in ("context_length", "tokenizer_sha256", "shards")}
    return {
        "plan_sha256": _sha256(plan.lead),
        "model_sha256": model_hash.hexdigest(),
        "data_sha256": _sha256(data),
        "method": method,
        "dtype": dtype,
    }


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, None when there is none.

    Raises:
        ValueError: `latest` names a folder that is gone.
    """
    pointer = folder / LATEST_NAME
    if not pointer.is_file():
        return None
    checkpoint = folder / pointer.read_text(encoding="utf-8").strip()
    if not (checkpoint / STATE_NAME).is_file():
        raise ValueError(
            f"{pointer} names {checkpoint.name}, which is not a checkpoint: write another step's name into it"
        )
    return checkpoint


def read_state(checkpoint: Path) -> TrainState:
    """The state of a checkpoint folder; ValueError when it is missing, unreadable or of another version."""
    content = read_json(checkpoint / STATE_NAME)
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA_VERSION:
        raise ValueError(
            f"{checkpoint / STATE_NAME} is not a training checkpoint of version {SCHEMA_VERSION}"
        )
    return TrainState(**content)


def check_identity(state: TrainState, identity: dict[str, Any], world_size: int, checkpoint: Path) -> None:
    """Raise ValueError when a checkpoint belongs to another plan, model, data, method, dtype or rank count."""
    for key, (what, needed) in _IDENTITY_ADVICE.items():
        if state.identity.get(key) != identity[key]:
            raise ValueError(
                f"checkpoint {checkpoint} belongs to {what}: use {needed}, or set another output_dir"
            )
    if state.world_size != world_size:
        raise ValueError(
            f"checkpoint {checkpoint} was written by {state.world_size} ranks, now there are {world_size}: "
            f"start {state.world_size} ranks, or set another output_dir"
        )


class _ErrorRecorder:
    """Stands before DeepSpeed's checkpoint writer and notes a failed write instead of raising.

    A rank that raised inside `save_checkpoint` would leave its peers waiting in a barrier.
    """

    def __init__(self, writer: Any):
        self._writer, self.error = writer, None

    def save(self, state_dict: Any, path: str) -> None:
        try:
            with explain_disk_full(path):
                self._writer.save(state_dict, path)
        except (OSError, RuntimeError) as error:
            self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class Checkpointer:
    """Saves and loads the state of one run; every method is called by all ranks.

    Args:
        folder: <output_dir>/train, on a file system that all ranks see.
        engine: the DeepSpeed engine.
        keep_last: complete checkpoints to keep.
        needed_bytes: size of one checkpoint, checked against the free space before writing.
        describe: writes the model's configuration and plan into a folder (rank 0 only).
    """

    def __init__(
        self, folder: Path, engine: Any, keep_last: int, needed_bytes: int, describe: Any, device: Any
    ):
        self.folder, self.engine, self.keep_last = folder, engine, keep_last
        self.needed_bytes, self.describe, self.device = needed_bytes, describe, device
        self.rank = dist.get_rank()
        self.writer = _ErrorRecorder(engine.checkpoint_engine)
        engine.checkpoint_engine = self.writer
        engine._copy_recovery_script = lambda path: None  # launch/export_hf.py is the way out
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for abandoned in folder.glob(".step-*.tmp"):
                shutil.rmtree(abandoned, ignore_errors=True)
        dist.barrier()

    def save(self, state: TrainState) -> Path:
        """Write a checkpoint and publish it; returns its folder.

        Raises:
            OSError: in one line, on every rank, when any rank cannot write; nothing half-written is kept.
        """
        final = self.folder / f"step-{state.step:08d}"
        temporary = self.folder / f".{final.name}.tmp"
        self._agree(self._space_error(final), final)
        self.writer.error = None
        self.engine.save_checkpoint(
            str(self.folder),
            tag=temporary.name,
            save_latest=False,
            exclude_frozen_parameters=state.lora is not None,
        )
        error = self.writer.error or self._write_own(temporary, state)
        try:
            self._agree(error, final)
        except OSError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            dist.barrier()
            raise
        if self.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            atomic_write_text(self.folder / LATEST_NAME, final.name + "\n")
            self._rotate(final)
        dist.barrier()
        return final

    def wait(self) -> None:
        """Return when every checkpoint that was begun is published."""

    def close(self) -> None:
        """Give up what is not published yet."""

    def load(self, checkpoint: Path, state: TrainState) -> None:
        """Restore weights, optimizer and this rank's random state from a checkpoint whose identity was checked."""
        try:
            path, _ = self.engine.load_checkpoint(
                str(checkpoint.parent), tag=checkpoint.name, load_module_strict=state.lora is None
            )
        except (OSError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"checkpoint {checkpoint} cannot be read ({_first_line(error)}): remove it"
            ) from error
        if path is None:
            raise ValueError(f"checkpoint {checkpoint} is incomplete: remove it and resume from an older one")
        random_states = load_file(checkpoint / f"random-{self.rank:05d}.safetensors")
        torch.set_rng_state(random_states["cpu"])
        if "cuda" in random_states:
            torch.cuda.set_rng_state(random_states["cuda"])

    def _write_own(self, temporary: Path, state: TrainState) -> Exception | None:
        random_states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random_states["cuda"] = torch.cuda.get_rng_state()
        try:
            with explain_disk_full(temporary / STATE_NAME):
                save_file(random_states, temporary / f"random-{self.rank:05d}.safetensors")
                if self.rank == 0:
                    self.describe(temporary)
                    write_json(temporary / STATE_NAME, {"schema": SCHEMA_VERSION, **vars(state)})
        except Exception as error:  # noqa: BLE001  safetensors' own error class derives from Exception; raised by _agree
            return error
        return None

    def _space_error(self, final: Path) -> OSError | None:
        free = shutil.disk_usage(self.folder).free
        if free >= self.needed_bytes:
            return None
        missing = (self.needed_bytes - free) // 10**6 + 1
        return OSError(
            f"disk full while writing {final}: free at least {missing} MB or set another output_dir"
        )

    def _agree(self, error: Exception | None, final: Path) -> None:
        """Raise on all ranks when any of them has an error."""
        failed = torch.tensor([error is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(failed)
        if isinstance(error, OSError) and "disk full" in str(error):
            raise error
        if error is not None:
            raise OSError(
                f"cannot write checkpoint {final} ({_first_line(error)}): check space, quota and permissions there, "
                "or set another output_dir"
            ) from error
        if failed.item():
            raise OSError(f"cannot write checkpoint {final}: another rank failed, see its message")

    def _rotate(self, newest: Path) -> None:
        complete = sorted(path for path in self.folder.glob("step-*") if path.is_dir())
        for old in complete[: -self.keep_last]:
            if old != newest:
                shutil.rmtree(old, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
