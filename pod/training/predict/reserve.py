"""GPU memory that a training takes beside PyTorch's tensors: fixed figures, which nothing here measures.

Their sources:

* The CUDA context and the code of loaded kernels. A bare context takes 426 MiB (PyTorch 2.10, CUDA 13.0,
  RTX 6000 Ada: unslothai/unsloth-zoo#1053). PyTorch loads kernels when they are first used, and compiled
  kernels come on top.
* Buffers of NCCL, for every communicator that is used: 4 MiB for each channel and connection, and less for
  short messages. 1.6 GB were measured for one communicator, and 6 GB for more than three (NVIDIA/nccl#864).
* Workspaces of cuBLAS and cuBLASLt, one for each stream that multiplies: 32 MiB on Hopper
  (PyTorch, `CublasHandlePool.cpp`). DeepSpeed computes on more than one stream.
"""

from pod.training.args import TrainArgs
from pod.training.predict.memory_estimate import Parts, World
from pod.units import GIB

# bytes of a rank for the three parts above; COMMUNICATOR counts for each communicator
CONTEXT = round(1.0 * GIB)
COMMUNICATOR = round(1.5 * GIB)
WORKSPACES = round(0.25 * GIB)


def communicators(args: TrainArgs, world: World) -> int:
    """Number of groups of at least two ranks whose members communicate by NCCL.

    These groups are all ranks, and DeepSpeed's copy of that group. With sequence parallelism, there are also
    the ranks that share a row, and the ranks that hold the same part of different rows.
    """
    size = args.sequence_parallel_size
    count = 0
    if world.size > 1:
        count += 2
    if size > 1:
        count += 1
    if 1 < size < world.size:
        count += 1
    return count


def reserve(args: TrainArgs, world: World, has_gpu: bool) -> Parts:
    """Bytes that one rank takes on its GPU beside PyTorch's tensors, by part; without a GPU there are none.

    Where `train.memory_reserve_gib` is set, that is the only part.
    """
    if not has_gpu:
        return {}
    if args.memory_reserve_gib is not None:
        return {"memory_reserve_gib": round(args.memory_reserve_gib * GIB)}
    count = communicators(args, world)
    name = f"{count} communicators"
    return {"context": CONTEXT, name: count * COMMUNICATOR, "workspaces": WORKSPACES}
