"""Measure which attention heads can share keys and values, and write a plan.

A KV head can reuse the attention of a lower layer (it follows) or keep only recent tokens (a window). The
command measures on long held-out text how much each choice changes the output of the head's layer. The plan
saves explore.target_saving of the bytes at the lowest total cost. The results are in <output_dir>/plan:
plan.json, summary.txt, the measured costs (plan_costs.safetensors), the lowest cost of every saving
(pareto.json) and pictures. Costs are measured once. With another --target-saving or --roles, the command only
measures the windows of the new plan (explore.rounds). An interrupted run continues. Several processes
(torchrun or deepspeed) share the work.

  pod explore --config demo --target-saving 0.5

The plans of the PoD paper, from the similarity of attention rows:

  pod explore --config demo --cost similarity --roles follow                  lowest total cost
  pod explore --config demo --cost similarity --roles follow --algorithm greedy --threshold 0.5   Algorithm 1

Plans that vLLM runs (`pod export --format vllm`): all heads of a layer lead, or all keep a window. The
numbers of these layers waste no memory in vLLM. A constant stands for the first tokens. The report says what
vLLM will hold:

  pod explore --config demo --target vllm --target-saving 0.5 --set model.num_sink_tokens=null

The method razor (RazorAttention) needs the model's retrieval heads. The command searches for them on random
tokens when eval.methods names razor, and with --heads it does only this. It writes
<output_dir>/plan/retrieval_heads.json."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pod.commands import note_on_data
from pod.commands.gpu import prepare
from pod.files import atomic_write_text, keep_old, write_json
from pod.recipe import Recipe

SECTIONS = "model", "explore", "data"


def main(recipe: Recipe) -> None:
    """Measure, write the plan, measure its loss, and find retrieval heads if they are needed."""
    from pod.plan.choose import find_plan, with_losses
    from pod.plan.exploration import Exploration, dense_config, process_group
    from pod.plan.measured_costs import find_heads

    note_on_data(recipe)
    if recipe.explore.target == "vllm" and not recipe.explore.heads:
        check_target(recipe, dense_config(recipe))
    prepare(recipe)
    heads_wanted = recipe.explore.heads or compares_razor(recipe)
    with process_group() as rank:
        exploration = Exploration.of(recipe)
        if not recipe.explore.heads:
            choice = find_plan(exploration)
            if rank == 0:
                write_plan(exploration, choice)
            choice = with_losses(exploration, choice)
            if rank == 0:
                print(write_summary(exploration, choice))
                note_on_leads(choice.plan, recipe.explore)
                note_on_training(recipe)
        if heads_wanted:
            heads = find_heads(exploration)
            if rank == 0:
                write_heads(exploration, heads)


def note_on_leads(plan: Any, explore: Any) -> None:
    """Print a note when no head of the plan keeps distant tokens: the model then reads its windows only.

    Args:
        plan: the SharingPlan that was chosen.
        explore: section `explore` of the recipe.
    """
    if plan.num_leads:
        return
    length = f"{explore.budget_length:,} tokens" if explore.budget_length else "very long texts"
    longer = "explore.sequence_length or explore.budget_length"
    print(
        f"note: no head keeps distant tokens: the target needs every window at {length}; lower "
        f"explore.target_saving or model.num_recent_tokens, or raise {longer}"
    )


def note_on_training(recipe: Recipe) -> None:
    """Warn when the newest checkpoint was trained with another plan, which its training and export keep."""
    from pod.modeling.model.sharing import SharingPlan
    from pod.training.checkpoint.newest import latest_checkpoint
    from pod.training.checkpoint.run_identity import plan_sha256

    try:
        checkpoint = latest_checkpoint(recipe.train_dir)
        if checkpoint is None:
            return
        trained = plan_sha256(SharingPlan.load(checkpoint / "plan.json"))
    except ValueError:  # the checkpoint is damaged: the command that needs it reports it
        return
    if trained != plan_sha256(SharingPlan.load(recipe.plan_dir / "plan.json")):
        print(
            f"warning: {checkpoint} was trained with another plan and keeps it; "
            "to train with this plan, set another output_dir",
            file=sys.stderr,
        )


def compares_razor(recipe: Recipe) -> bool:
    """Whether eval.methods names razor, and eval.method_options gives it no file of heads."""
    from pod.eval.answer.methods import find_method, parts_of

    options = recipe.eval.method_options
    asking = [name for name in recipe.eval.methods if "heads" not in options.get(name, {})]
    return any("razor" in parts_of(find_method(name)) for name in asking)


def write_heads(exploration: Any, heads: Any) -> None:
    """Write a picture of the scores, and print what the heads protect and save."""
    from pod.plan.measured_costs import HEADS_NAME
    from pod.plan.plan_report import describe_heads, head_score_picture, save_picture

    path = exploration.folder / HEADS_NAME
    print(describe_heads(heads))
    figure = head_score_picture(heads, exploration.settings["model"])
    print(f"written: {path}, {save_picture(figure, path.with_suffix('.png')).name}")


def write_plan(exploration: Any, choice: Any) -> None:
    """Write plan.json, pareto.json, summary.txt and the pictures.

    The plan is written first, because its curve may take minutes.
    """
    from pod.plan import plan_report

    write_summary(exploration, choice)
    folder, plan, explore = exploration.folder, choice.plan, exploration.explore
    subject = plan_report.about_plan(plan, explore)
    figures = {"blocks.png": plan_report.block_picture(plan, subject)}
    if choice.plans is not None:
        curve = plan_report.pareto(choice, explore, exploration.windows)
        write_json(folder / "pareto.json", curve)
        figures["pareto.png"] = plan_report.pareto_picture(curve, subject)
    if choice.similarity is not None:
        heads = plan.num_key_value_heads
        figures["similarity.png"] = plan_report.similarity_picture(choice.similarity, heads, subject)
    for name, figure in figures.items():
        plan_report.save_picture(figure, folder / name)
    print(f"written: {folder / 'plan.json'}, {', '.join(figures)}", flush=True)


def write_summary(exploration: Any, choice: Any) -> str:
    """Write plan.json and summary.txt, with losses where they are measured. Returns the summary's text."""
    from pod.plan import plan_report
    from pod.plan.choose import in_all_layers

    folder = exploration.folder
    folder.mkdir(parents=True, exist_ok=True)
    plan = in_all_layers(choice.plan)
    keep_other_plan(folder / "plan.json", plan)
    plan.save(folder / "plan.json")
    text = plan_report.summary(choice.plan, exploration.explore, exploration.windows)
    atomic_write_text(folder / "summary.txt", text + "\n")
    return text


def keep_other_plan(path: Path, plan: Any) -> None:
    """Before a new plan is written to `path`, keep a different one that is there under another name.

    A training or an export may need the old plan.

    Args:
        plan: the SharingPlan that is about to be written.
    """
    from pod.modeling.model.sharing import SharingPlan

    def decisions(one: Any) -> tuple[Any, ...]:
        return one, one.num_sink_tokens, one.num_recent_tokens, one.sinks, one.sink_constants

    try:
        if not path.exists() or decisions(SharingPlan.load(path)) == decisions(plan):
            return
    except ValueError:  # the file is damaged; it is kept too
        pass
    kept = keep_old(path)
    if kept is not None:
        print(f"note: another plan was there; it is kept as {kept}")


def estimate(recipe: Recipe) -> str:
    """Text for `--dry-run`: tokens, memory and disk space. It needs the model's configuration only."""
    import torch

    from pod.plan.exploration import check_model, dense_config, describe_cost, sinks_of, windows_of

    config = dense_config(recipe)
    sinks = sinks_of(recipe)
    if not recipe.explore.heads:
        check_target(recipe, config)
        check_model(config, recipe.explore, windows_of(recipe, sinks))
    itemsize = getattr(torch, recipe.model.dtype).itemsize
    return describe_cost(config, recipe.explore, sinks, itemsize)


def check_target(recipe: Recipe, config: Any) -> None:
    """Refuse, before anything is measured, a model that cannot run where its plan is to run.

    Args:
        config: of the model without a plan.

    Raises:
        ValueError: explore.target is vllm, and the export would refuse the model under every plan, because of
            its family or its layout.
    """
    from pod.export import check_servable

    if recipe.explore.target != "vllm":
        return
    if recipe.model.layout not in ("auto", "pod"):
        raise ValueError(
            f"model.layout is {recipe.model.layout!r} with explore.target=vllm, which plans the layout pod: "
            "set model.layout=pod, or explore.target=pod"
        )
    try:
        check_servable(config)
    except ValueError as error:
        raise ValueError(f"explore.target is vllm, but the export will refuse this model: {error}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--threshold 0.42` for `--set explore.threshold=0.42`, and other shorthands like it."""
    heads = "search for retrieval heads only, without a plan; same as --set explore.heads=true"
    parser.add_argument("--heads", dest="explore.heads", action="store_const", const="true", help=heads)
    shorthands = {
        "target": "pod, or vllm: a plan of whole layers that vLLM runs",
        "target_saving": "share of the cache's bytes to save, for example 0.5",
        "roles": "what heads may do to save memory: follow, window, or follow,window",
        "cost": "nats (change of the predictions) or similarity (of attention rows, as in the paper)",
        "algorithm": "dp (lowest total cost) or greedy (the paper's Algorithm 1)",
        "threshold": "similarity from which greedy lets two layers share, 0 to 1",
    }
    for name, text in shorthands.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, dest=f"explore.{name}", metavar="VALUE", help=text)


if __name__ == "__main__":
    from pod.commands import start

    start("explore")
