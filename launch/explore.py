"""Measure what each (layer, KV head) would cost in each role on long held-out text, and make the plan of least cost.

Writes plan.json, plan_costs.safetensors, summary.txt, pareto.json (the least cost of every saving) and pictures of the plan, the
costs and that curve into <output_dir>/plan. With the same model and text, other --roles, another --target-saving or
retrieval_weight makes its plan from the costs that are there. Several ranks (torchrun or deepspeed) divide the sequences; an
interrupted run continues where it was.

The paper's plans come from the similarity of attention rows: --cost similarity --roles follow, with --algorithm greedy and
--threshold for its Algorithm 1 (similarity.safetensors instead of costs).

With --heads it searches for the retrieval heads of RazorAttention instead, on random tokens, and writes
<output_dir>/plan/retrieval_heads.json, the file that the cache method `razor` asks for, with a picture of all scores beside it.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pod.files import atomic_write_text
from pod.recipe import Recipe, run


def main(recipe: Recipe) -> None:
    """Measure, make the plan, draw both."""
    from pod.training.plans.choose import find_plan
    from pod.training.plans.exploration import Exploration, process_group

    if recipe.explore.heads:
        write_heads(recipe)
        return
    with process_group() as rank:
        choice = find_plan(Exploration.of(recipe))
        if rank == 0:
            write_plan(recipe, choice)


def write_heads(recipe: Recipe) -> None:
    """retrieval_heads.json and a picture of the scores, and what the heads protect and save on the screen."""
    from pod.models import resolve_model
    from pod.training.plans.exploration import process_group
    from pod.training.plans.heads import HEADS_NAME, find_heads
    from pod.training.plans.pictures import head_score_maps, save_picture
    from pod.training.plans.report import describe_heads

    args = recipe.model
    model = {"path": args.path, "gguf_file": args.gguf_file, "dtype": args.dtype}
    with process_group() as rank:
        heads = find_heads(recipe.plan_dir, model, resolve_model(args.path), recipe.explore, recipe.seed)
        if rank == 0:
            print(describe_heads(heads))
            picture = save_picture(
                head_score_maps(heads, args.path), (recipe.plan_dir / HEADS_NAME).with_suffix(".png")
            )
            print(f"written: {recipe.plan_dir / HEADS_NAME}, {picture.name}")


def write_plan(recipe: Recipe, choice: Any) -> None:
    """plan.json, pareto.json, summary.txt and the pictures."""
    from pod.training.plans.exploration import windows_of
    from pod.training.plans.pictures import (
        block_picture,
        cost_maps,
        pareto_picture,
        save_picture,
        save_similarity_pictures,
    )
    from pod.training.plans.report import PARETO_NAME, pareto

    folder, plan, explore = recipe.plan_dir, choice.plan, recipe.explore
    folder.mkdir(parents=True, exist_ok=True)
    subject = about(recipe, plan)
    figures = {"blocks.png": block_picture(plan, subject)}
    figures["costs.png"] = cost_maps(choice.follow, choice.window, plan, subject)
    if choice.solved is not None:
        curve = pareto(choice, explore, windows_of(recipe))
        atomic_write_text(folder / PARETO_NAME, as_json(curve))
        figures["pareto.png"] = pareto_picture(curve, subject)
    pictures = [save_picture(figure, folder / name) for name, figure in figures.items()]
    if choice.similarity is not None:
        values = choice.similarity.values
        pictures += save_similarity_pictures(folder, values, plan.num_key_value_heads, subject)
    text = summary(recipe, choice)
    atomic_write_text(folder / "summary.txt", text + "\n")
    plan.save(folder / "plan.json")
    print(text)
    print(f"written: {folder / 'plan.json'}, {', '.join(Path(path).name for path in pictures)}")


def as_json(curve: dict[str, Any]) -> str:
    """JSON with a line for each point of the curve."""
    points = ",\n".join(json.dumps(point, allow_nan=False) for point in curve["points"])
    return json.dumps(curve | {"points": []})[:-2] + "\n" + points + "\n]}\n"


def about(recipe: Recipe, plan: Any) -> str:
    """How the plan was made, of what model, on which text: a line."""
    explore, found = recipe.explore, plan.provenance
    how = f"greedy at threshold {explore.threshold:g}"
    if explore.algorithm == "dp":
        length = explore.budget_length
        how = f"dp by {explore.cost}, target {explore.target_saving:.1%} " + (
            f"at {length:,} tokens" if length else "in the limit"
        )
    name = found["model"].rstrip("/").split("/")[-1].removeprefix("package:")
    text = f"{found['num_sequences']} x {found['sequence_length']:,} tokens, {found['num_queries']} queries"
    return f"{name}, {text}; {how}"


def summary(recipe: Recipe, choice: Any) -> str:
    """What the plan is, what it costs, what other roles would cost, and its measured loss."""
    from pod.training.plans.report import describe_plan

    args, plan, found = recipe.model, choice.plan, choice.plan.provenance
    n = found["sequence_length"]
    lines = [
        f"plan: {about(recipe, plan)}",
        describe_plan(plan),
        f"KV saving at {n:,} tokens with {args.num_sink_tokens} sink and {args.num_recent_tokens} recent tokens: "
        f"{plan.saving(n, args.num_sink_tokens, args.num_recent_tokens):.1%}",
    ]
    if plan.head_order is not None:
        moved = sum(row != tuple(range(len(row))) for row in plan.head_order)
        lines.append(
            f"heads are re-ordered in {moved} of {plan.num_layers} layers; the model computes the same"
        )
    if "plan_cost" in found:
        lines.append(f"least cost at this saving: {found['plan_cost']:.4g}" + _without(found))
    for kind, what in (("text", "text"), ("repeated", "repeated random tokens")):
        dense, own = (found.get("losses", {}).get(name, {}).get(kind) for name in ("dense", "plan"))
        if dense is not None and own is not None:
            lines.append(
                f"measured loss on {what}: dense {dense:.4f}, plan {own:.4f} nats per token (perplexity x {math.exp(own - dense):.3f})"
            )
    return "\n".join(lines)


def _without(found: dict[str, Any]) -> str:
    forbidden = {
        "follow": "when no head may follow",
        "window": "when no head may keep its window",
        "4_bits": "when every layer keeps 16 bits",
    }
    costs = {what: found.get(f"plan_cost_without_{name}", math.nan) for name, what in forbidden.items()}
    return "".join(
        f"; {'not reachable' if cost is None else f'{cost:.4g}'} {what}"
        for what, cost in costs.items()
        if cost is None or not math.isnan(cost)
    )


def estimate(recipe: Recipe) -> str:
    """Tokens, memory and disk; needs the model's config only."""
    from pod.training.plans.choose import check_windows
    from pod.training.plans.exploration import check_model, describe_cost, windows_of
    from pod.training.plans.heads import describe_heads_cost
    from pod.training.run.start_model import model_config, source_config

    source_config(recipe.model)
    dense = replace(recipe.model, layout="dense", plan=None)
    config, _ = model_config(dense, recipe.output_dir)
    if recipe.explore.heads:
        return describe_heads_cost(config, recipe.explore)
    windows = windows_of(recipe)
    check_model(config, recipe.explore, windows)
    check_windows(recipe.explore, windows)
    return describe_cost(config, recipe.explore)


def shorthands(parser: argparse.ArgumentParser) -> None:
    """`--threshold 0.42` for `--set explore.threshold=0.42`, and its siblings."""
    parser.add_argument(
        "--heads",
        dest="explore.heads",
        action="store_const",
        const="true",
        help="short for --set explore.heads=true",
    )
    for option, field in (
        ("--algorithm", "algorithm"),
        ("--cost", "cost"),
        ("--roles", "roles"),
        ("--threshold", "threshold"),
        ("--target-saving", "target_saving"),
    ):
        parser.add_argument(
            option, dest=f"explore.{field}", metavar="VALUE", help=f"short for --set explore.{field}=VALUE"
        )


if __name__ == "__main__":
    run(
        main,
        sections=("model", "explore", "data"),
        description=__doc__,
        estimate=estimate,
        extra_arguments=shorthands,
    )
