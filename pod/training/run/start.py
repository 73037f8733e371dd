"""From a recipe's sections to a running training: refuse what cannot work, load, train."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pod.data import PackedDataset
from pod.data.args import DataArgs
from pod.data.rows.loader import read_manifest
from pod.data.tokens.tokenizers import tokenizer_sha256
from pod.models import ModelArgs, resolve_model
from pod.training.args import TrainRecipe
from pod.training.observe.trackers import check_tracker
from pod.training.observe.validation import Passkey
from pod.training.predict import preflight
from pod.training.predict.planner import Machine, this_machine
from pod.training.predict.planner import plan as plan_run
from pod.training.predict.shapes import Shapes
from pod.training.predict.table import details, table
from pod.training.run.agreement import agree, agree_on_layout, digest
from pod.training.run.mesh import Mesh, from_rank_0, join_ranks, record_collectives, stop_processes
from pod.training.run.start_model import hollow_start_model, model_config, source_config

GROUP_TIMEOUT_S = 1350.0  # PyTorch's own limit is 30 minutes


def open_data(model_args: ModelArgs, folder: Path, config: Any, asked: int | None) -> PackedDataset:
    """The prepared rows in `folder`; ValueError for none, another tokenizer or vocabulary, or rows of other than `asked` tokens."""
    import pod

    tokenizer = pod.load_tokenizer(resolve_model(model_args.path), gguf_file=model_args.gguf_file)
    dataset = PackedDataset(
        folder, tokenizer_sha256=tokenizer_sha256(tokenizer), vocab_size=config.vocab_size
    )
    if asked not in (None, dataset.context_length):
        raise ValueError(
            f"data.context_length is {asked} and the rows in {folder} have {dataset.context_length} tokens: "
            f"run `pod data` again, or set data.context_length={dataset.context_length}"
        )
    return dataset


def train(
    model_args: ModelArgs,
    recipe: TrainRecipe,
    output_dir: str,
    seed: int,
    config: dict[str, Any],
    passkeys: Sequence[Passkey] = (),
) -> None:
    """Train on all ranks that the launcher started.

    Args:
        config: the resolved recipe, the same on all ranks; stored in checkpoints.

    Raises:
        ValueError, OSError, RuntimeError: in one line that says what to do; nothing has been trained for a ValueError.
    """
    from pod.training.observe.make import make_observers
    from pod.training.run.trainer import Trainer

    check_tracker(recipe.tracker)
    planned, plan = model_config(model_args, output_dir)
    asked = config.get("data", {}).get("context_length")
    dataset = open_data(model_args, Path(output_dir) / "data", planned, asked)
    folder = Path(output_dir) / "train"
    fit = preflight.check(planned, recipe, dataset.manifest, folder, this_machine())
    observers = make_observers(fit.job.args, dataset, passkeys)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.hang_timeout_s:
        record_collectives(folder)
    timeout_s = group_timeout_s(recipe)
    join_ranks(timeout_s)
    agree(config, folder, {"the plan": digest(plan.lead), "the data": digest(dataset.manifest)})
    fit = agree_on_layout(fit, recipe)
    args = fit.job.args
    mesh = Mesh(args.sequence_parallel_size, timeout_s)
    if mesh.rank == 0:
        print(table(fit, len(dataset) * dataset.context_length), flush=True)
    model, weights = hollow_start_model(model_args, model_args.plan_file(output_dir), args.dtype)
    from_rank_0(mesh.rank, weights.open)
    trainer = Trainer(args, model, dataset, mesh, folder, seed, config, observers=observers, weights=weights)
    state = trainer.train()
    if mesh.rank == 0:
        print(f"trained {state.step} of {args.max_steps} steps; checkpoints in {folder}", flush=True)
    stop_processes()


def group_timeout_s(args: TrainRecipe) -> float:
    """Seconds after which an operation that waits for other ranks fails: later than the watchdog has reported it."""
    return float(os.environ.get("POD_GROUP_TIMEOUT_S") or max(GROUP_TIMEOUT_S, 1.5 * args.hang_timeout_s))


def estimate(
    model_args: ModelArgs,
    recipe: TrainRecipe,
    data_args: DataArgs,
    output_dir: str,
    machine: Machine,
    target_saving: float = 0.35,
) -> str:
    """Text for `--dry-run`: needs the model's configuration, not its weights; prepared data and plan when they exist.

    A plan that is still to be made, for layout=pod, is one of `target_saving`. ValueError for what does not go together.
    """
    _, note = source_config(model_args)
    config, plan = model_config(model_args, output_dir, target_saving)
    context_length, data_tokens = data_args.context_length, data_args.target_tokens
    if (Path(output_dir) / "data" / "manifest.json").is_file():
        manifest = read_manifest(Path(output_dir) / "data")
        context_length = manifest["context_length"]
        data_tokens = manifest["num_rows"] * context_length
    preflight.check_attention(config, recipe, machine)
    fit = plan_run(recipe, Shapes.from_config(config), plan.lead, context_length, machine)
    notes = [note] if note else []
    if plan.provenance.get("stand_in"):
        notes.append(
            f"no plan yet: estimated with {plan.num_leads} (layer, KV head) pairs that lead and {plan.num_followers} that follow, which "
            f"save {plan.asymptotic_saving:.0%} of distant tokens' keys and values"
        )
    if context_length > config.max_position_embeddings:
        notes.append(
            f"rows of {context_length} tokens are longer than the model's positions ({config.max_position_embeddings}): "
            "training will refuse them"
        )
    return "\n".join([*(f"note: {line}" for line in notes), table(fit, data_tokens), details(fit)])
