"""Where the numbers and texts of a run go: JSON lines, wandb, tensorboard, through one small interface. Rank 0 only."""

import html
import importlib.util
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pod.files import atomic_write_text
from pod.training.args import TrainArgs

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}


class Tracker(Protocol):
    """Anything that takes one dictionary of numbers per step, and now and then a text."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def rewind(self, step: int) -> None:
        """What was told of steps after `step` did not happen: they come again."""
        ...

    def close(self) -> None: ...


def check_tracker(name: str) -> None:
    """Raise ValueError, naming the package, when the tracker `name` is not installed."""
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"train.tracker={name} needs the package {package}: pip install {package}, or set tracker=none"
        )


def make_trackers(folder: Path, args: TrainArgs, first_step: int, config: dict[str, Any]) -> list[Tracker]:
    """metrics.jsonl, and what `train.tracker` asks for; `first_step` = steps already done (a resumed run)."""
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl", first_step)]
    if args.tracker == "wandb":
        trackers.append(Wandb(folder, args, config))
    if args.tracker == "tensorboard":
        trackers.append(Tensorboard(folder, first_step))
    return trackers


class JsonLines:
    """One JSON object per line; a resumed run first drops the lines of steps it will repeat."""

    def __init__(self, path: Path, first_step: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step or -1)  # a run from the beginning measures step 0 again

    def _open(self, last_step: int) -> None:
        """Drop what lies behind `last_step`, and go on at the end."""
        kept = _lines_until(self.path, last_step)
        atomic_write_text(self.path, "".join(f"{line}\n" for line in kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Nothing: texts have files of their own (samples.jsonl)."""

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        self.file.close()


def append_records(path: Path, step: int, records: Sequence[dict[str, Any]]) -> None:
    """Add lines of one step to a JSON-lines file; older lines of this and of later steps, and torn ones, go.

    So a file needs no state in a checkpoint: a run that was killed or went back writes its steps again.
    """
    lines = _lines_until(path, step - 1)
    lines += [json.dumps({"step": step, **record}) for record in records]
    atomic_write_text(path, "".join(f"{line}\n" for line in lines))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file in their order, torn ones left out; empty without a file."""
    return [json.loads(line) for line in _lines_until(path, float("inf"))]


def _lines_until(path: Path, last_step: float) -> list[str]:
    """The whole lines of steps up to `last_step`."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if (step := _step_of(line)) is not None and step <= last_step]


def _step_of(line: str) -> float | None:
    """The step of a line; None for one that a killed run left half-written."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


class Wandb:
    """Weights & Biases; offline unless told. A continued run goes on in the same wandb run.

    Every line carries its step as a number, which the charts use as their axis: wandb's own steps cannot go back.
    """

    def __init__(self, folder: Path, args: TrainArgs, config: dict[str, Any]):
        import wandb

        self.wandb = wandb
        name = folder / "wandb-run"
        folder.mkdir(parents=True, exist_ok=True)
        if not name.is_file():
            atomic_write_text(name, uuid.uuid4().hex[:8] + "\n")
        self.run = wandb.init(
            project="pod-kv",
            dir=str(folder),
            id=name.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=args.wandb_mode,
            config=config,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        self.run.log({"step": step, name: self.wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def rewind(self, step: int) -> None:
        """Nothing to take back: repeated steps are drawn at the same places."""

    def close(self) -> None:
        self.run.finish()


class Tensorboard:
    """TensorBoard event files; what lies behind the step at which a run continues is hidden."""

    def __init__(self, folder: Path, first_step: int = 0):
        self.folder = folder / "tensorboard"
        self._open(first_step)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(self.folder), purge_step=step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, f"```\n{text}\n```", step)

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        self.writer.close()
