"""From a recipe to a running training: refuse what cannot work, load the model, train."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from pod.data import PackedDataset
from pod.data.rows.loader import read_manifest
from pod.data.run.folders import LOCK_SECONDS, locked
from pod.data.tokens.tokenizers import tokenizer_sha256
from pod.modeling.model import flash_version
from pod.models import resolve_model
from pod.recipe import Recipe
from pod.tokenizer import check_ids
from pod.training.args import TrainRecipe
from pod.training.checkpoint.run_identity import sha256_of
from pod.training.observe.metrics import check_tracker
from pod.training.predict import preflight
from pod.training.predict.layout_search import Machine, choose_layout, details, table, this_machine
from pod.training.predict.shapes import Shapes
from pod.training.run import allocator
from pod.training.run.config_sync import agree, agree_on_layout, note_neighbours
from pod.training.run.mesh import (
    Mesh,
    from_rank_0,
    join_ranks,
    record_collectives,
    stop_processes,
)
from pod.training.run.start_model import hollow_start_model, model_config, source_config

GROUP_TIMEOUT_S = 1350.0  # PyTorch's own limits are 10 minutes with NCCL and 30 with gloo


def open_data(recipe: Recipe, config: Any) -> PackedDataset:
    """The prepared rows of a recipe, once they are known to fit the model.

    Args:
        config: the model's configuration; its `vocab_size` is compared with that of the rows.

    Raises:
        ValueError: there are no rows; they were made with another tokenizer or vocabulary; or their length
            is not the recipe's. Where their vocabulary is larger than the model's, the error names the first
            token of their texts that the model lacks.
    """
    import pod

    model, folder = recipe.model, recipe.data_dir
    tokenizer = pod.load_tokenizer(resolve_model(model.path), gguf_file=model.gguf_file)
    sha256 = tokenizer_sha256(tokenizer)
    dataset = PackedDataset(folder, tokenizer_sha256=sha256)
    if dataset.manifest["vocab_size"] > config.vocab_size:
        for index in range(len(dataset)):
            for document in dataset.documents(index):
                check_ids(tokenizer, document)
    dataset = PackedDataset(folder, tokenizer_sha256=sha256, vocab_size=config.vocab_size)
    preflight.check_length(recipe.data.context_length, dataset.context_length, folder)
    return dataset


def train(recipe: Recipe, passkeys: Sequence[Any] = ()) -> bool:
    """Train on all ranks that the launcher started.

    Args:
        recipe: must be the same on all ranks; it is stored in checkpoints.
        passkeys: prompts of the evaluation (`PasskeyProbe`).

    Returns:
        Whether all steps are done. A signal or `max_hours` ends a run earlier.

    Raises:
        ValueError, OSError, RuntimeError: in one line that says what to do. After a ValueError nothing has
            been trained.
        KeyboardInterrupt: Ctrl-C ended the run. Its last checkpoint is complete.
    """
    from pod.training.observe.validation import HeldOutEvaluation
    from pod.training.run.trainer import Trainer

    how, folder, config = recipe.train, recipe.train_dir, asdict(recipe)
    check_tracker(how.tracker)
    # A version that the environment names counts as the recipe's: ranks must agree on it, and checkpoints
    # record it.
    config["model"]["flash_attention"] = flash_version.use(recipe.model.flash_attention)
    planned, plan = model_config(recipe.model, recipe.output_dir)
    dataset = open_data(recipe, planned)
    layout = preflight.check(planned, how, dataset.manifest, folder, this_machine())
    evaluation = HeldOutEvaluation.of(layout.job.args, dataset, passkeys)
    folder.mkdir(parents=True, exist_ok=True)
    if how.hang_timeout_s:
        record_collectives(folder)
    timeout_s = group_timeout_s(how)
    join_ranks(timeout_s)
    facts = {"the plan": sha256_of(plan.lead), "the data": sha256_of(dataset.manifest)}
    facts["the model's output head"] = "tied" if planned.tie_word_embeddings else "its own"
    agree(config, folder, facts)
    note_neighbours()
    layout = agree_on_layout(layout, how)
    args = layout.job.args
    mesh = Mesh(args.sequence_parallel_size, timeout_s)
    with contextlib.ExitStack() as held:
        busy = f"another process trains in {folder}: wait for it, stop it, or set another output_dir"
        from_rank_0(lambda: held.enter_context(locked(folder / "train.lock", LOCK_SECONDS, busy)))
        if mesh.rank == 0:
            print(table(layout, len(dataset) * dataset.context_length), flush=True)
            if torch.cuda.is_available():
                print(f"pages   {allocator.describe()}", flush=True)
        plan_file = recipe.model.plan_file(recipe.output_dir)
        model, weights = hollow_start_model(recipe.model, plan_file, args.dtype)
        from_rank_0(weights.open)
        trainer = Trainer(args, model, dataset, mesh, folder, recipe.seed, config, evaluation, weights)
        state = trainer.train()
    if mesh.rank == 0:
        more = f" ({args.max_steps} were asked for)" if state.step > args.max_steps else ""
        print(
            f"trained {state.step} of {max(state.step, args.max_steps)} steps{more}; checkpoints in {folder}",
            flush=True,
        )
    stop_processes()
    # The checkpoint is complete. The command can end as every command does after Ctrl-C.
    if trainer.control.ctrl_c:
        raise KeyboardInterrupt
    return state.step >= args.max_steps


def group_timeout_s(args: TrainRecipe) -> float:
    """Seconds after which an operation that waits for other ranks fails.

    The limit is longer than the watchdog's, so that the watchdog reports a hang first. All ranks then write
    their stacks, and a run that ends (`hang_action=abort`) ends with the watchdog's exit code. The
    environment variable POD_GROUP_TIMEOUT_S overrides the limit.
    """
    return float(os.environ.get("POD_GROUP_TIMEOUT_S") or max(GROUP_TIMEOUT_S, 1.5 * args.hang_timeout_s))


def estimate(recipe: Recipe, machine: Machine) -> str:
    """Text for `--dry-run`: the parallel layout, and the memory, disk and time that the run would need.

    It needs the model's configuration, not its weights. It uses the prepared data and the plan when they
    exist. If the plan for layout=pod is still to be made, the estimate assumes one that saves
    explore.target_saving. What training would refuse becomes a note in the text.

    Raises:
        ValueError: settings that do not go together.
    """
    flash_version.choose(recipe.model.flash_attention)
    _, note = source_config(recipe.model)
    explore = recipe.explore
    windows_only = explore.roles == ["window"] and explore.granularity == "layer"
    config, plan = model_config(recipe.model, recipe.output_dir, explore.target_saving, windows_only)
    asked = length = recipe.data.context_length
    rows = None
    if (recipe.data_dir / "manifest.json").is_file():
        manifest = read_manifest(recipe.data_dir)
        rows = manifest["num_rows"]
        length = manifest["context_length"]
    shapes = Shapes.from_config(config)
    preflight.check_attention(shapes, recipe.train, machine)
    layout = choose_layout(recipe.train, shapes, plan.lead, length, machine)
    notes = [note] if note else []
    if plan.provenance.get("stand_in"):
        windows, followers = plan.num_windows, plan.num_followers
        others = f"{windows} keep their window" if windows_only else f"{followers} follow"
        notes.append(
            f"no plan yet: the estimate assumes that {plan.num_leads} (layer, KV head) pairs lead and "
            f"{others}, which saves {plan.asymptotic_saving:.0%} of the keys and values of distant tokens"
        )
    runs_here = torch.cuda.is_available() or not machine.has_gpu
    if runs_here:
        with _refusal_in(notes):
            flash_version.check()
    with _refusal_in(notes):
        preflight.check_positions(config, length)
    if rows is not None:
        with _refusal_in(notes):
            preflight.check_length(asked, length, recipe.data_dir)
        with _refusal_in(notes):
            preflight.check_epochs(layout.job, rows)
    data_tokens = None if rows is None else rows * length
    text = table(layout, data_tokens, recipe.data.target_tokens)
    return "\n".join([*(f"note: {line}" for line in notes), text, details(layout)])


@contextlib.contextmanager
def _refusal_in(notes: list[str]) -> Iterator[None]:
    """Use it around a check that training makes: its ValueError becomes a line in `notes`."""
    try:
        yield
    except ValueError as error:
        notes.append(f"training will refuse this: {error}")
