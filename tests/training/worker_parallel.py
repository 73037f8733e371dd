"""Loss and raw gradients of one optimizer step on many rank layouts against one plain process.

`worker_parallel.py OUT`. POD_ALL_LAYOUTS=1 takes every combination of `layout_cases.CHOICES` instead of a few
that hold every pair.
"""

import copy
import functools
import sys
from pathlib import Path
from unittest import mock

import layout_cases
import tiny
import torch
from attention_outputs import outputs_of_attention

from pod.modeling.model.sinks import PARAMETERS, is_constant

STEPS = 20
GROUPED = {"g1": (4, 4), "g4": (8, 2), "g8": (8, 1)}
"""Query and KV heads."""
STEP_SETTINGS = {"dtype": "float32", "loss_chunk_mib": 1, "save_every_steps": 0}


def add_lora(model, settings):
    """Add adapters whose second matrix is not zero as it is at the start.

    So the first has a gradient too.
    """
    from pod.training.run import lora

    wrapped, generator = lora.add_lora(model, settings), torch.Generator().manual_seed(3)
    for name, parameter in sorted(wrapped.named_parameters()):
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 64
    return wrapped


def reference(args, model, batch) -> tuple[float, dict]:
    """Loss and gradients of plain PyTorch: no ZeRO, no exchange, no checkpointing, whole logits."""
    from pod.training.run.lora import lora_settings

    teacher = dense_copy(model) if args.distill else None
    trained = add_lora(model, lora_settings(args)) if args.method == "lora" else model
    loss = mean_loss(model, batch)
    objective = loss
    if teacher is not None:
        objective = (1 - args.distill) * loss + args.distill * mean_divergence(teacher, model, batch)
        objective = objective + args.distill_attention * mean_attention_error(teacher, model, batch)
    objective.backward()
    gradients = {name: p.grad for name, p in trained.named_parameters() if p.requires_grad}
    return float(loss.detach()), {name: gradient.double() for name, gradient in gradients.items()}


def dense_copy(model):
    """The same weights in a model in which every head leads."""
    import pod

    plan = [[layer] * model.config.num_key_value_heads for layer in range(model.config.num_hidden_layers)]
    config = pod.PodConfig(**model.config.to_dict() | {"lead": plan})
    dense = pod.PodForCausalLM(config)
    missing, others = dense.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all(map(is_constant, others))
    return dense


def logits_of(model, batch):
    hidden = model.model(input_ids=batch["input_ids"], doc_ids=batch["doc_ids"]).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)


def mean_loss(model, batch):
    logits, labels = logits_of(model, batch), batch["labels"].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()


def mean_divergence(teacher, model, batch):
    """KL(teacher ‖ model) over the labelled tokens, by definition."""
    labelled = batch["labels"].flatten() != -100
    with torch.no_grad():
        wanted = logits_of(teacher, batch)[labelled].double().softmax(-1)
    own = logits_of(model, batch)[labelled].double().softmax(-1)
    return (wanted * (wanted / own).log()).sum(-1).mean()


def mean_attention_error(teacher, model, batch):
    """Squared error of attention's output over its squared size: a mean over layers and labelled tokens."""
    labelled = batch["labels"] != -100
    inputs = {"input_ids": batch["input_ids"], "doc_ids": batch["doc_ids"]}
    found = [
        torch.stack(outputs_of_attention(one, **inputs))[:, labelled].double() for one in (teacher, model)
    ]
    wanted, own = found[0].detach(), found[1]
    return ((own - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()


@functools.cache
def mesh_of(sp_size):
    """The mesh of these ranks, which is made once."""
    from pod.training.run.mesh import Mesh

    return Mesh(sp_size)


def one_step(args, model, dataset, folder):
    """One Trainer step; returns loss, raw gradients before clipping by the model's names, and the trainer."""
    from deepspeed.utils import safe_get_full_grad

    from pod.training.run import trainer as module

    module.add_lora = add_lora
    trainer = module.Trainer(args, model, dataset, mesh_of(args.sequence_parallel_size), folder)
    engine, update, gradients = trainer.engine, trainer.engine.step, {}

    def record_then_update():
        if engine.is_gradient_accumulation_boundary():
            for name, parameter in engine.module.model.named_parameters():
                if parameter.requires_grad:
                    gradients[name] = safe_get_full_grad(parameter).double()
        update()

    engine.step = record_then_update
    loss = trainer.step()["loss"]
    trainer.batches.close()
    return loss, gradients, trainer


def with_joined_constants(gradients: dict) -> dict:
    """Gradients with the constant sinks of all layers as one weight: those of a layer are as few as two
    numbers, each a small
    difference of large ones, whose own rounding says nothing."""
    found = {name: g for name, g in gradients.items() if not is_constant(name)}
    for kind in PARAMETERS:
        rows = [gradients[name].flatten() for name in sorted(gradients) if name.endswith(kind)]
        if rows:
            found[kind] = torch.cat(rows)
    return found


def compare(
    name, out, settings, data, heads=(6, 3), tied=True, plan=True, split=False, sinks="tokens"
) -> None:
    """One step of a layout, in ranks that may have done others before.

    split: as if sending keys and values were free.
    """
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run import ulysses

    dataset = PackedDataset(data)
    args = TrainArgs(max_grad_norm=1e-3, learning_rate=1e-3, **STEP_SETTINGS, **settings)
    model = tiny.make_model(heads=heads, tied=tied, plan=plan, sinks=sinks)
    plain = copy.deepcopy(model)
    with mock.patch.object(ulysses, "SENT_PAIRS", 0 if split else ulysses.SENT_PAIRS):
        loss, gradients, trainer = one_step(args, model, dataset, out / name)
    if trainer.mesh.rank < trainer.mesh.world_size - 1:
        return  # the last rank, which holds other heads and tokens than rank 0, compares
    expected_loss, expected = reference(
        args, plain, dataset.rows(dataset.cursor(0).peek(trainer.batches.rows_per_step))
    )
    names_equal = set(gradients) == set(expected)
    gradients, expected = with_joined_constants(gradients), with_joined_constants(expected)
    errors = {k: float((gradients[k] - g).norm() / g.norm()) for k, g in expected.items()}
    result = {"loss": abs(loss - expected_loss) / expected_loss, "gradient": max(errors.values())}
    result["worst"] = max(errors, key=lambda name: errors[name])
    result["names_equal"] = names_equal
    result["bytes"] = dict(trainer.ulysses.sent_bytes) if trainer.ulysses else {}
    if trainer.ulysses:
        result |= {"lead": trainer.ulysses.lead, "heads": trainer.ulysses.heads}
    tiny.write_result(out, name, result)


def together(function, *calls) -> None:
    """In one set of ranks: function(*call) for every call."""
    from pod.training.run.mesh import stop_processes

    for call in calls:
        function(*call)
    stop_processes()


def many_steps(name, out, settings, data) -> None:
    """Weights after STEPS of AdamW with warm-up, decay, clipping and weight decay.

    They are held against the same in plain PyTorch.
    """
    import deepspeed

    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.optimization import learning_rate, make_optimizer
    from pod.training.run.trainer import Trainer

    schedule = {"max_steps": STEPS, "learning_rate": 1e-3, "warmup_ratio": 3 / STEPS, "weight_decay": 0.1}
    args = TrainArgs(**schedule, **STEP_SETTINGS, **settings)
    dataset, model = PackedDataset(data), tiny.make_model()
    plain = copy.deepcopy(model)
    trainer = Trainer(args, model, dataset, mesh_of(args.sequence_parallel_size), out / name)
    losses = [trainer.step()["loss"] for _ in range(STEPS)]
    trainer.batches.close()
    weights = {}
    for key, parameter in trainer.engine.module.model.named_parameters():
        gathered = [parameter] if args.zero_stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathered):
            weights[key] = parameter.detach().clone()
    if trainer.mesh.rank:
        return
    start = {key: value.detach().clone() for key, value in plain.named_parameters()}
    optimizer, cursor, expected_losses = make_optimizer(plain, args), dataset.cursor(0), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = mean_loss(plain, dataset.rows(cursor.take(trainer.batches.rows_per_step)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), args.max_grad_norm)
        optimizer.step()
        expected_losses.append(float(loss.detach()))
    end = dict(plain.named_parameters())
    error = {key: float((weights[key] - w).norm() / w.norm()) for key, w in end.items()}
    moved = {key: float((w - start[key]).norm() / w.norm()) for key, w in end.items()}
    tiny.write_result(
        out,
        name,
        {
            "error": max(error.values()),
            "worst": max(error, key=lambda key: error[key]),
            "moved": min(moved.values()),
            "losses": [losses[0], losses[-1]],
            "loss_error": max(abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)),
        },
    )


def main(out: Path) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = {
        "packed": tiny.make_data(out / "packed"),
        "plain": tiny.make_data(out / "plain", one_document=True),
        "masked": tiny.make_data(out / "masked", empty_tail=True),
    }
    groups: dict[tuple, list] = {(1, 1): []}
    for case in layout_cases.chosen_cases():
        named = layout_cases.name_of(case), out, layout_cases.settings_of(case), data[case["data"]]
        call = (*named, (6, 3), True, True, False, case["sinks"])
        groups.setdefault((case["sp"], case["dp"]), []).append(call)
    two, four = {"sequence_parallel_size": 2}, {"sequence_parallel_size": 4}
    groups[2, 1] += [
        ("sp2", out, two, data["packed"], (6, 3), True),
        ("sp2_dense", out, two, data["packed"], (6, 3), True, False),
        ("sp2_split", out, two, data["packed"], (6, 3), True, True, True),
        ("sp2_odd_heads", out, {**two, "gradient_checkpointing": "none"}, data["packed"], (9, 3), False),
    ]
    groups[2, 1] += [(f"sp2_{name}", out, two, data["packed"], heads) for name, heads in GROUPED.items()]
    three = {"sequence_parallel_size": 3}
    groups[3, 1] += [(f"sp3_{name}", out, three, data["plain"], heads) for name, heads in GROUPED.items()]
    groups[4, 1].append(("sp4_replicated", out, four, data["packed"], (6, 3), False))
    for (sp, dp), calls in groups.items():
        tiny.run_ranks(sp * dp, together, compare, *calls)
    steps = {
        "sp2_dp2_zero3": (4, {**two, "gradient_accumulation_steps": 2}),
        "dp2_zero1": (2, {"zero_stage": 1}),
    }
    for name, (ranks, settings) in steps.items():
        tiny.run_ranks(ranks, together, many_steps, (name, out, settings, data["packed"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
