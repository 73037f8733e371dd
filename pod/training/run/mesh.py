"""Process groups: the number of ranks is data-parallel size x sequence-parallel size.

The ranks of a sequence-parallel group share a row and have consecutive numbers.
"""

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pod.training import deepspeed_bridge as bridge


class Mesh:
    """The position of this rank among all ranks, and the process groups that it communicates in.

    Making a mesh joins the ranks (`join_ranks`), unless they have joined already.

    Args:
        sp_size: ranks that share a row; it must divide the number of ranks (`check_world_size`).
        timeout_s: as in `deepspeed_bridge.join_ranks`.

    Attributes:
        rank: number of this rank, from 0.
        world_size: number of all ranks.
        sp_size: ranks that share a row.
        sp_rank: which slice of the row this rank holds, from 0.
        dp_size: number of sequence-parallel groups, which read different rows.
        dp_rank: number of this rank's group, from 0.
        device: the GPU of this rank, or the CPU.
        sp_group: process group of the ranks that share a row; None when sp_size is 1.
        mpu: tells the engine about `sp_group`; None when sp_size is 1.
        host_group: process group of all ranks for numbers in host memory, so that agreeing on them waits for
            no GPU. None = the default group, which does that on CPUs.
    """

    def __init__(self, sp_size: int, timeout_s: float | None = None):
        if not dist.is_initialized():
            join_ranks(timeout_s)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sp_size, self.dp_size = sp_size, self.world_size // sp_size
        self.dp_rank, self.sp_rank = divmod(self.rank, sp_size)
        self.device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        cuda = self.device.type == "cuda"
        self.host_group: Any = dist.new_group(backend="gloo", timeout=limit) if cuda else None
        self.mpu, self.sp_group = bridge.sequence_groups(sp_size) if sp_size > 1 else (None, None)

    def sum(self, values: list[float]) -> list[float]:
        """The sum over all ranks of each of these values, in fp64. All ranks call it together."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.host_group)
        return tensor.tolist()

    def largest(self, value: int) -> int:
        """The largest of all ranks' values. All ranks call it together."""
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.host_group)
        return int(tensor.tolist()[0])


class SameOnAllRanks(ValueError):
    """An error that every rank raises with the same message, so that the first rank may report it for all."""

    of_all_ranks = True  # tells the command that every rank has this error


def from_rank_0(function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and return its result on all ranks, which call this together.

    Raises:
        SameOnAllRanks: on all ranks, when rank 0 has a ValueError or OSError.
    """
    if not dist.is_initialized():
        return function()
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(function) if dist.get_rank() == 0 else None
        found: list[Any] = [False, None, None]  # whether it is done, its result, its error in words
        # While rank 0 works, all ranks meet in short waits, so that none runs into a time limit.
        while not found[0]:
            if work is not None and work.done():
                error = work.exception()
                if error is None:
                    found = [True, work.result(), None]
                elif isinstance(error, (ValueError, OSError)):
                    found = [True, None, str(error)]
                else:
                    raise error
            dist.broadcast_object_list(found, src=0)
            time.sleep(0 if found[0] else 0.02)
    if found[2] is not None:
        raise SameOnAllRanks(found[2])
    return found[1]


def local_rank() -> int:
    """Position of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Ranks on this machine; 1 without a launcher.

    torchrun and Slurm's script set another variable than the `deepspeed` launcher.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def planned_world_size() -> int:
    """Ranks that the launcher announced; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world_size(world_size: int, sp_size: int) -> None:
    """Raise ValueError when the ranks cannot form groups of `sp_size`; the message names sizes that work."""
    if world_size % sp_size:
        allowed = ", ".join(str(size) for size in range(1, world_size + 1) if not world_size % size)
        raise ValueError(
            f"{world_size} ranks cannot form groups of sequence_parallel_size {sp_size}: use {allowed}, "
            f"or start a multiple of {sp_size} ranks (deepspeed --num_gpus N)"
        )


def name_accelerator() -> None:
    """Tell DeepSpeed to use the CPU when there is no GPU: else it would warn that it found no accelerator.

    Call it before anything imports DeepSpeed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def join_ranks(timeout_s: float | None = None) -> None:
    """Join the ranks that the `deepspeed` launcher or torchrun started; without a launcher, be the only one.

    Args:
        timeout_s: as in `deepspeed_bridge.join_ranks`.

    Raises:
        ValueError: mpirun started the processes, which then do not know their ranks; or the installed
            DeepSpeed lacks a part that is used here (`deepspeed_bridge.check_parts`).
    """
    name_accelerator()
    if "RANK" not in os.environ:
        if (ranks := int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1")) > 1:
            raise ValueError(
                f"mpirun started {ranks} processes without the variable RANK: start them with deepspeed, "
                "torchrun or launch/slurm/"
            )
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    bridge.join_ranks(timeout_s)


def record_collectives(folder: Path) -> None:
    """Let NCCL write its last operations into `folder` when one of them runs into its time limit.

    The files then lie beside those into which the watchdog writes the stacks of a hang. Call it before
    `join_ranks`.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl-rank-"))


def stop_processes() -> None:
    """End the process groups on all ranks together.

    gloo aborts now and then when a rank ends its groups before its peers have finished.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
