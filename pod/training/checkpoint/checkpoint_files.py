"""Checkpoints: how they are written, published, rotated and read, and how the trained model is restored.

A checkpoint is written under a temporary name and published by a rename. `<output_dir>/train/` holds

- `step-00000100/`: the trained state, a random state per rank, `checkpoint.json`, `plan.json` and the model's
  configuration;
- `latest`: a text file with the newest folder's name. It is written when that folder is complete.

The trained state can be read with any number of ranks, sequence-parallel size and ZeRO stage. Rank 2 writes
what it holds into `weights-00002-000.safetensors` and so on. A tensor there is a piece, in fp32, of a
flattened weight or of one of Adam's moments. Its key gives kind, first element and name
(`exp_avg/4096/model.lm_head.weight`). The file's metadata gives the shapes of whole weights. A rank that
reads takes from all files what overlaps with its own pieces.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from pod.errors import one_line
from pod.files import atomic_write_text, explain_disk_full, read_mapping, write_json
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sinks import is_constant
from pod.modeling.sink_weights import with_trained_constants
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.checkpoint.newest import WEIGHT_FILES, step_folders, step_of
from pod.training.checkpoint.run_identity import (
    LATEST_NAME,
    STATE_NAME,
    TrainState,
    check_identity,
    read_state,
    sample_of,
    sha256_of,
    start_identity_of,
    way_back,
)
from pod.training.deepspeed_bridge import MASTER, Piece
from pod.training.predict.memory_estimate import checkpoint_disk_bytes
from pod.training.run.lora import add_lora
from pod.training.run.mesh import Mesh
from pod.training.run.run_control import RunControl
from pod.training.run.shared_qk import host_copy


class Checkpointer:
    """Saves and loads the state of one run.

    All ranks call every method, and all of them see the run's folder.

    Args:
        folder: <output_dir>/train.
        engine: DeepSpeed's, whose weights and moments are saved.
        model: the model without adapters. Its configurations and plan go into every checkpoint.
        control: is told of progress while files are written, and how long a checkpoint took.

    Attributes:
        latest: the newest complete checkpoint that this run wrote or loaded, the same on all ranks.
        saved_step: step of the newest checkpoint that was begun or loaded; None = there is none.
        num_begun: checkpoints that this process has begun to write.
    """

    def __init__(
        self, folder: Path, args: TrainArgs, mesh: Mesh, engine: Any, model: Any, control: RunControl
    ):
        self.folder, self.args, self.mesh = folder, args, mesh
        self.engine, self.model, self.control = engine, model, control
        trained = [one for one in engine.module.parameters() if one.requires_grad]
        self.needed_bytes = checkpoint_disk_bytes(sum(bridge.shape_of(one).numel() for one in trained))
        self.latest: Path | None = None
        self.saved_step: int | None = None
        self.num_begun = 0
        self._pending: Path | None = None
        self._run = ""
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        if self.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for abandoned in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(abandoned, ignore_errors=True)
        dist.barrier()

    def save(self, state: TrainState) -> None:
        """Write a checkpoint and publish it.

        With `save_mode=async` it only copies this rank's part to host memory. A thread then writes, and
        `poll` or `wait` publishes.

        Raises:
            OSError: in one line, on every rank, when any rank cannot write. Nothing half-written is kept.
        """
        self.wait()
        self._began, self._error, self._run = time.monotonic(), None, state.run
        final = self.folder / f"step-{state.step:08d}"
        self._agree(self._space_error(final), final)
        self._pending = final
        self.saved_step = state.step
        self.num_begun += 1
        state = replace(state, world_size=self.mesh.world_size)
        pieces = bridge.pieces(self.engine)
        if self.args.save_mode == "sync":
            self._write(final, state, pieces, random_states(), lambda: self.control.alive("save"))
            self._publish()
            return
        try:
            # A sign of life from the thread would hide a training step that hangs. The thread is a daemon, so
            # that a rank that fails does not wait for it.
            content = final, state, host_pieces(pieces), random_states(), lambda: None
            self._thread = threading.Thread(target=self._write, args=content, daemon=True)
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self._error = error

    def poll(self) -> None:
        """Publish the checkpoint under way if all ranks have written it. Call it between steps.

        Raises:
            OSError: as in `save`.
        """
        if self._pending is None:
            return
        writes = self._thread is not None and self._thread.is_alive()
        if not self.mesh.largest(writes):
            self._publish()

    def wait(self) -> None:
        """Return when every checkpoint that was begun is published.

        Raises:
            OSError: as in `poll`.
        """
        if self._pending is None:
            return
        self.control.alive("save")  # the watchdog sees the files grow from here on
        if self._thread is not None:
            self._thread.join()
        self._publish()

    def close(self) -> None:
        """Give up a checkpoint that is not published yet; the next run removes it."""
        self._pending = None

    def load(self, checkpoint: Path) -> TrainState:
        """Load weights, optimizer and this rank's random state from a checkpoint.

        The caller must have checked the checkpoint's identity (`check_identity`). The engine may be in the
        middle of training, as for a rewind. If another number of ranks wrote the checkpoint, the random
        generators are seeded anew, from the run's seed, the step and the rank.

        Raises:
            ValueError: files are missing or damaged; on all ranks.
        """
        state = read_state(checkpoint)
        problem = None
        states: dict[str, Tensor] = {}
        bridge.set_updates(self.engine, state.updates)
        try:
            read_pieces(checkpoint, bridge.pieces(self.engine))
            if state.world_size == self.mesh.world_size:
                states = load_file(checkpoint / _random_name(self.mesh.rank))
        except (OSError, ValueError, SafetensorError) as error:
            problem = one_line(error)
        # All ranks fail together: a rank that failed alone would leave its peers waiting in the next
        # collective.
        if self.mesh.largest(problem is not None):
            reason = problem or "another rank failed, see its message"
            raise ValueError(f"checkpoint {checkpoint} cannot be read ({reason}): {way_back(checkpoint)}")
        bridge.renew_weights(self.engine)
        if states:
            set_random_states(states)
        else:
            mixed = sha256_of([state.cursor.get("seed", 0), state.step, self.mesh.rank])
            torch.manual_seed(int(mixed[:15], 16))
        self.latest = checkpoint
        self.saved_step = state.step
        return state

    def _write(self, final: Path, state: TrainState, pieces: list[Piece], states: Any, written: Any) -> None:
        """Write this rank's files. An error is kept for `_publish`, where all ranks hear of it."""
        temporary = _temporary(final)
        try:
            temporary.mkdir(exist_ok=True)
            count = write_pieces(temporary, self.mesh.rank, pieces, written)
            with explain_disk_full(temporary):
                own = temporary / _random_name(self.mesh.rank)
                save_file(states, own, metadata={WEIGHT_FILES: str(count)})
                sync_to_disk(own)
                if self.mesh.rank == 0:
                    describe_model(self.model, temporary)
                    for file in temporary.glob("*.json"):
                        sync_to_disk(file)
                    state.save(temporary)
        except Exception as error:  # noqa: BLE001  safetensors' own error class derives from Exception
            self._error = error

    def _publish(self) -> None:
        """Rename the folder that all ranks have written, write its name into `latest`, and rotate.

        See `_rotate` for the checkpoints that are removed.

        Raises:
            OSError: as in `save`.
        """
        final, self._pending, self._thread = self._pending, None, None
        assert final is not None
        temporary = _temporary(final)
        try:
            self._agree(self._error, final)
        except OSError:
            if self.mesh.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            dist.barrier()
            raise
        if self.mesh.rank == 0:
            put_aside(final)
            sync_to_disk(temporary)
            temporary.rename(final)
            sync_to_disk(self.folder)
            atomic_write_text(self.folder / LATEST_NAME, final.name + "\n")
            self._rotate(final)
        self.latest = final
        dist.barrier()
        self.control.save_took(time.monotonic() - self._began)

    def _space_error(self, final: Path) -> OSError | None:
        """The error that says how much space the disk lacks for a checkpoint; None when it has enough."""
        missing = self.needed_bytes - shutil.disk_usage(self.folder).free
        if missing <= 0:
            return None
        advice = f"free at least {missing // 10**6 + 1} MB or set another output_dir"
        return OSError(f"disk full while writing {final}: {advice}")

    def _agree(self, error: Exception | None, final: Path) -> None:
        """Raise on all ranks when any of them has an error."""
        failed = self.mesh.largest(error is not None)
        if isinstance(error, OSError) and "disk full" in str(error):
            raise error
        if error is not None:
            raise OSError(
                f"cannot write checkpoint {final} ({one_line(error)}): check space, quota and permissions "
                "there, or set another output_dir"
            ) from error
        if failed:
            raise OSError(f"cannot write checkpoint {final}: another rank failed, see its message")

    def _rotate(self, newest: Path) -> None:
        """Remove old checkpoints of this run.

        The newest `keep_last` are kept, and those of steps that are multiples of `keep_every_steps`. What
        another run left in the folder stays. Checkpoints of steps after `newest` stay too: they were written
        before the run went back to an earlier step.
        """
        every = self.args.keep_every_steps
        until = [path for path in step_folders(self.folder) if step_of(path) <= step_of(newest)]
        own = [path for path in until if run_of(path) == self._run]
        for old in own[: -self.args.keep_last]:
            kept_for_good = every > 0 and step_of(old) % every == 0
            if not kept_for_good:
                _remove(old)


def describe_model(model: PodForCausalLM, folder: Path) -> None:
    """Write what an export needs besides weights: the model's configurations and its plan."""
    model.config.save_pretrained(folder)
    write_json(folder / "generation_config.json", model.generation_config.to_dict())
    model.config.sharing_plan.save(folder / "plan.json")


def random_states() -> dict[str, Tensor]:
    """The states of this rank's random generators, by device."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_random_states(states: dict[str, Tensor]) -> None:
    """Put back what `random_states` gave."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def run_of(checkpoint: Path) -> str:
    """The run that wrote a checkpoint (see `TrainState.run`); "" where the checkpoint does not say."""
    return (read_mapping(checkpoint / STATE_NAME) or {}).get("run", "")


def put_aside(checkpoint: Path) -> None:
    """Rename a folder that stands where a checkpoint is about to be published; nothing is removed.

    Such a folder was written before the run went back to an earlier step, or it is damaged.
    """
    if not checkpoint.is_dir():
        return
    names = (checkpoint.with_name(f"kept-{number}-{checkpoint.name}") for number in itertools.count(1))
    kept = checkpoint.rename(next(name for name in names if not name.exists()))
    tqdm.write(f"note: {checkpoint} existed already; it was renamed to {kept.name}")


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint.

    If the process is killed meanwhile, the checkpoint is still whole, or it has a name that the next run
    removes.
    """
    if checkpoint.is_dir():
        going = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
        shutil.rmtree(going, ignore_errors=True)
        checkpoint.rename(going)
        shutil.rmtree(going, ignore_errors=True)


FILE_BYTES = 2**30
"""Bytes from which on a file of weights is complete, and the next one begins.

Pieces from a GPU wait in host memory until their file is written.
"""


def host_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Copies of pieces in host memory. The copies run at the same time, and are complete on return."""
    copies = [replace(one, values={kind: host_copy(x) for kind, x in one.values.items()}) for one in pieces]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def write_pieces(folder: Path, rank: int, pieces: list[Piece], written: Callable[[], None]) -> int:
    """Write and sync this rank's files, and return their number.

    It empties `pieces`, so that their memory is freed as they are written.

    Args:
        written: is called after every file.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    number = 0
    while pieces:
        tensors, shapes, room = {}, {}, FILE_BYTES
        while pieces and room > 0:
            one = pieces.pop(0)
            tensors |= {f"{kind}/{one.start}/{one.name}": held.cpu() for kind, held in one.values.items()}
            shapes[one.name] = json.dumps(one.shape)
            room -= sum(held.nbytes for held in one.values.values())
        path = folder / f"weights-{rank:05d}-{number:03d}.safetensors"
        with explain_disk_full(path):
            save_file(tensors, path, metadata=shapes)
            sync_to_disk(path)
        written()
        number += 1
    return number


def read_pieces(folder: Path, pieces: Sequence[Piece]) -> None:
    """Fill the values of `pieces` from the files of all ranks that wrote.

    Raises:
        ValueError: in one line, when the files do not hold all of the values.
    """
    wanted = {one.name: one for one in pieces}
    missing = sum(held.numel() for one in pieces for held in one.values.values())
    for file in _files(folder):
        with _opened(file) as content:
            for key in content.keys():  # noqa: SIM118  not a dictionary
                kind, start, name = key.split("/", 2)
                if name in wanted and kind in wanted[name].values:
                    mine = wanted[name]
                    missing -= _fill(mine.values[kind], mine.start, content.get_slice(key), int(start))
    if missing:
        raise ValueError(f"{missing} of its values are missing")


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """The whole fp32 master weights of a checkpoint, by the names of the trained module.

    Raises:
        ValueError: as in `read_pieces`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        with _opened(file) as content:
            shapes |= {name: tuple(json.loads(shape)) for name, shape in content.metadata().items()}
    pieces = [Piece(name, shape, 0, {MASTER: torch.empty(shape).view(-1)}) for name, shape in shapes.items()]
    read_pieces(folder, pieces)
    return {one.name: one.values[MASTER].view(one.shape) for one in pieces}


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Return once a file, or the entries of a folder, would survive a power failure of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """The files of weights in a checkpoint; ValueError when there are none."""
    found = sorted(folder.glob("weights-*.safetensors"))
    if not found:
        raise ValueError("it has no weights")
    return found


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; errors of reading become a ValueError of one line."""
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file.name}: {one_line(error)}") from error


def _fill(values: Tensor, start: int, saved: Any, saved_start: int) -> int:
    """Copy the elements that two pieces of a flattened weight share, from a slice of a file.

    Returns:
        The number of these elements.
    """
    (size,) = saved.get_shape()
    first = max(start, saved_start)
    stop = min(start + values.numel(), saved_start + size)
    if first < stop:
        values[first - start : stop - start] = saved[first - saved_start : stop - saved_start]
    return max(0, stop - first)


WRAPPER = "model."  # LanguageModelLoss holds the model under this name


def check_plan(checkpoint: Path, plan_file: Path) -> None:
    """Raise ValueError when a recipe's `plan_file` is not the plan that the checkpoint was trained with."""
    if SharingPlan.load(plan_file) != SharingPlan.load(checkpoint / "plan.json"):
        raise ValueError(
            f"checkpoint {checkpoint} was trained with another plan than model.plan = {plan_file}: leave "
            "model.plan empty to export the checkpoint with its own plan, or set another output_dir"
        )


def trained_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The fp32 weights that were trained, by the model's names; LoRA's frozen base is not among them.

    Raises:
        ValueError: files are missing or damaged.
    """
    try:
        weights = whole_weights(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"checkpoint {checkpoint} cannot be read ({error}): {way_back(checkpoint)}"
        ) from error
    return {name.removeprefix(WRAPPER): weight for name, weight in weights.items()}


def restore_model(checkpoint: Path, state: TrainState, start_model: Any = None) -> PodForCausalLM:
    """The trained model, in fp32.

    Args:
        start_model: a function that loads the start model for a plan; adapters are merged into that model.
            None is enough after full fine-tuning.

    Raises:
        ValueError: weights do not fit the model; or the adapters were trained with another start model,
            layout, windows or RoPE.
    """
    weights = trained_weights(checkpoint)
    if state.lora is None:
        model: Any = PodForCausalLM(PodConfig.from_pretrained(checkpoint)).float()
        if state.tied_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        if (checkpoint / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint)
        expected = set(model.state_dict())
    else:
        plan = SharingPlan.load(checkpoint / "plan.json")
        base = start_model(with_trained_constants(plan, weights)).float()
        refusal = f"the adapters of checkpoint {checkpoint} were trained with {{what}}: use {{needed}}"
        frozen = ((name, one) for name, one in base.named_parameters() if not is_constant(name))
        samples = {name: sample_of(one) for name, one in frozen}
        check_identity(state, start_identity_of(base.config, samples), refusal)
        model = add_lora(base, state.lora)
        expected = {name for name in model.state_dict() if "lora_" in name or is_constant(name)}
    missing = sorted(expected - weights.keys())
    unexpected = sorted(weights.keys() - expected)
    if missing or unexpected:
        raise ValueError(
            f"checkpoint {checkpoint} does not fit its model: missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}"
        )
    model.load_state_dict(weights, strict=False)
    return (model if state.lora is None else model.merge_and_unload()).eval()
