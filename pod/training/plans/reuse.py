"""When what lies in a folder serves again: what tells models and texts apart, and what ranks agree on."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pod.files import sha256_file

WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin"}


def reusable(
    path: Path, load: Callable[[Path], Any], wanted: dict[str, Any], say: Callable[[str], None]
) -> Any:
    """What `load` reads at `path` when its provenance has these settings, else None."""
    if not path.exists():
        return None
    found = load(path)
    changed = sorted(key for key, value in wanted.items() if found.provenance.get(key) != value)
    if not changed:
        say(f"explore: {path} is of these settings, nothing is measured again")
        return found
    say(f"explore: {path} differs in {', '.join(changed)}: measuring again, the old file is kept")
    return None


def keep_old(path: Path) -> None:
    """Move a file of other settings out of the way, under a name with its hash."""
    if path.exists():
        os.replace(path, path.with_name(f"{path.stem}-{sha256_file(path)[:8]}{path.suffix}"))


def weights_stamp(model_folder: str) -> str:
    """Tells that weight files were replaced, without reading them: the config's hash and each file's name, size and time.

    Empty for a hub id.
    """
    folder, parts = Path(model_folder), []
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in WEIGHT_SUFFIXES:
            state = file.stat()
            parts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
        elif file.name == "config.json":
            parts.append(sha256_file(file))
    return "; ".join(parts)


def sequence_fingerprint(sequences: Iterable[Tensor]) -> str:
    """Hash of all token ids and of where sequences begin."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(sequence.to(torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first_rank(function: Callable[[], Any]) -> Any:
    """What `function` returns on rank 0, on every rank."""
    box = [function() if is_first_rank() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def quiet(line: str) -> None:
    """What ranks other than 0 say: nothing."""
