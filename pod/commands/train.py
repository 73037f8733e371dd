"""Train a model under a sharing plan: ZeRO-3, Ulysses sequence parallelism, exact resume.

One process:  pod train --config demo
Two on CPU:   DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 launch/train_pod.py --config demo
GPUs:         deepspeed launch/train_pod.py --config llama3_8b_32k_pod; without a checkout, --module pod.commands.train for the file
Machines:     deepspeed --hostfile hosts.txt launch/train_pod.py --config …, or launch/slurm/

Reads <output_dir>/data and <output_dir>/plan/plan.json, writes <output_dir>/train. SIGTERM, SIGUSR1 and Ctrl-C save and exit with code 0;
the same command continues the run. model.layout says what is trained: PoD, dense, CLA or window attention.
"""

import argparse
from typing import Any

from pod.commands import note_on_data
from pod.recipe import Recipe

SECTIONS = "model", "train"


def main(recipe: Recipe) -> None:
    from pod.training.run.start import train

    note_on_data(recipe)
    train(recipe, make_passkeys(recipe))


def make_passkeys(recipe: Recipe) -> list[Any]:
    """Passkeys for evaluation during training, tokenised."""
    count = recipe.train.eval_passkeys
    if not count:
        return []
    import pod
    from pod.eval.suites.own.passkey import make_prompts
    from pod.models import resolve_model
    from pod.training.observe.validation import Passkey

    tokenizer = pod.load_tokenizer(resolve_model(recipe.model.path), gguf_file=recipe.model.gguf_file)
    depths = [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
    length = recipe.data.context_length - 16  # room for the answer
    prompts = make_prompts(tokenizer, [length], depths, 1, recipe.seed)
    return [Passkey.of(tokenizer, one.text, one.key, one.depth) for one in prompts]


def estimate(recipe: Recipe) -> str:
    from pod.training.predict.planner import this_machine
    from pod.training.predict.step_time import get_device
    from pod.training.run.start import estimate

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    options = parser.parse_known_args()[0]
    device = get_device(options.device) if options.device else None
    return estimate(recipe, this_machine(options.ranks, options.ranks_per_node, device))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--max-hours 11.5` for `--set train.max_hours=11.5`, what a job script knows; other machines for `--dry-run`."""
    hours = "short for --set train.max_hours=HOURS"
    parser.add_argument("--max-hours", dest="train.max_hours", metavar="HOURS", help=hours)
    add = parser.add_argument_group("with --dry-run: machines that need not be at hand").add_argument
    add("--ranks", type=_count, metavar="N", help="all ranks; default the launcher's")
    add("--ranks-per-node", type=_count, metavar="M", help="of one machine; default up to 8")
    device = "h100, a100, … and figures of your own: h100,memory_gib=64,network_gbps=12.5"
    add("--device", metavar="NAME", help=device)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    from pod.commands import start

    start("train")
