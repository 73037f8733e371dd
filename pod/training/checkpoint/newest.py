"""Find the newest complete checkpoint of a training folder, whether or not the file `latest` names it."""

import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pod.errors import one_line
from pod.files import atomic_write_text, read_mapping
from pod.training.checkpoint.run_identity import (
    LATEST_NAME,
    STATE_NAME,
    check_identity,
    read_state,
    way_back,
)

STEP_NAME = re.compile(r"step-\d{8,}")
"""Names of checkpoint folders."""
WEIGHT_FILES = "weight_files"
"""Key in the metadata of a rank's random state: how many files of weights this rank wrote."""


def step_folders(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder` that are not empty, oldest step first; complete or not."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if any(path.iterdir())), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step-"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`; None where there is no checkpoint.

    The file `latest` names it. Where that file is missing, empty or damaged, the folders themselves are
    searched, and one printed line says which checkpoint was found.

    Raises:
        ValueError: `latest` names a checkpoint that is gone, or no folder is complete.
    """
    name, problem = _pointer(folder)
    if name is None:
        return _newest_complete(folder, f"{folder / LATEST_NAME} {problem}")
    checkpoint = folder / name
    if not (checkpoint / STATE_NAME).is_file():
        raise ValueError(
            f"{folder / LATEST_NAME} names {name}, which is not a checkpoint: {way_back(checkpoint)}"
        )
    return checkpoint


def _pointer(folder: Path) -> tuple[str | None, str]:
    """The name that the file `latest` holds, or None and what is wrong with that file."""
    try:
        name = (folder / LATEST_NAME).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None, "is missing"
    except (OSError, UnicodeDecodeError):
        return None, "cannot be read"
    if STEP_NAME.fullmatch(name):
        return name, ""
    return None, "is damaged" if name else "is empty"


def _newest_complete(folder: Path, problem: str) -> Path | None:
    """The newest complete checkpoint; None where there is no checkpoint.

    It prints `problem`, the checkpoint that was found, and the incomplete ones that were passed over.

    Args:
        problem: what is wrong with the file `latest`, so that the folders are searched.

    Raises:
        ValueError: there are checkpoints, but none is complete.
    """
    passed: list[str] = []
    for checkpoint in reversed(step_folders(folder)):
        reason = why_incomplete(checkpoint)
        if reason is None:
            more = f"; incomplete: {', '.join(passed)}" if passed else ""
            print(f"note: {problem}; the newest complete checkpoint is {checkpoint.name}{more}", flush=True)
            return checkpoint
        passed.append(f"{checkpoint.name} ({reason})")
    if passed:
        raise ValueError(
            f"{problem}, and no checkpoint in {folder} is complete: {', '.join(passed)}. Nothing was "
            f"removed; copy the missing files again, move {folder} away, or set another output_dir"
        )
    return None


def why_incomplete(checkpoint: Path) -> str | None:
    """What a checkpoint lacks, in a few words; None for a complete one.

    It reads JSON and the headers of weight files, but no weights.
    """
    state = read_mapping(checkpoint / STATE_NAME)
    if state is None:
        return f"{STATE_NAME} is missing or damaged"
    for name in ("config.json", "plan.json"):
        if read_mapping(checkpoint / name) is None:
            return f"{name} is missing or damaged"
    try:
        for rank in range(int(state.get("world_size", 1))):
            _check_files_of_rank(checkpoint, rank)
        _check_all_weights(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename or error.args[0]).name} is missing"
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        return one_line(error)
    return None


def _check_files_of_rank(checkpoint: Path, rank: int) -> None:
    """Raise FileNotFoundError when a file that a rank wrote is not there.

    Older checkpoints do not say how many files of weights a rank wrote. There, only the rank's first file is
    looked for.
    """
    random = checkpoint / f"random-{rank:05d}.safetensors"
    if not random.is_file():
        raise FileNotFoundError(random.name)
    with _open_unless_damaged(random) as content:
        count = int((content.metadata() or {}).get(WEIGHT_FILES, 1))
    for number in range(count):
        name = f"weights-{rank:05d}-{number:03d}.safetensors"
        if not (checkpoint / name).is_file():
            raise FileNotFoundError(name)


def _check_all_weights(checkpoint: Path) -> None:
    """Raise ValueError when the pieces in all ranks' files do not add up to whole weights and moments."""
    sizes: dict[str, int] = {}
    held: Counter[tuple[str, str]] = Counter()
    for file in sorted(checkpoint.glob("weights-*.safetensors")):
        with _open_unless_damaged(file) as content:
            sizes |= {name: prod(json.loads(shape)) for name, shape in (content.metadata() or {}).items()}
            for key in content.keys():  # noqa: SIM118  not a dictionary
                kind, _, name = key.split("/", 2)
                held[kind, name] += prod(content.get_slice(key).get_shape())
    missing = sum(sizes.get(name, 0) - count for (_, name), count in held.items())
    if missing or not held:
        raise ValueError(f"{missing or 'all'} of its values are missing")


def _open_unless_damaged(file: Path) -> Any:
    """A safetensors file, opened; ValueError in one line when it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged ({one_line(error)})") from error


def checkpoint_to_resume(folder: Path, resume: str, identity: dict[str, Any]) -> Path | None:
    """The checkpoint that a run continues from; None when the run begins at step 0.

    A missing or damaged file `latest` is written again.

    Raises:
        ValueError: the newest checkpoint belongs to another run; or there is one, and `resume` is `never`;
            or as in `latest_checkpoint`.
    """
    if resume == "never" and step_folders(folder):
        raise ValueError(
            f"{folder} already has checkpoints: set train.resume=auto to continue, or another output_dir"
        )
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return None
    refusal = f"checkpoint {checkpoint} belongs to {{what}}: use {{needed}}, or set another output_dir"
    check_identity(read_state(checkpoint), identity, refusal)
    if _pointer(folder)[0] != checkpoint.name:
        atomic_write_text(folder / LATEST_NAME, checkpoint.name + "\n")
    return checkpoint


def checkpoint_to_export(train_folder: Path, checkpoint: str | None) -> Path:
    """The checkpoint folder that is named, else the newest complete one.

    Args:
        train_folder: <output_dir>/train.
        checkpoint: `export.checkpoint`.

    Raises:
        ValueError: there is no checkpoint.
    """
    found = Path(checkpoint) if checkpoint is not None else latest_checkpoint(train_folder)
    if found is None:
        raise ValueError(f"{train_folder} has no checkpoint: run `pod train` first, or set export.checkpoint")
    return found
