"""Checkpoints: written under a temporary name, published by a rename, rotated, and refused when they belong elsewhere.

`<output_dir>/train/` holds `step-00000100/` (DeepSpeed's own ZeRO files, `checkpoint.json`, `plan.json`, the model's
configuration and one random state per rank) and `latest`, a text file with the newest folder's name. `latest` is
written after the folder is complete, so that a run killed at any moment leaves the last complete checkpoint.
`universal-00000100/` is a copy for another layout of ranks, see `universal.py`.
"""

import hashlib
import json
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pod.files import atomic_write_text, explain_disk_full, read_json, write_json
from pod.modeling.shipped.sharing import SharingPlan
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.checkpoint.snapshot import FileWriter, sync_to_disk
from pod.training.checkpoint.universal import convert_on_rank_0, remove_universal
from pod.training.run.mesh import from_rank_0

SCHEMA_VERSION = 2
STATE_NAME = "checkpoint.json"
LATEST_NAME = "latest"
_IDENTITY_ADVICE = {
    "plan_sha256": ("another sharing plan", "the plan that it was trained with (plan.json in its folder)"),
    "layout": ("another model.layout", "the same model.layout"),
    "windows": ("other windows", "the same model.num_sink_tokens and model.num_recent_tokens"),
    "rope": ("another RoPE", "the same model.rope_* settings and model.max_position_embeddings"),
    "model_sha256": ("another model", "the model that it was started from"),
    "data_sha256": ("other data", "the data that it was trained on"),
    "method": ("another train.method or other LoRA settings", "the same train.method and lora_* settings"),
    "dtype": ("another train.dtype", "the same train.dtype"),
}
_SHARDING = ("world_size", "zero_stage", "offload_optimizer", "offload_parameters")
"""Parts of a layout on which the files of a checkpoint depend; the sequence-parallel size is none of them."""

Sample = tuple[tuple[int, ...], list[float]]
Samples = dict[str, Sample]


def sample_of(weight: torch.Tensor) -> Sample:
    """Shape, and 16 values in bfloat16: a run in bfloat16 starts from these, its export in float32."""
    flat = weight.detach().reshape(-1)
    return tuple(weight.shape), flat[:: max(1, flat.numel() // 16)][:16].bfloat16().float().tolist()


def samples_of(model: torch.nn.Module) -> Samples:
    """Of all weights of a whole model."""
    return {name: sample_of(parameter) for name, parameter in model.named_parameters()}


@dataclass(kw_only=True)
class TrainState:
    """What a checkpoint stores besides the engine's own state; JSON."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    cursor: dict[str, int] = field(default_factory=dict)
    """Position in the data (RowCursor.state_dict): rows of all ranks, so that any number of ranks continues there."""
    guard: dict[str, Any] = field(default_factory=dict)
    """What the guard remembers of earlier steps (Guard.state_dict)."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Ranks and shards that wrote it: see `layout_of`."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What it belongs to: see `identity_of`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe, for the record."""
    lora: dict[str, Any] | None = None
    """LoRA settings; None for full fine-tuning."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding."""


def layout_of(args: TrainArgs, mesh: Any) -> dict[str, Any]:
    """How a run is divided; a checkpoint of another layout is converted when it is loaded."""
    return {
        "world_size": mesh.world_size,
        "sequence_parallel_size": args.sequence_parallel_size,
        "zero_stage": args.zero_stage,
        "offload_optimizer": args.offload_optimizer,
        "offload_parameters": args.offload_parameters,
    }


def identity_of(
    config: Any, samples: Samples, plan: SharingPlan, manifest: dict[str, Any], method: Any, dtype: str
) -> dict[str, Any]:
    """Fingerprints that a resumed run must share with its checkpoint; JSON. The first two as in `start_identity_of`."""
    data = {name: manifest[name] for name in ("context_length", "tokenizer_sha256", "shards")}
    identity = {
        **start_identity_of(config, samples),
        "plan_sha256": _sha256([plan.lead, plan.head_order] if plan.head_order else plan.lead),
        "data_sha256": _sha256(data),
        "method": method,
        "dtype": dtype,
    }
    return json.loads(json.dumps(identity))  # as it will be read again: tuples are lists there


def start_identity_of(config: Any, samples: Samples) -> dict[str, Any]:
    """The part of an identity that is the start model's: its weights, layout, windows and RoPE.

    Args:
        config: of the model.
        samples: of its weights, in the model's order.
    """
    model_hash = hashlib.sha256()
    for name, (shape, values) in samples.items():
        model_hash.update(f"{name}{shape}{values}".encode())
    start = {
        "layout": config.layout,
        "windows": [config.num_sink_tokens, config.num_recent_tokens],
        "rope": {**config.rope_parameters, "max_position_embeddings": config.max_position_embeddings},
        "model_sha256": model_hash.hexdigest(),
    }
    return json.loads(json.dumps(start))


def check_start_model(state: TrainState, model: Any, checkpoint: Path) -> None:
    """Raise ValueError when `model` is not the one that a checkpoint's adapters were trained on."""
    for key, value in start_identity_of(model.config, samples_of(model)).items():
        if state.identity.get(key) != value:
            what, needed = _IDENTITY_ADVICE[key]
            raise ValueError(
                f"the adapters of checkpoint {checkpoint} were trained with {what}: use {needed}"
            )


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


def check_identity(state: TrainState, identity: dict[str, Any], checkpoint: Path) -> None:
    """Raise ValueError when a checkpoint belongs to another plan, layout, windows, RoPE, model, data, method or dtype."""
    for key, (what, needed) in _IDENTITY_ADVICE.items():
        if state.identity.get(key) != identity[key]:
            raise ValueError(
                f"checkpoint {checkpoint} belongs to {what}: use {needed}, or set another output_dir"
            )


def same_shards(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a rank of one layout reads the files that a rank of the other wrote."""
    return all(one.get(key) == other.get(key) for key in _SHARDING)


def checkpoint_to_resume(folder: Path, args: TrainArgs, mesh: Any, identity: dict[str, Any]) -> Path | None:
    """The checkpoint that a run continues from, None when it starts anew. Called by all ranks; rank 0 looks.

    Raises:
        ValueError: `resume=never` and there are checkpoints, or the newest belongs to another run; on all ranks.
    """

    def look() -> Path | None:
        checkpoint = latest_checkpoint(folder)
        if checkpoint is None:
            return None
        if args.resume == "never":
            raise ValueError(
                f"{folder} already holds checkpoints: set train.resume=auto to continue, or another output_dir"
            )
        check_identity(read_state(checkpoint), identity, checkpoint)
        return checkpoint

    return from_rank_0(mesh.rank, look)


class Checkpointer:
    """Saves and loads the state of one run; every method is called by all ranks.

    Args:
        folder: <output_dir>/train, on a file system that all ranks see.
        engine: the DeepSpeed engine.
        args: section `train` of the recipe.
        mesh: the ranks.
        needed_bytes: size of one checkpoint, checked against the free space before writing.
        describe: writes the model's configuration and plan into a folder (rank 0 only).
        alive: told `save` after every written file and `load` while a checkpoint is converted.
        took: told the seconds from the begin of a checkpoint to its publication.

    Attributes:
        latest: the newest complete checkpoint that this run wrote or loaded, the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        engine: Any,
        args: TrainArgs,
        mesh: Any,
        needed_bytes: int,
        describe: Callable[[Path], None],
        alive: Callable[[str], None] = lambda phase: None,
        took: Callable[[float], None] = lambda seconds: None,
    ):
        self.folder, self.engine, self.args, self.mesh = folder, engine, args, mesh
        self.needed_bytes, self.describe, self.alive, self.took = needed_bytes, describe, alive, took
        self.layout = layout_of(args, mesh)
        self.latest: Path | None = None
        self._pending: Path | None = None
        self._began = 0.0
        self.writer = bridge.write_through(engine, lambda own: FileWriter(own, self._file_written))
        self._hyperparameters = bridge.hyperparameters(engine)
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for abandoned in folder.glob(".step-*.tmp"):
                shutil.rmtree(abandoned, ignore_errors=True)
            remove_universal(folder, keep=latest_checkpoint(folder))
        dist.barrier()

    def save(self, state: TrainState) -> Path:
        """Write a checkpoint and publish it; returns its folder.

        With `save_mode=async` it returns when this rank's part is copied to host memory, `poll` or `wait` publish it.

        Raises:
            OSError: in one line, on every rank, when any rank cannot write; nothing half-written is kept.
        """
        self.wait()
        self._began = time.monotonic()
        final = self.folder / f"step-{state.step:08d}"
        temporary = _temporary(final)
        self._agree(self._space_error(final), final)
        self.writer.begin(deferred=self.args.save_mode == "async")
        bridge.save_engine(self.engine, temporary)
        own_error = self._write_own(temporary, replace(state, layout=self.layout))
        self.writer.error = self.writer.error or own_error
        self._pending = final
        if self.writer.deferred:
            self.writer.start()
        else:
            self._publish()
        return final

    def poll(self) -> None:
        """Publish the checkpoint under way when all ranks have written it; called between steps.

        Raises:
            OSError: in one line, on every rank, when any rank could not write.
        """
        if self._pending is None:
            return
        if not self.mesh.largest(not self.writer.finished):
            self._publish()

    def wait(self) -> None:
        """Return when every checkpoint that was begun is published; errors as in `poll`."""
        if self._pending is None:
            return
        self.alive("save")  # the watchdog sees the files grow from here on
        self.writer.join()
        self._publish()

    def close(self) -> None:
        """Give up what is not published yet; the next run removes it."""
        self._pending = None

    def load(self, checkpoint: Path) -> TrainState:
        """Weights, optimizer and this rank's random state from a checkpoint whose identity was checked; also in a running engine.

        Hyperparameters of the optimizer stay the recipe's. Written by another number of ranks or with another zero_stage or
        offload, the checkpoint is converted first; random states then begin anew from seed, step and rank.

        Raises:
            ValueError: missing or damaged files, or no space for the conversion.
        """
        state = read_state(checkpoint)
        own = same_shards(state.layout, self.layout)
        saved = self._read_own_files(checkpoint) if own else None
        universal = None if own else convert_on_rank_0(checkpoint, self.mesh, self.alive)
        try:
            if universal is None:
                bridge.load_engine(self.engine, checkpoint)
            else:
                bridge.load_universal(self.engine, universal)
        except (OSError, RuntimeError, EOFError) as error:
            broken = checkpoint if universal is None else universal
            raise ValueError(
                f"checkpoint {broken} cannot be read ({_first_line(error)}): remove it"
            ) from error
        bridge.set_hyperparameters(self.engine, self._hyperparameters)
        bridge.set_step(self.engine, state.step)
        self._set_random_states(state, saved)
        self.latest = checkpoint
        return replace(state, layout=self.layout)

    def _read_own_files(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """This rank's. One whose files are damaged tells the others, who would wait for it in the engine's collectives and
        take their broken connection for a broken checkpoint."""
        file = checkpoint / f"random-{self.mesh.rank:05d}.safetensors"
        states, reason = {}, None
        try:
            states = load_file(file)
        except (OSError, SafetensorError) as error:
            reason = f"{file.name}: {_first_line(error)}"
        # torch writes zip archives, whose directory stands at the end
        for shard in checkpoint.glob(f"*pp_rank_{self.mesh.rank}_*.pt"):
            if not zipfile.is_zipfile(shard):
                reason = f"{shard.name} is cut off"
        if self.mesh.largest(reason is not None):
            reason = reason or "another rank failed, see its message"
            raise ValueError(f"checkpoint {checkpoint} cannot be read ({reason}): remove it")
        return states

    def _set_random_states(self, state: TrainState, saved: dict[str, torch.Tensor] | None) -> None:
        if saved is None:
            mixed = _sha256([state.cursor.get("seed", 0), state.step, self.mesh.rank])
            torch.manual_seed(int(mixed[:15], 16))
            return
        set_random_states(saved)

    def _file_written(self) -> None:
        # Called in the writing thread it would hide a training step that hangs.
        if not self.writer.deferred:
            self.alive("save")

    def _write_own(self, temporary: Path, state: TrainState) -> Exception | None:
        try:
            with explain_disk_full(temporary / STATE_NAME):
                own = temporary / f"random-{self.mesh.rank:05d}.safetensors"
                save_file(random_states(), own)
                sync_to_disk(own)
                if self.mesh.rank == 0:
                    self.describe(temporary)
                    for file in temporary.glob("*.json"):
                        sync_to_disk(file)
                    write_json(temporary / STATE_NAME, {"schema": SCHEMA_VERSION, **vars(state)})
        except Exception as error:  # noqa: BLE001  safetensors' own error class derives from Exception; raised by _agree
            return error
        return None

    def _publish(self) -> None:
        """Rename what all ranks have written, point `latest` at it, remove what is no longer needed."""
        final, self._pending = self._pending, None
        assert final is not None
        temporary = _temporary(final)
        try:
            self._agree(self.writer.error, final)
        except OSError:
            if self.mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            dist.barrier()
            raise
        if self.mesh.rank == 0:
            _remove(final)
            sync_to_disk(temporary)
            temporary.rename(final)
            sync_to_disk(self.folder)
            atomic_write_text(self.folder / LATEST_NAME, final.name + "\n")
            self._rotate(final)
            remove_universal(self.folder)
        self.latest = final
        dist.barrier()
        self.took(time.monotonic() - self._began)

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
        failed = self.mesh.largest(error is not None)
        if isinstance(error, OSError) and "disk full" in str(error):
            raise error
        if error is not None:
            raise OSError(
                f"cannot write checkpoint {final} ({_first_line(error)}): check space, quota and permissions there, "
                "or set another output_dir"
            ) from error
        if failed:
            raise OSError(f"cannot write checkpoint {final}: another rank failed, see its message")

    def _rotate(self, newest: Path) -> None:
        """Keep the newest `keep_last` and every `keep_every_steps`th; later steps than the newest are another branch's."""
        every = self.args.keep_every_steps
        complete = sorted(path for path in self.folder.glob("step-*") if path.is_dir() and path <= newest)
        for old in complete[: -self.args.keep_last]:
            if not (every and int(old.name.removeprefix("step-")) % every == 0):
                _remove(old)


def random_states() -> dict[str, torch.Tensor]:
    """Of this rank's generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, so that a kill leaves it whole or under a name that the next run removes."""
    if checkpoint.is_dir():
        going = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
        shutil.rmtree(going, ignore_errors=True)
        checkpoint.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
