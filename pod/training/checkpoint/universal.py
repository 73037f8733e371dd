"""Checkpoints of one layout for another: DeepSpeed's universal format, made in a child process and loaded into any engine.

`universal-00000100/zero/<weight>/{fp32,exp_avg,exp_avg_sq,step}.pt` holds every trained weight and its two moments whole,
so that any number of ranks, sequence-parallel size and ZeRO stage can take its part. It lies beside `step-00000100/` and
is removed as soon as a checkpoint of the new layout is published.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pod.files import atomic_dir
from pod.training import deepspeed_bridge as bridge

PREFIX = "universal-"
WORKERS = 4
_POLL_SECONDS = 0.2


def universal_folder(checkpoint: Path) -> Path:
    """Where the universal copy of a checkpoint folder lies."""
    return checkpoint.with_name(checkpoint.name.replace("step-", PREFIX))


def remove_universal(folder: Path, keep: Path | None = None) -> None:
    """Remove universal copies under `folder`, finished or given up, but for that of the checkpoint `keep`."""
    kept = None if keep is None else universal_folder(keep)
    for path in (*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*")):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)


def convert_on_rank_0(checkpoint: Path, mesh: Any, alive: Callable[[str], None]) -> Path:
    """The universal copy of `checkpoint`, made by a child process of rank 0 unless it exists; called by all ranks.

    All ranks meet in a short collective again and again, so that no waiting rank runs into a time limit.

    Raises:
        ValueError: the copy cannot be made; the same line on all ranks.
    """
    target = universal_folder(checkpoint)
    child = None
    if mesh.rank == 0 and not target.is_dir():
        problem = _space_problem(checkpoint)
        child = _Conversion(checkpoint, target) if problem is None else None
    else:
        problem = None
    while True:
        running = child is not None and child.running()
        news: list[Any] = [running, problem or (child.problem() if child and not running else None)]
        dist.broadcast_object_list(news, src=0)
        alive("load")
        if news[1] is not None:
            raise ValueError(news[1])
        if not news[0]:
            return target
        time.sleep(_POLL_SECONDS)


def _space_problem(checkpoint: Path) -> str | None:
    """Fragments and merged weights lie side by side for a moment: twice the optimizer files."""
    needed = 2 * sum(file.stat().st_size for file in checkpoint.glob("*_optim_states.pt"))
    free = shutil.disk_usage(checkpoint.parent).free
    if free >= needed:
        return None
    return (
        f"disk full: {checkpoint} was written by another layout of ranks, and converting it needs {needed // 10**6 + 1} MB, "
        f"{free // 10**6} MB are free: free space there, or start the ranks and zero_stage that wrote it"
    )


class _Conversion:
    """The child process. It runs without a GPU and ends when its parent does."""

    def __init__(self, checkpoint: Path, target: Path):
        self.checkpoint = checkpoint
        import pod

        root = str(Path(pod.__file__).parents[1])
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        command = [
            sys.executable,
            "-m",
            "pod.training.checkpoint.universal",
            str(checkpoint),
            str(target),
            str(os.getpid()),
        ]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  read after the child has ended
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors
        )

    def running(self) -> bool:
        return self.process.poll() is None

    def problem(self) -> str | None:
        """Why it failed, None when it did not."""
        if self.process.returncode == 0:
            return None
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        reason = (
            lines[-1].split(". ")[0]
            if lines and self.process.returncode > 0
            else "killed, is the host memory full?"
        )
        return (
            f"checkpoint {self.checkpoint} was written by another layout of ranks and cannot be converted ({reason}): start "
            "the ranks and zero_stage that wrote it, or remove it to resume from an older one"
        )


def convert(checkpoint: Path, target: Path) -> None:
    """Write the universal copy of one of our checkpoints; `target` appears when it is complete."""
    source = checkpoint.resolve()
    with atomic_dir(target.resolve(), replace=False) as folder:
        workers = min(WORKERS, len(list(source.glob("*_optim_states.pt"))))
        bridge.convert_to_universal(source, folder, workers)


def _end_with(parent: int) -> None:
    """End this process when its parent has: nobody waits for the copy any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
