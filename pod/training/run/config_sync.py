"""Ranks must train the same thing: before weights load, they compare recipe, packages, data and layout."""

import importlib.metadata
import os
import platform
import socket
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pod.training.args import TrainRecipe
from pod.training.checkpoint.run_identity import sha256_of
from pod.training.predict import layout_search
from pod.training.predict.layout_search import Machine, ParallelLayout
from pod.training.run.mesh import SameOnAllRanks, local_world_size

VERSIONED = ("torch", "deepspeed", "transformers", "peft", "pod-kv")
"""Packages of which all ranks must have the same version."""
_SHARED = "output_dir"


def note_neighbours() -> None:
    """Print a note, on rank 0, when more ranks share a machine than their launcher says.

    Each of these ranks plans with too much of the machine's memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    place = socket.gethostname(), boot.read_text(encoding="utf-8") if boot.is_file() else ""
    everyone = _gather((place, local_world_size()))
    ranks_at = Counter(where for where, _ in everyone)
    for rank, (where, said) in enumerate(everyone if dist.get_rank() == 0 else ()):
        if (there := ranks_at[where]) > said:
            print(
                f"note: {there} ranks run on the machine of rank {rank}, but its launcher set "
                f"LOCAL_WORLD_SIZE={said}: each of them plans with 1/{said} of the host memory",
                flush=True,
            )
            return


def agree_on_layout(layout: ParallelLayout, recipe: TrainRecipe) -> ParallelLayout:
    """The layout that all ranks use.

    Where machines differ, the layout is planned anew, for a machine like that of rank 0 but with the smallest
    memory of all machines.

    Args:
        layout: the layout that was planned for this rank's machine.
        recipe: section `train` of the recipe.

    Raises:
        ValueError: no layout fits.
    """
    machine = least_machine(_gather(layout.machine))
    if machine == layout.machine:
        return layout
    job = layout.job
    layout = layout_search.choose_layout(recipe, job.shapes, job.lead, job.context_length, machine)
    try:
        layout_search.check_fits(layout)
    except ValueError as error:
        raise SameOnAllRanks(str(error)) from None
    return layout


def least_machine(machines: list[Machine]) -> Machine:
    """The first machine with its device memory and its host memory each replaced by the smallest of all."""
    device = replace(machines[0].device, memory_gib=min(one.device.memory_gib for one in machines))
    return replace(machines[0], device=device, host_gib=min(one.host_gib for one in machines))


def agree(config: dict[str, Any], folder: Path | str, facts: dict[str, str]) -> None:
    """Refuse ranks that would not train the same thing.

    Args:
        config: the resolved recipe; it is compared section by section.
        folder: <output_dir>/train. All ranks must see a file that rank 0 writes there.
        facts: further values that must be equal on all ranks, by name.

    Raises:
        ValueError: the same line on each rank. It says which ranks differ from rank 0, and in what.
    """
    seen = "seen" if _sees_rank_zero(Path(folder)) else "not seen"
    recipe = {f"the recipe's {name}": sha256_of(value) for name, value in config.items()}
    everyone = _gather({**versions(), **recipe, **facts, _SHARED: seen})
    for name, ours in everyone[0].items():
        values = [one.get(name, "nothing") for one in everyone]
        others = [rank for rank, value in enumerate(values) if value != ours]
        if others and name == _SHARED:
            raise SameOnAllRanks(
                f"{_ranks(others)} cannot see files of rank 0 in {folder}: put output_dir on a file system "
                "that all machines share"
            )
        if others:
            theirs = values[others[0]]
            detail = f" ({ours} on rank 0, {theirs} on rank {others[0]})" if len(theirs) < 40 else ""
            raise SameOnAllRanks(
                f"{_ranks(others)} and rank 0 disagree on {name}{detail}: use the same recipe, packages and "
                "files on all machines"
            )


def versions() -> dict[str, str]:
    """Versions that all ranks must share, by package."""
    found = {f"the version of {package}": importlib.metadata.version(package) for package in VERSIONED}
    return {"the version of Python": platform.python_version(), **found}


def _sees_rank_zero(folder: Path) -> bool:
    """Whether this rank sees a file that rank 0 has just written into `folder`."""
    name = _gather(f".seen-{uuid.uuid4().hex}")[0]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    dist.barrier()
    seen = folder.is_dir() and name in os.listdir(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / name).unlink(missing_ok=True)
    return seen


def _gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _ranks(ranks: list[int]) -> str:
    """Up to eight ranks as text: `rank 3`, `ranks 1, 2`."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
