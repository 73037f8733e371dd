"""Where the numbers of a run go: JSON lines and wandb, through one small interface. Rank 0 only."""

import importlib.util
import json
import uuid
from pathlib import Path
from typing import Any

from pod.files import atomic_write_text
from pod.training.args import TrainArgs


def check_tracker(name: str) -> None:
    """Raise ValueError when `wandb` is asked for and not installed."""
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "train.tracker=wandb needs the package wandb: pip install wandb, or set tracker=none"
        )


class JsonLines:
    """One JSON object per line; a resumed run first drops the lines of steps it will repeat."""

    def __init__(self, path: Path, first_step: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step or -1)  # a run from the beginning measures step 0 again

    def _open(self, last_step: int) -> None:
        """Drop what lies behind `last_step`, and go on at the end."""
        _write_lines(self.path, _records_until(self.path, last_step))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def rewind(self, step: int) -> None:
        """What was told of steps after `step` did not happen: they come again."""
        self.close()
        self._open(step)

    def close(self) -> None:
        self.file.close()


def append_record(path: Path, step: int, record: dict[str, Any]) -> None:
    """Add the line of a step to a JSON-lines file; older lines of this and of later steps, and torn ones, go.

    So a file needs no state in a checkpoint: a run that was killed or went back writes its steps again.
    """
    _write_lines(path, [*_records_until(path, step - 1), {"step": step, **record}])


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def _records_until(path: Path, last_step: float) -> list[dict[str, Any]]:
    """The lines of steps up to `last_step`; what a killed run left half-written is none."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records += [record] if record["step"] <= last_step else []
    return records


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

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """Nothing to take back: repeated steps are drawn at the same places."""

    def close(self) -> None:
        self.run.finish()
