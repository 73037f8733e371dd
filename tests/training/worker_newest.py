"""Trainings of one rank in folders whose file `latest` is missing, empty or damaged.

`worker_newest.py OUT`.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import tiny
from worker_runs import make_trainer

SETTINGS = {"dtype": "float32", "learning_rate": 1e-2, "save_every_steps": 2, "keep_last": 3}


def weights_hash(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "weights-00000-000.safetensors").read_bytes()).hexdigest()


def train(folder: Path, data: Path, steps: int, **changes) -> dict:
    """Train until step `steps`; says where it began, and what the folder holds afterwards."""
    trainer = make_trainer(folder, data, {**SETTINGS, "max_steps": steps, **changes})
    began = trainer.state.step
    trainer.train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "began": began,
        "latest": (folder / "latest").read_text().strip(),
        "folders": sorted(path.name for path in folder.iterdir() if path.is_dir()),
        "steps": [line["step"] for line in lines],
    }


def scenarios(out: Path, data: Path) -> None:
    from pod.training.run.mesh import stop_processes

    whole = out / "whole"
    train(whole, data, 4)
    result: dict = {"hash": weights_hash(whole / "step-00000004")}

    def copy_of(name: str) -> Path:
        shutil.copytree(whole, out / name)
        (out / name / "latest").unlink()
        return out / name

    missing = copy_of("missing")
    result["missing"] = train(missing, data, 8)
    result["missing"]["hash"] = weights_hash(missing / "step-00000004")

    empty = copy_of("empty")
    (empty / "latest").touch()
    result["empty"] = train(empty, data, 4)
    result["empty"]["hash"] = weights_hash(empty / "step-00000004")

    cut = copy_of("cut")
    file = cut / "step-00000004" / "weights-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result["cut"] = train(cut, data, 6)
    result["cut"]["kept_bytes"] = sum(
        one.stat().st_size for one in cut.glob("kept-1-step-00000004/weights-*")
    )
    result["cut"]["cut_bytes"] = (whole / "step-00000004" / file.name).stat().st_size - 100

    foreign = copy_of("foreign")
    (foreign / "latest").write_text("step-00000004\n")
    state = foreign / "step-00000002" / "checkpoint.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "run": "another"}))
    result["foreign"] = train(foreign, data, 8, keep_last=1)

    moved = copy_of("moved")
    for folder in moved.glob("step-*"):
        shutil.move(folder, out / f"away-{folder.name}")
    result["moved"] = train(moved, data, 2)
    earlier = (moved / "metrics-1.jsonl").read_text().splitlines()
    result["moved"]["earlier_steps"] = [json.loads(line)["step"] for line in earlier]

    nothing = copy_of("nothing")
    for folder in nothing.glob("step-*"):
        (folder / "checkpoint.json").write_text("{")
    try:
        train(nothing, data, 4)
    except ValueError as error:
        result["nothing"] = {"error": str(error)}
    result["nothing"]["folders"] = sorted(path.name for path in nothing.iterdir() if path.is_dir())
    tiny.write_result(out, "newest", result)
    stop_processes()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    tiny.run_ranks(1, scenarios, out, tiny.make_data(out / "data"))
