"""Measure how similar the attention of the layers is on long held-out text, and turn it into a sharing plan.

Writes plan.json, similarity.safetensors, summary.txt and three pictures into <output_dir>/plan (plan_costs.safetensors and
costs.png too, when another cost than similarity decides). With the same model and text, another --algorithm,
--threshold or --target-saving makes its plan from the similarity that is there, and another --cost measures only what that
cost needs. Several ranks (torchrun or deepspeed) divide the sequences; an interrupted run continues where it was.

With --heads it searches for the retrieval heads of RazorAttention instead, on random tokens, and writes
<output_dir>/plan/retrieval_heads.json, the file that the cache method `razor` asks for.
"""

import argparse
from dataclasses import replace
from typing import Any

from pod.files import atomic_write_text
from pod.recipe import Recipe, run


def main(recipe: Recipe) -> None:
    """Find the similarity, make the plan, draw both."""
    from pod.models import resolve_model
    from pod.training.explore import find_similarity, process_group, settings_of
    from pod.training.explore_plan import Exploration, check_windows, find_plan

    args = recipe.model
    if recipe.explore.heads:
        write_heads(recipe)
        return
    settings = settings_of(
        {
            "path": args.path,
            "gguf_file": args.gguf_file,
            "dtype": args.dtype,
            "rope": args.rope,
            "max_position_embeddings": args.max_position_embeddings,
        },
        recipe.explore,
        recipe.data,
        recipe.seed,
    )
    windows = {"num_sink_tokens": args.num_sink_tokens, "num_recent_tokens": args.num_recent_tokens}
    check_windows(recipe.explore, windows)
    with process_group() as rank:
        folder = resolve_model(args.path)
        similarity = find_similarity(
            recipe.plan_dir, settings, folder, recipe.explore, recipe.data, prepared=recipe.data_dir
        )
        exploration = Exploration(
            recipe.plan_dir, settings, folder, windows, recipe.explore, recipe.data, recipe.data_dir
        )
        plan = find_plan(exploration, similarity)
        if rank == 0:
            write_plan(recipe, similarity, plan)
            if recipe.explore.cost != "similarity":
                draw_costs(recipe, plan)


def write_heads(recipe: Recipe) -> None:
    """retrieval_heads.json, and what it protects and saves on the screen."""
    from pod.models import resolve_model
    from pod.training.explore import process_group
    from pod.training.heads import HEADS_NAME, find_heads

    args = recipe.model
    model = {"path": args.path, "gguf_file": args.gguf_file, "dtype": args.dtype}
    with process_group() as rank:
        heads = find_heads(recipe.plan_dir, model, resolve_model(args.path), recipe.explore, recipe.seed)
        if rank == 0:
            print(heads.describe())
            print(f"written: {recipe.plan_dir / HEADS_NAME}")


def write_plan(recipe: Recipe, similarity: Any, plan: Any) -> None:
    """plan.json, summary.txt and the pictures."""
    from pod.training.plan_pictures import save_pictures
    from pod.training.planning import describe_plan, plan_cost

    explore, provenance = recipe.explore, similarity.provenance
    if explore.algorithm == "dp":
        how = f"dp at target saving {explore.target_saving:.1%}"
        how += "" if explore.cost == "similarity" else f" by cost {explore.cost}"
    else:
        how = f"greedy at threshold {explore.threshold:g}"
    refined = plan.provenance.get("refined")
    how += ", refined" if refined else ""
    name = provenance["model"].rstrip("/").split("/")[-1].removeprefix("package:")
    what = f"{provenance['num_sequences']} x {provenance['sequence_length']:,} tokens, last {provenance['num_queries']} queries"
    recipe.plan_dir.mkdir(parents=True, exist_ok=True)
    pictures = save_pictures(recipe.plan_dir, similarity.values, plan, f"{name}, {what}; {how}")
    args = recipe.model
    n = provenance["sequence_length"]
    summary = "\n".join(
        (
            f"plan: {how}, on {name}, {what}",
            describe_plan(plan),
            f"KV saving at {n:,} tokens with {args.num_sink_tokens} sink and {args.num_recent_tokens} recent tokens: "
            f"{plan.saving(n, args.num_sink_tokens, args.num_recent_tokens):.1%}",
            f"cost of the plan, sum of (1 - similarity with the lead): {plan_cost(similarity.values, plan):.2f}",
            *_about_refinement(refined),
        )
    )
    atomic_write_text(recipe.plan_dir / "summary.txt", summary + "\n")
    plan.save(recipe.plan_dir / "plan.json")
    print(summary)
    print(f"written: {recipe.plan_dir / 'plan.json'}, {', '.join(path.name for path in pictures)}")


def draw_costs(recipe: Recipe, plan: Any) -> None:
    """costs.png from the file of costs."""
    from pod.training.explore_plan import COSTS_NAME
    from pod.training.plan_costs import PlanCosts, combined_cost
    from pod.training.plan_pictures import save_cost_picture

    name = recipe.explore.cost
    costs = combined_cost(PlanCosts.load(recipe.plan_dir / COSTS_NAME).values, name)
    subject = f"KV saving {plan.asymptotic_saving:.1%}"
    print(f"written: {save_cost_picture(recipe.plan_dir, costs, plan, name, subject)}")


def _about_refinement(refined: dict[str, Any] | None) -> list[str]:
    if not refined:
        return []
    return [
        f"refined: loss {refined['loss_before']:.4f} -> {refined['loss_after']:.4f} nats per token on the texts of the "
        f"search, {refined['evaluations']} plans measured"
    ]


def estimate(recipe: Recipe) -> str:
    """Tokens, memory and disk; needs the model's config only."""
    from pod.training.explore import check_model, describe_cost
    from pod.training.explore_plan import check_windows
    from pod.training.heads import describe_heads_cost
    from pod.training.start_model import model_config, source_config

    try:
        source_config(recipe.model)
    except ValueError as error:
        return f"No estimate: {error}"
    dense = replace(recipe.model, layout="dense", plan=None)
    config, _ = model_config(dense, recipe.output_dir)
    if recipe.explore.heads:
        return describe_heads_cost(config, recipe.explore)
    check_model(config, recipe.explore)
    windows = {
        "num_sink_tokens": recipe.model.num_sink_tokens,
        "num_recent_tokens": recipe.model.num_recent_tokens,
    }
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
