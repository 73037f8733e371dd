"""From a recipe's sections to a running training: load, refuse what cannot work, train."""

import os
from pathlib import Path
from typing import Any

from pod.data import PackedDataset
from pod.data.loader import read_manifest
from pod.data.tokenizers import tokenizer_sha256
from pod.models import ModelArgs, resolve_model
from pod.training.args import TrainArgs
from pod.training.estimate import Shapes, describe
from pod.training.mesh import check_world_size, planned_world_size, start_processes, stop_processes
from pod.training.metrics import check_tracker
from pod.training.ulysses import kv_head_repeats


def plan_path(model_args: ModelArgs, output_dir: Path) -> Path | None:
    """The plan to train: the recipe's, else <output_dir>/plan/plan.json when it exists, else None (dense)."""
    if model_args.plan is not None:
        return Path(model_args.plan)
    default = Path(output_dir) / "plan" / "plan.json"
    return default if default.is_file() else None


def load_start_model(model_args: ModelArgs, plan: Any) -> Any:
    """The PodForCausalLM that training starts from, fp32, with the plan and windows of the recipe."""
    import pod

    return pod.load_model(
        resolve_model(model_args.path),
        plan=plan,
        num_sink_tokens=model_args.num_sink_tokens,
        num_recent_tokens=model_args.num_recent_tokens,
        dtype="float32",
        gguf_file=model_args.gguf_file,
        attention_backend=model_args.attention_backend,
    )


def open_data(model_args: ModelArgs, output_dir: Path, config: Any) -> PackedDataset:
    """The prepared rows, refused when they do not fit the model.

    Raises:
        ValueError: no data, another tokenizer, ids above the vocabulary, rows longer than the model's positions.
    """
    import pod

    tokenizer = pod.load_tokenizer(resolve_model(model_args.path), gguf_file=model_args.gguf_file)
    dataset = PackedDataset(
        Path(output_dir) / "data", tokenizer_sha256=tokenizer_sha256(tokenizer), vocab_size=config.vocab_size
    )
    longest = config.max_position_embeddings
    if dataset.context_length > longest:
        raise ValueError(
            f"the data has rows of {dataset.context_length} tokens, the model's positions end at {longest}: prepare "
            f"data with data.context_length <= {longest}, or choose a model with a longer context"
        )
    return dataset


def check_recipe(args: TrainArgs) -> None:
    """What can be refused before a model is loaded."""
    check_tracker(args.tracker)
    check_world_size(planned_world_size(), args.sequence_parallel_size)


def train(model_args: ModelArgs, args: TrainArgs, output_dir: str, seed: int, config: dict[str, Any]) -> None:
    """Train on all ranks that the launcher started.

    Raises:
        ValueError, OSError, RuntimeError: in one line that says what to do; nothing has been trained for a ValueError.
    """
    check_recipe(args)
    model = load_start_model(model_args, plan_path(model_args, Path(output_dir)))
    kv_head_repeats(
        model.config.num_attention_heads, model.config.num_key_value_heads, args.sequence_parallel_size
    )
    dataset = open_data(model_args, Path(output_dir), model.config)
    folder = Path(output_dir) / "train"
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not writable: set another output_dir")
    mesh = start_processes(args.sequence_parallel_size)
    from pod.training.trainer import Trainer

    trainer = Trainer(args, model, dataset, mesh, folder, seed, config)
    state = trainer.train()
    if mesh.rank == 0:
        print(f"trained {state.step} of {args.max_steps} steps; checkpoints in {folder}", flush=True)
    stop_processes()


def estimate(model_args: ModelArgs, args: TrainArgs, output_dir: str, context_length: int) -> str:
    """Text for `--dry-run`: needs the model's configuration, not its weights; prepared data and plan when they exist.

    The number of ranks is the launcher's, or the sequence-parallel size without one.
    """
    from transformers import AutoConfig

    import pod
    from pod.modeling.loading import convert_config

    options = {} if model_args.gguf_file is None else {"gguf_file": model_args.gguf_file}
    try:
        source = AutoConfig.from_pretrained(resolve_model(model_args.path), **options)
    except OSError as error:
        reason = str(error).splitlines()[0]
        return (
            f"No estimate: the configuration of model.path = {model_args.path} cannot be read here ({reason})"
        )
    config = source if source.model_type == "pod" else convert_config(source)
    plan_file = plan_path(model_args, Path(output_dir))
    plan = pod.SharingPlan.load(plan_file) if plan_file else config.sharing_plan
    if (Path(output_dir) / "data" / "manifest.json").is_file():
        context_length = read_manifest(Path(output_dir) / "data")["context_length"]
    world_size = max(planned_world_size(), args.sequence_parallel_size)
    return describe(Shapes.from_config(config), plan.lead, args, context_length, world_size)
