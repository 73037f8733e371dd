"""What a run shows of itself: metrics.jsonl, a progress bar, and wandb or tensorboard when asked. Rank 0 only."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any, Protocol

from pod.training.args import TrainArgs

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


class Tracker(Protocol):
    """Anything that takes one dictionary of numbers per step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def check_tracker(name: str) -> None:
    """Raise ValueError, naming the package, when the tracker `name` is not installed."""
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"train.tracker={name} needs the package {package}: pip install {package}, or set tracker=none"
        )


class JsonLines:
    """One JSON object per line; a resumed run first drops the lines of steps it will repeat."""

    def __init__(self, path: Path, first_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.is_file():
            kept = [
                line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= first_step
            ]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    """The step of a line; infinity (dropped) for one that a killed run left half-written."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


class Wandb:
    """Weights & Biases; offline unless told."""

    def __init__(self, folder: Path, args: TrainArgs, config: dict[str, Any]):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(project="pod-kv", dir=str(folder), mode=args.wandb_mode, config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Tensorboard:
    """TensorBoard event files."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Monitor:
    """Progress bar, JSON lines and tracker of one run.

    Args:
        folder: <output_dir>/train.
        first_step: steps already done (a resumed run).
        tokens_per_step: tokens of all ranks in one optimizer step, padding included.
        enabled: False on every rank but 0: all calls do nothing.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainArgs,
        first_step: int,
        tokens_per_step: int,
        config: dict[str, Any],
        enabled: bool,
    ):
        self.args, self.tokens_per_step, self.enabled = args, tokens_per_step, enabled
        self.started, self.last_time, self.last_step = time.perf_counter(), time.perf_counter(), first_step
        self.waited_s = 0.0
        self.trackers: list[Tracker] = []
        if not enabled:
            return
        from tqdm import tqdm

        self.trackers.append(JsonLines(folder / "metrics.jsonl", first_step))
        if args.tracker == "wandb":
            self.trackers.append(Wandb(folder, args, config))
        if args.tracker == "tensorboard":
            self.trackers.append(Tensorboard(folder))
        self.bar = tqdm(total=args.max_steps, initial=first_step, desc="train", unit="step", mininterval=1.0)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Record optimizer step `step` (counted from 1).

        Adds tokens_per_second over all ranks; this and data_wait_s (seconds per step) are means since the last record.
        """
        if not self.enabled:
            return
        self.bar.update(1)
        self.waited_s += values.get("data_wait_s", 0.0)
        if step % self.args.log_every_steps and step != self.args.max_steps:
            return
        now = time.perf_counter()
        steps, seconds = step - self.last_step, max(now - self.last_time, 1e-9)
        rate, waited = self.tokens_per_step * steps / seconds, self.waited_s
        self.last_time, self.last_step, self.waited_s = now, step, 0.0
        record = {**values, "tokens_per_second": rate}
        if "data_wait_s" in values:
            record["data_wait_s"] = waited / steps
        text = f"loss {values.get('loss', float('nan')):.4f}, {rate:,.0f} tokens/s"
        if waited > 0.01 * seconds:
            text += f", {waited / seconds:.0%} of it waiting for data"
        self.bar.set_postfix_str(text)
        for tracker in self.trackers:
            tracker.log(step, record)

    def note(self, text: str) -> None:
        """One line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def close(self) -> None:
        if not self.enabled:
            return
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
