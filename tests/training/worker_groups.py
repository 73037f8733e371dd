"""Time limits of the process groups of a run on two ranks: two rows, then one. `worker_groups.py OUT`."""

import sys
from pathlib import Path

import tiny
import torch

LIMIT_S = 1234.0
SETTINGS = {"max_steps": 1, "loss_chunk_mib": 1, "save_every_steps": 0}


def one_step(out: Path) -> None:
    import torch.distributed as dist

    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh, join_ranks, stop_processes
    from pod.training.run.trainer import Trainer

    asked, new_group = [], dist.new_group

    def recording(*arguments, **options):
        asked.append(options.get("timeout"))
        return new_group(*arguments, **options)

    dist.new_group = recording
    join_ranks(LIMIT_S)
    for size in (1, 2):
        mesh = Mesh(size, LIMIT_S)
        args = TrainArgs(sequence_parallel_size=size, **SETTINGS)
        trainer = Trainer(args, tiny.make_model(), PackedDataset(out / "data"), mesh, out / f"run{size}")
        trainer.train()
    cpu, groups = torch.device("cpu"), dist.distributed_c10d._world.pg_map
    result = {
        "asked": [limit and limit.total_seconds() for limit in asked],
        "held": [group._get_backend(cpu).options._timeout.total_seconds() for group in groups],
    }
    tiny.write_result(out, f"rank{dist.get_rank()}", result)
    stop_processes()


def main(out: Path) -> None:
    tiny.make_data(out / "data")
    tiny.run_ranks(2, one_step, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
