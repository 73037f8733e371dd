"""Modes of `train.shared_qk` and feed-forward tiles under ZeRO-3 and Ulysses against one plain process.

`worker_shared_qk.py OUT`. Weights of tiny models are below the size from which ZeRO-3 takes a weight away
after its use; here it takes all away, so that a recomputation outside the usual order must gather them.
"""

import sys
from pathlib import Path

import tiny
import worker_parallel

STEPS = 3
SETTINGS = {"dtype": "float32", "loss_chunk_mib": 1, "learning_rate": 1e-2, "save_every_steps": 0}


def release_all_weights() -> None:
    """Make ZeRO-3 keep nothing gathered between uses."""
    from pod.training.run import trainer

    original = trainer.deepspeed_config

    def changed(args):
        settings = original(args)
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 1,
        }
        return settings

    trainer.deepspeed_config = changed


def one_step(name, out, settings, data, heads, tied) -> None:
    """Loss and raw gradients of a step against plain PyTorch."""
    release_all_weights()
    worker_parallel.compare(name, out, settings, data, heads, tied)


def losses(out, runs, data) -> None:
    """Losses of some steps for every (name, settings).

    From the second one ZeRO-3 expects the first one's order of modules.
    """
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.trainer import Trainer

    release_all_weights()
    mesh = None
    for name, settings in runs:
        args = TrainArgs(**SETTINGS, max_steps=STEPS, **settings)
        mesh = mesh or Mesh(args.sequence_parallel_size)
        trainer = Trainer(args, tiny.make_model(), PackedDataset(data), mesh, out / f"run_{name}")
        values = [trainer.step()["loss"] for _ in range(STEPS)]
        held = [parameter.ds_status.name for parameter in trainer.engine.module.parameters()]
        decoder = trainer.model.model
        if mesh.rank == 0:
            offloads = bool(trainer.engine.zero_cpu_offload())
            result = {"losses": values, "held": held.count("AVAILABLE"), "offloads": offloads}
            result |= {
                "kind": type(decoder.shared_qk_memory).__name__,
                "tiles": decoder.layers[0].mlp.train_tiles,
            }
            tiny.write_result(out, name, result)
    stop_processes()


def main(out: Path) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = tiny.make_data(out / "data")
    two, four = {"sequence_parallel_size": 2}, {"sequence_parallel_size": 4}
    # 41 tokens: slices of 21 and 20, or of 11 and 10, of which tiles of 10 would be 3 and 2, or 2 and 1
    offload = {**two, "shared_qk": "offload", "mlp_tile_tokens": 10}
    recompute = {**four, "shared_qk": "recompute", "mlp_tile_tokens": 10}
    tiny.run_ranks(2, one_step, "sp2_offload_tiled", out, offload, data, (6, 3), False)
    tiny.run_ranks(4, one_step, "sp4_recompute_tiled", out, recompute, data, (6, 3), True)
    modes = ("keep", "offload", "recompute")
    batches = [
        {"shared_qk": mode, "mlp_tile_tokens": 0 if mode == "keep" else 10, "micro_batch_size": 2}
        for mode in modes
    ]
    runs = [(f"dp2_{batch['shared_qk']}", batch) for batch in batches]
    runs.append(("dp2_host_optimizer", {"offload_optimizer": "cpu", "micro_batch_size": 2}))
    tiny.run_ranks(2, losses, out, runs, data)
    lora = {**two, "method": "lora", "lora_rank": 2}
    pairs = [(f"lora_{mode}", {**lora, "shared_qk": mode}) for mode in ("keep", "recompute")]
    tiny.run_ranks(2, losses, out, pairs, data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
