"""Where the numbers of a run go: JSON lines and wandb, through one small interface. Rank 0 only."""

import contextlib
import importlib.util
import json
import uuid
from pathlib import Path
from typing import Any

from pod.files import atomic_write_text
from pod.training.args import TrainArgs

Values = dict[str, Any]
"""Numbers by name, and lists of them, which wandb does not show."""


def check_tracker(name: str) -> None:
    """Raise ValueError when `wandb` is asked for and not installed."""
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "train.tracker=wandb needs the package wandb: pip install wandb, or set tracker=none"
        )


class JsonLines:
    """One JSON object per line; a resumed run first drops the lines of steps it will repeat, and what a killed one left half-written."""

    def __init__(self, path: Path, first_step: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step or -1)  # a run from the beginning measures step 0 again

    def _open(self, last_step: int) -> None:
        """Drop what lies behind `last_step`, and go on at the end."""
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            with contextlib.suppress(json.JSONDecodeError):
                kept += [line + "\n"] if json.loads(line)["step"] <= last_step else []
        atomic_write_text(self.path, "".join(kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, values: Values) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def rewind(self, step: int) -> None:
        """What was told of steps after `step` did not happen: they come again."""
        self.close()
        self._open(step)

    def close(self) -> None:
        self.file.close()


class Wandb:
    """Weights & Biases; offline unless told. A continued run goes on in the same wandb run.

    Every line carries its step as a number, which the charts use as their axis: wandb's own steps cannot go back.
    """

    def __init__(self, folder: Path, args: TrainArgs, config: dict[str, Any]):
        import wandb

        name = folder / "wandb-run"
        folder.mkdir(parents=True, exist_ok=True)
        if not name.is_file():
            atomic_write_text(name, uuid.uuid4().hex[:8] + "\n")
        run_id = name.read_text(encoding="utf-8").strip()
        where: dict[str, Any] = {"project": "pod-kv", "dir": str(folder), "mode": args.wandb_mode}
        self.run = wandb.init(id=run_id, resume="allow", config=config, **where)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
        self.run.log({"step": step, **numbers})

    def rewind(self, step: int) -> None:
        """Nothing to take back: repeated steps are drawn at the same places."""

    def close(self) -> None:
        self.run.finish()
