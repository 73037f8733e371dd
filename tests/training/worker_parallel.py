"""Loss and raw gradients of one optimizer step on many rank layouts against one plain process. `worker_parallel.py OUT`."""

import sys
from pathlib import Path

import tiny
import torch


def reference(model, dataset, rows: int) -> tuple[float, dict]:
    """Loss and gradients of plain PyTorch: no ZeRO, no exchange, no checkpointing, whole logits."""
    batch = dataset.rows(dataset.cursor(0).peek(rows))
    hidden = model.model(input_ids=batch["input_ids"], doc_ids=batch["doc_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    summed = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    loss = summed / (batch["labels"] != -100).sum()
    loss.backward()
    return float(loss.detach()), {name: p.grad.double() for name, p in model.named_parameters()}


def one_step(args, model, dataset, folder):
    """One Trainer step; returns loss, raw gradients before clipping by the model's names, and the trainer."""
    from deepspeed.utils import safe_get_full_grad

    from pod.training.mesh import start_processes
    from pod.training.trainer import Trainer

    trainer = Trainer(args, model, dataset, start_processes(args.sequence_parallel_size), folder)
    engine, update, gradients = trainer.engine, trainer.engine.step, {}

    def record_then_update():
        if engine.is_gradient_accumulation_boundary():
            for name, parameter in engine.module.model.named_parameters():
                gradients[name] = safe_get_full_grad(parameter).double()
        update()

    engine.step = record_then_update
    return trainer.step()["loss"], gradients, trainer


def compare(name, out, settings, data, heads, tied, plan=True) -> None:
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.mesh import stop_processes

    dataset = PackedDataset(data)
    args = TrainArgs(dtype="float32", loss_chunk_mib=1, max_grad_norm=1e-3, learning_rate=1e-3, **settings)
    loss, gradients, trainer = one_step(
        args, tiny.make_model(heads=heads, tied=tied, plan=plan), dataset, out / name
    )
    expected_loss, expected = reference(
        tiny.make_model(heads=heads, tied=tied, plan=plan), dataset, trainer.rows_per_step
    )
    errors = {k: float((gradients[k] - g).norm() / g.norm()) for k, g in expected.items()}
    result = {"loss": abs(loss - expected_loss) / expected_loss, "gradient": max(errors.values())}
    result["worst"] = max(errors, key=lambda name: errors[name])
    result["names_equal"] = set(gradients) == set(expected)
    result["bytes"] = dict(trainer.ulysses.sent_bytes) if trainer.ulysses else {}
    if (
        trainer.mesh.rank == trainer.mesh.world_size - 1
    ):  # a rank that holds other heads and tokens than rank 0
        result["lead"] = trainer.ulysses.lead if trainer.ulysses else None
        tiny.write_result(out, name, result)
    stop_processes()


def main(out: Path) -> None:
    import deepspeed  # noqa: F401  imported once, before the ranks are forked

    import pod  # noqa: F401

    data = tiny.make_data(out / "data")
    masked = tiny.make_data(out / "masked", empty_tail=True)
    layouts = {
        "sp2": (2, {"sequence_parallel_size": 2}, data, (6, 3), True),
        "sp3": (3, {"sequence_parallel_size": 3}, data, (6, 3), False),
        "sp4_replicated": (4, {"sequence_parallel_size": 4}, data, (6, 3), True),
        "dp2": (2, {"micro_batch_size": 2}, data, (6, 3), True),
        "sp2_dp2": (4, {"sequence_parallel_size": 2}, data, (6, 3), True),
        "sp2_accumulated": (
            2,
            {"sequence_parallel_size": 2, "gradient_accumulation_steps": 3},
            data,
            (6, 3),
            True,
        ),
        "sp2_masked": (2, {"sequence_parallel_size": 2}, masked, (6, 3), True),
        "sp2_plain_store": (
            2,
            {"sequence_parallel_size": 2, "gradient_checkpointing": False},
            data,
            (9, 3),
            True,
        ),
    }
    for name, (ranks, *rest) in layouts.items():
        tiny.run_ranks(ranks, compare, name, out, *rest)
    tiny.run_ranks(2, compare, "sp2_dense", out, {"sequence_parallel_size": 2}, data, (6, 3), True, False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
