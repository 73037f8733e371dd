"""Fine-tune a model so that it works with the smaller KV cache of its plan.

The command runs on one device or, with DeepSpeed ZeRO and Ulysses sequence parallelism, on many. It reads
<output_dir>/data and <output_dir>/plan/plan.json and writes checkpoints and metrics into <output_dir>/train.
model.layout selects the kind of model: PoD, dense, CLA or window attention.

  pod train --config demo                                                      one device
  deepspeed --module pod.commands.train --config llama3_8b_32k_pod             all GPUs of this machine
  deepspeed --hostfile hosts.txt --module pod.commands.train --config NAME     several machines
                                                                               (Slurm: launch/slurm/)
  DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --module pod.commands.train --config demo
                                                                               two processes on a CPU
  pod train --config NAME --dry-run --ranks 8 --device h100                    memory and time, without a GPU

Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and end the run; the same command continues it exactly. The exit
code is 130 after Ctrl-C, and 0 after the other two."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from pod.commands import note_on_data
from pod.recipe import Recipe, rank

SECTIONS = "model", "train"
UNFINISHED = "next: run the same command again, which continues the training"


def main(recipe: Recipe, config: str | None = None, changes: Sequence[str] = ()) -> None:
    """Train, and name the next command.

    Args:
        config: the value of --config that the recipe was made of.
        changes: the values of --set that the recipe was made of.
    """
    from pod.training.run.allocator import expand_segments

    expand_segments()
    from pod.training.run.start import train  # this imports torch, which reads what was set above

    note_on_data(recipe)
    check_export(recipe)
    is_finished = train(recipe, make_passkeys(recipe))
    if rank() == 0:
        print(next_command(config, changes) if is_finished else UNFINISHED, flush=True)


def check_export(recipe: Recipe) -> None:
    """Refuse, before hours of training, a model that an export for vLLM would refuse.

    Raises:
        ValueError: export.format is vllm, or the plan was made for vLLM, and engines cannot compute the
            model; or there is no such model.
    """
    from pod.modeling.model.sharing import SharingPlan

    is_asked = recipe.export.format == "vllm"
    plan = recipe.model.plan_file(recipe.output_dir)
    is_for_vllm = plan is not None and SharingPlan.load(plan).provenance.get("target") == "vllm"
    if not is_asked and not is_for_vllm:
        return
    from pod.export.served import check_servable
    from pod.training.run.start_model import model_config

    config, _ = model_config(recipe.model, recipe.output_dir)
    asks = "export.format is vllm, which" if is_asked else "the plan was made for vLLM, whose export"
    try:
        check_servable(config)
    except ValueError as error:
        raise ValueError(f"{asks} will refuse the trained model: {error}") from None


def next_command(config: str | None, changes: Sequence[str]) -> str:
    """The command that exports what was trained with the same recipe."""
    words = ["pod", "export"]
    if config is not None:
        words += ["--config", config]
    for change in changes:
        words += ["--set", change]
    return f"next: {shlex.join(words)}"


def make_passkeys(recipe: Recipe) -> list[Any]:
    """Tokenized passkey prompts for the evaluation during training: train.eval_passkeys of them.

    Each is 16 tokens shorter than a row, and the keys lie at evenly spread depths.
    """
    count = recipe.train.eval_passkeys
    if not count:
        return []
    import pod
    from pod.eval.tasks.passkey import make_prompts
    from pod.models import resolve_model
    from pod.training.observe.validation import PasskeyProbe

    tokenizer = pod.load_tokenizer(resolve_model(recipe.model.path), gguf_file=recipe.model.gguf_file)
    depths = [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
    length = recipe.data.context_length - 16  # room for the answer
    prompts = make_prompts(tokenizer, [length], depths, 1, recipe.seed)
    return [PasskeyProbe.of(tokenizer, one.text, one.key, one.depth) for one in prompts]


def estimate(
    recipe: Recipe,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    device: str | None = None,
) -> str:
    """Text for `--dry-run`: layout, memory and time, on this machine or the one that the options name.

    Args:
        ranks, ranks_per_node, device: the values of these options; None = not given.
    """
    from pod.training.predict.layout_search import this_machine
    from pod.training.predict.step_time import get_device
    from pod.training.run.start import estimate

    known = None if device is None else get_device(device)
    text = estimate(recipe, this_machine(ranks, ranks_per_node, known))
    if recipe.model.plan_file(recipe.output_dir) is None:
        return text  # the plan of the estimate is not the one that will be exported
    try:
        check_export(recipe)
    except ValueError as error:
        text += f"\nnote: {error}"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--max-hours 11.5` for `--set train.max_hours=11.5`, and the options of estimates.

    With `--dry-run`, `--ranks`, `--ranks-per-node` and `--device` name the machines to estimate for.
    """
    hours = (
        "save and end before so many hours have passed, for example 11.5; same as --set train.max_hours=HOURS"
    )
    parser.add_argument("--max-hours", dest="train.max_hours", metavar="HOURS", help=hours)
    add = parser.add_argument_group("estimates for other machines, only with --dry-run").add_argument
    add(
        "--ranks",
        type=_count,
        metavar="N",
        help="number of processes (GPUs); default: one, or the launcher's",
    )
    add("--ranks-per-node", type=_count, metavar="M", help="processes on each machine; default: N, at most 8")
    device = (
        "GPU type, such as h100 or a100, also with figures of your own: h100,memory_gib=64,network_gbps=12.5"
    )
    add("--device", metavar="NAME", help=device)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse options that have no effect on a training.

    Raises:
        ValueError: an option for estimates without `--dry-run`.
    """
    for name in ("ranks", "ranks_per_node", "device"):
        if getattr(arguments, name) is not None and not arguments.dry_run:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is for estimates only: add --dry-run. How many processes train, and on what, "
                "is set by the launcher, "
                "for example `deepspeed --num_gpus 8 --module pod.commands.train --config NAME`"
            )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    from pod.commands import start

    start("train")
