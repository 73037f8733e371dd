"""What a run shows of itself: a progress bar, and the numbers of every step.

The numbers go to metrics.jsonl, wandb and TensorBoard. Only rank 0 shows anything.

`mfu` (model FLOPs utilisation) is the share of the devices' peak that training reaches. It counts the
operations that the *model* needs (Chowdhery et al., PaLM, appendix B), not those that a kernel makes. So it
does not count

- the recomputation of checkpointed layers;
- the masked-out half of a causal product;
- the product of queries and keys for the distant tokens of a follower, whose logits are the lead's;
- anything for the distant tokens of a window.

A multiplication and an addition are two operations.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pod.errors import one_line
from pod.files import atomic_write_text
from pod.modeling.model.sharing import Lead
from pod.training.args import TrainArgs
from pod.training.predict.shapes import Shapes, causal_pairs, proximal_pairs
from pod.training.predict.step_time import known_device, model_flops, teacher_flops
from pod.verbosity import is_quiet

Values = dict[str, Any]
"""Numbers and lists by name. Lists are written to metrics.jsonl only; other trackers get the numbers."""


TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""Values of train.tracker → the package that each of them needs."""


def check_tracker(name: str) -> None:
    """Raise ValueError when the package that a tracker needs is not installed."""
    package = TRACKERS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"train.tracker={name} needs the package {package}: pip install {package}, or set tracker=none"
        )


class JsonLines:
    """The tracker of metrics.jsonl: one JSON object per line.

    A resumed run first drops the lines of steps that it will repeat, and a last line that a killed run left
    half-written. A run from step 0 keeps the file of an earlier run as metrics-1.jsonl, metrics-2.jsonl and
    so on.

    Args:
        path: of metrics.jsonl.
        first_step: number of steps that are already done.
    """

    def __init__(self, path: Path, first_step: int):
        self.path = path
        if first_step == 0 and path.is_file() and path.stat().st_size:
            names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
            path.rename(next(name for name in names if not name.exists()))
        self._open(first_step or -1)  # a run from the beginning measures step 0 again

    def _open(self, last_step: int) -> None:
        """Drop the lines after `last_step`, and open the file for appending."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
        atomic_write_text(self.path, "".join(kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, values: Values) -> None:
        """Append the line of one step."""
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)

    def rewind(self, step: int) -> None:
        """Drop the lines of the steps after `step`: these steps come again."""
        self.close()
        self._open(step)

    def close(self) -> None:
        self.file.close()


class Wandb:
    """Weights & Biases: online, offline or disabled, as the recipe or WANDB_MODE says.

    A resumed run goes on in the same wandb run. A run from step 0 begins a new one. The axis of charts is the
    logged value `step`, because wandb's own step count cannot go back.

    Raises:
        ValueError: in one line, when wandb cannot start.
    """

    def __init__(self, folder: Path, args: TrainArgs, config: dict[str, Any], first_step: int = 0):
        import wandb

        where: dict[str, Any] = {
            "project": args.wandb_project or os.environ.get("WANDB_PROJECT") or "pod-kv",
            "entity": args.wandb_entity,
            "name": args.wandb_run_name,
            "mode": args.wandb_mode,
            "dir": str(folder),
        }
        run_id = wandb_run_id(folder / "wandb-run", first_step)
        try:
            self.run = wandb.init(id=run_id, resume="allow", config=config, **where)
        except wandb.Error as error:
            raise ValueError(
                f"train.tracker=wandb: wandb cannot start ({one_line(error)}): run `wandb login`, or set "
                "train.wandb_mode=offline"
            ) from error
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        """Send the numbers of one step."""
        numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
        self.run.log({"step": step, **numbers})

    def rewind(self, step: int) -> None:
        """Do nothing: a chart shows repeated steps at their own position on the axis."""

    def close(self) -> None:
        self.run.finish()


def wandb_run_id(file: Path, first_step: int) -> str:
    """The id of the wandb run that a training goes on in: the last line of `file`.

    A training from step 0 appends a new id to the file, and so does one whose file is missing or empty. The
    curves of an earlier training stay as they are.
    """
    ids = file.read_text(encoding="utf-8").split() if file.is_file() else []
    if not ids or first_step == 0:
        ids.append(uuid.uuid4().hex[:8])
        atomic_write_text(file, "\n".join(ids) + "\n")
    return ids[-1]


class TensorBoard:
    """Event files in <output_dir>/train/tensorboard, for `tensorboard --logdir`.

    Steps that a resumed run repeats replace the earlier ones.
    """

    def __init__(self, folder: Path, first_step: int):
        self.folder = folder / "tensorboard"
        self._open(first_step)

    def _open(self, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = last_step + 1 if last_step else 0  # a run from the beginning measures step 0 again
        self.writer = SummaryWriter(str(self.folder), purge_step=first)

    def log(self, step: int, values: Values) -> None:
        """Write the numbers of one step."""
        for name, value in values.items():
            if not isinstance(value, list):
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def rewind(self, step: int) -> None:
        """Hide the steps after `step`: these steps come again."""
        self.close()
        self._open(step)

    def close(self) -> None:
        self.writer.close()


class Monitor:
    """Progress bar and trackers of one run, and the time of its parts.

    Args:
        folder: <output_dir>/train.
        first_step: number of steps that are already done (in a resumed run).
        tokens_per_step: tokens of all ranks in one optimizer step, padding included.
        config: the resolved recipe, for wandb.
        enabled: True on rank 0 only; on the other ranks all calls do nothing.
        peak: tokens per second that the devices could train at their peak, for `mfu`; None = not known.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainArgs,
        first_step: int,
        tokens_per_step: int,
        config: dict[str, Any],
        enabled: bool,
        peak: float | None = None,
    ):
        self.args, self.tokens_per_step, self.enabled, self.peak = args, tokens_per_step, enabled, peak
        self.last_step, self.last_time, self.waited_s = first_step, time.perf_counter(), 0.0
        self.parts: dict[str, float] = {}  # seconds
        redraw = 1.0 if sys.stderr.isatty() else 30.0  # seconds; in a log file, each drawing is one more line
        steps: dict[str, Any] = {"total": args.max_steps, "initial": first_step}
        is_silent = not enabled or is_quiet()
        self.bar = tqdm(desc="train", unit="step", mininterval=redraw, disable=is_silent, **steps)
        self.trackers: list[JsonLines | Wandb | TensorBoard] = []
        if enabled:
            self.trackers.append(JsonLines(folder / "metrics.jsonl", first_step))
        if enabled and args.tracker == "wandb":
            self.trackers.append(Wandb(folder, args, config, first_step))
        if enabled and args.tracker == "tensorboard":
            self.trackers.append(TensorBoard(folder, first_step))

    def logs(self, step: int) -> bool:
        """Whether step `step` (counted from 1) gets a record; the same on all ranks."""
        return step % self.args.log_every_steps == 0 or step == self.args.max_steps

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Use it around saving and evaluating, so that their seconds count in no rate.

        Args:
            name: `save` or `evaluate`. The seconds become the field `save_s` or `evaluate_s`.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def step(self, step: int, values: Values) -> None:
        """Record optimizer step `step` (counted from 1).

        These numbers are added to `values`, over the steps since the last record:

        - `tokens_per_second` of all ranks, and `mfu`, both without the time of saving and evaluating;
        - `save_s` and `evaluate_s`, in seconds altogether;
        - `data_wait_s` and `compute_s`, in seconds per step.
        """
        if not self.enabled:
            return
        self.waited_s += values.get("data_wait_s", 0.0)
        if self.logs(step):
            self._record(step, values)
        self.bar.update(1)

    def _record(self, step: int, values: Values) -> None:
        steps, waited = step - self.last_step, self.waited_s
        seconds = max(time.perf_counter() - self.last_time - sum(self.parts.values()), 1e-9)
        rate = self.tokens_per_step * steps / seconds
        record = {**values, "tokens_per_second": rate}
        if "data_wait_s" in values:
            record |= {"data_wait_s": waited / steps, "compute_s": max(seconds - waited, 0.0) / steps}
        record |= {f"{name}_s": part for name, part in self.parts.items()}
        if self.peak:
            record["mfu"] = rate / self.peak
        self._start_record(step)
        self.bar.set_postfix_str(_summary(record, waited / seconds), refresh=False)  # drawn by update
        self.values(step, record)

    def _start_record(self, step: int) -> None:
        """Begin to measure the next record, behind step `step`."""
        self.last_step, self.last_time, self.waited_s = step, time.perf_counter(), 0.0
        self.parts = {}

    def values(self, step: int, values: Values) -> None:
        """Send a record to all trackers as it is, for example the evaluation before the first step.

        An empty record is not sent.
        """
        if not values:
            return
        for tracker in self.trackers:
            tracker.log(step, values)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`: these steps come again."""
        self._start_record(step)
        if self.enabled:
            self.bar.n = self.bar.last_print_n = step
            self.bar.refresh()
        for tracker in self.trackers:
            tracker.rewind(step)

    def note(self, text: str) -> None:
        """Write one line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def close(self) -> None:
        """End bar and trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()


def _summary(record: Values, waiting: float) -> str:
    """The text that the progress bar shows beside the steps and the time that is left.

    Args:
        waiting: share of the time that was spent waiting for data.
    """
    text = f"loss {record.get('loss', float('nan')):.4f}, {record['tokens_per_second']:,.0f} tokens/s"
    if "mfu" in record:
        text += f", MFU {record['mfu']:.1%}"
    if "eval_loss" in record:
        text += f", held-out loss {record['eval_loss']:.4f}"
    return text if waiting <= 0.01 else f"{text}, {waiting:.0%} of the time waiting for data"


def peak_bytes(device: torch.device) -> int:
    """Most bytes that PyTorch had allocated on a GPU; without a GPU, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def attention_flops(config: Any, lead: Lead, lengths: Sequence[int]) -> float:
    """Operations of all attention products in a forward pass over documents of these lengths (tokens)."""
    every = sum(map(causal_pairs, lengths))
    near = sum(proximal_pairs(n, config.num_sink_tokens, config.num_recent_tokens) for n in lengths)
    pairs = 0
    for layer, row in enumerate(lead):
        for owner in row:
            follows = config.layout == "pod" and owner not in (layer, None)
            for_logits = near if owner is None or follows else every
            for_values = near if owner is None else every
            pairs += for_logits + for_values
    groups = config.num_attention_heads // config.num_key_value_heads
    return 2.0 * config.head_dim * groups * pairs


def training_flops(config: Any, lead: Lead, args: TrainArgs, lengths: Sequence[int]) -> float:
    """Operations that the model needs for one forward and backward over documents of these lengths.

    A teacher's forward counts too.

    Args:
        lengths: tokens of each document.
    """
    shapes, attention = Shapes.from_config(config), attention_flops(config, lead, lengths)
    flops = model_flops(shapes, lead, args, sum(lengths), attention)
    if args.distill:
        of_teacher = attention_flops(config, shapes.dense, lengths)
        flops += teacher_flops(shapes, lead, sum(lengths), of_teacher)
    return flops


def peak_tokens_per_second(config: Any, args: TrainArgs, dataset: Any, mesh: Any) -> float | None:
    """Tokens per second, padding included, that all devices could train at their peak.

    It is a mean over at most 256 rows of the data set. The peak is the recipe's `peak_tflops`, else that of
    the data sheet.

    Returns:
        None when the peak is not known.
    """
    peak = args.peak_tflops
    if not peak and mesh.device.type == "cuda":
        known = known_device(torch.cuda.get_device_name(mesh.device))
        peak = 0.0 if known is None else known.tflops(args.dtype)
    if not peak:
        return None
    rows = range(0, len(dataset), -(-len(dataset) // 256))
    lengths = [len(document) for row in rows for document in dataset.documents(row)]
    flops = training_flops(config, config.sharing_plan.lead, args, lengths)
    return peak * 1e12 * mesh.world_size * len(rows) * dataset.context_length / flops
