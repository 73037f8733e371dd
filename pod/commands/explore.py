"""Measure what each (layer, KV head) would cost in each role on long held-out text, and make the plan of least cost.

Writes plan.json, plan_costs.safetensors, summary.txt, pareto.json (the least cost of every saving) and pictures of the plan
and that curve into <output_dir>/plan. With the same model and text, other --roles, another --target-saving or
retrieval_weight makes its plan from the costs that are there. Several ranks (torchrun or deepspeed) divide the sequences; an
interrupted run continues where it was.

The paper's plans come from the similarity of attention rows: --cost similarity --roles follow, with --algorithm greedy and
--threshold for its Algorithm 1 (similarity.safetensors instead of costs).

Where the recipe's evaluation compares `razor`, and with --heads alone, it searches for the retrieval heads of RazorAttention, on random
tokens, and writes <output_dir>/plan/retrieval_heads.json, the file that this method asks for, with a picture of all scores beside it.
"""

import argparse
from dataclasses import replace
from typing import Any

from pod.commands import note_on_data
from pod.files import atomic_write_text, write_json
from pod.recipe import Recipe

SECTIONS = "model", "explore", "data"


def main(recipe: Recipe) -> None:
    """Measure, make the plan, find the heads, draw both."""
    from pod.training.plans.choose import find_plan
    from pod.training.plans.exploration import Exploration, process_group
    from pod.training.plans.measure import find_heads

    note_on_data(recipe)
    heads_wanted = recipe.explore.heads or compares_razor(recipe)
    with process_group() as rank:
        exploration = Exploration.of(recipe)
        if not recipe.explore.heads:
            choice = find_plan(exploration)
            if rank == 0:
                write_plan(exploration, choice)
                note_on_training(recipe)
        if heads_wanted:
            heads = find_heads(exploration)
            if rank == 0:
                write_heads(exploration, heads)


def note_on_training(recipe: Recipe) -> None:
    """Say where the newest checkpoint was trained with another plan, which that training and its export keep."""
    from pod.modeling.shipped.sharing import SharingPlan
    from pod.training.checkpoint.identity import plan_sha256
    from pod.training.checkpoint.newest import latest_checkpoint

    try:
        checkpoint = latest_checkpoint(recipe.train_dir)
        trained = checkpoint and plan_sha256(SharingPlan.load(checkpoint / "plan.json"))
    except ValueError:  # a damaged checkpoint is told by who reads it
        return
    if trained and trained != plan_sha256(SharingPlan.load(recipe.plan_dir / "plan.json")):
        print(
            f"note: {checkpoint} was trained with another plan, its own plan.json; a training with this one needs another output_dir"
        )


def compares_razor(recipe: Recipe) -> bool:
    """Whether the recipe's evaluation asks for heads that no option names."""
    from pod.eval.answer.methods import find_method

    options = recipe.eval.method_options
    asking = [name for name in recipe.eval.methods if "heads" not in options.get(name, {})]
    return any("razor" in (find_method(name).spec or "").split("+") for name in asking)


def write_heads(exploration: Any, heads: Any) -> None:
    """A picture of the scores, and what the heads protect and save on the screen."""
    from pod.training.plans.measure import HEADS_NAME
    from pod.training.plans.report import describe_heads, head_score_picture, save_picture

    path = exploration.folder / HEADS_NAME
    print(describe_heads(heads))
    figure = head_score_picture(heads, exploration.settings["model"])
    print(f"written: {path}, {save_picture(figure, path.with_suffix('.png')).name}")


def write_plan(exploration: Any, choice: Any) -> None:
    """plan.json, pareto.json, summary.txt and the pictures."""
    from pod.training.plans import report
    from pod.training.plans.choose import in_all_layers

    folder, plan, explore = exploration.folder, choice.plan, exploration.explore
    subject = report.about_plan(plan, explore)
    figures = {"blocks.png": report.block_picture(plan, subject)}
    if choice.frontier is not None:
        curve = report.pareto(choice, explore, exploration.windows)
        write_json(folder / "pareto.json", curve)
        figures["pareto.png"] = report.pareto_picture(curve, subject)
    if choice.similarity is not None:
        heads = plan.num_key_value_heads
        figures["similarity.png"] = report.similarity_picture(choice.similarity, heads, subject)
    for name, figure in figures.items():
        report.save_picture(figure, folder / name)
    text = report.summary(plan, explore, exploration.windows)
    atomic_write_text(folder / "summary.txt", text + "\n")
    in_all_layers(plan).save(folder / "plan.json")
    print(text)
    print(f"written: {folder / 'plan.json'}, {', '.join(figures)}")


def estimate(recipe: Recipe) -> str:
    """Tokens, memory and disk; needs the model's config only."""
    from pod.training.plans.exploration import check_model, describe_cost, windows_of
    from pod.training.run.start_model import model_config, source_config

    source_config(recipe.model)
    config, _ = model_config(replace(recipe.model, layout="dense", plan=None), recipe.output_dir)
    if not recipe.explore.heads:
        check_model(config, recipe.explore, windows_of(recipe))
    return describe_cost(config, recipe.explore)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--threshold 0.42` for `--set explore.threshold=0.42`, and its siblings."""
    text = "short for --set explore.heads=true"
    parser.add_argument("--heads", dest="explore.heads", action="store_const", const="true", help=text)
    for name in ("algorithm", "cost", "roles", "threshold", "target_saving"):
        text = f"short for --set explore.{name}=VALUE"
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, dest=f"explore.{name}", metavar="VALUE", help=text)


if __name__ == "__main__":
    from pod.commands import start

    start("explore")
