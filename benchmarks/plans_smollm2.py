"""Plans by byte budget on SmolLM2-135M beside every training-free method at the same bytes.

The figures are perplexity, passkeys and bytes held.

    # once: text, also for output_dir=…/narrow and …/constant
    python launch/prepare_data.py --config configs/plans_smollm2.yaml
    # once: costs of roles
    python launch/explore.py --config configs/plans_smollm2.yaml
    # once: the same with windows of 128 tokens
    python launch/explore.py --config configs/plans_smollm2.yaml --set output_dir=runs/plans_smollm2/narrow \
        --set model.num_recent_tokens=112 --set explore.loss_sequences=0
    # once: the same with constants for the first tokens
    python launch/explore.py --config configs/plans_smollm2.yaml \
        --set output_dir=runs/plans_smollm2/constant --set model.num_sink_tokens=0 \
        --set model.num_recent_tokens=128 --set model.sinks=constant --set explore.loss_sequences=0
    # once: retrieval heads for razor
    python launch/explore.py --config configs/plans_smollm2.yaml --heads
    # plans of every kind and saving from these costs
    python benchmarks/plans_smollm2.py --plans
    OMP_NUM_THREADS=1 python benchmarks/plans_smollm2.py --part 0/2 &
    OMP_NUM_THREADS=1 python benchmarks/plans_smollm2.py --part 1/2
    python benchmarks/plans_smollm2.py --assemble            # benchmarks/results/plans_smollm2.json and .md

A row is a plan or a method at a share of the dense bytes at 2,048 tokens. Its figures are kept in
runs/plans_smollm2/, so that an interrupted run goes on where it stopped. Perplexity: the last SCORED tokens
of TEXTS held-out texts, decoded one by one from the compressed cache; the ratio to dense has a 95 % interval
over texts (paired, Student's t). Passkeys: the text is read and compressed first, then asked. Nothing is
trained but what adaptation_smollm2.py exported: those models are rows too, and their ratio is to the dense
model that was trained on the same tokens. That of distilled models is to the dense model as it is.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from judge_plans import (
    Bench,
    Row,
    Sizes,
    keep_committed,
    kept_at,
    measure_missing,
    read_kept,
    table_head,
    table_line,
)

import pod
from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
KEPT, RESULTS = ROOT / "runs" / "plans_smollm2" / "rows", Path(__file__).parent / "results"
PLANS = ROOT / "runs" / "plans_smollm2" / "plan"
SETTINGS = {
    "narrow": ["output_dir=runs/plans_smollm2/narrow", "model.num_recent_tokens=112"],
    "constant": [
        "output_dir=runs/plans_smollm2/constant",
        "model.num_sink_tokens=0",
        "model.num_recent_tokens=128",
        "model.sinks=constant",
    ],
}
"""Changes of the recipe, for each kind of plan that has its own costs."""
ADAPTED = ROOT / "runs" / "adaptation_smollm2"
ALL = "plans_smollm2"
SIZES = Sizes()
LENGTH = SIZES.length
WINDOW = 16 + 240
SHARES = (0.10, 0.15, 0.20, 0.33, 0.50, 0.65)
INT4_SHARE, NARROW_SHARE = 0.367, 0.06
"""Bytes over dense at LENGTH tokens of heads in 4 bits that keep everything, or a window of 128 tokens."""
BY_COSTS = (
    ("razor by costs 50%", "razor", "windows_50", 240),
    ("razor+int4 by costs 20%", "razor+int4", "windows_63", 240),
    ("razor+int4 narrow by costs 20%", "razor+int4", "narrow_80", 112),
    ("razor+int4 narrow by costs 15%", "razor+int4", "narrow_85", 112),
)
"""Rows of razor with the heads of a plan: name, method, plan, recent tokens of a window."""
DTYPE = torch.bfloat16
SAME_TEXT = 0.05
"""Nats per token by which the dense model's loss of a text may differ from one processor to another."""


KINDS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "roles": ({}, (0.35, 0.4, 0.5, 0.6, 0.67, 0.7, 0.8)),
    "bits": ({"bits": [16, 4]}, (0.5, 0.67, 0.8, 0.85)),
    "sharing": ({"roles": ["follow"], "align_heads": False}, (0.35, 0.4)),
    "aligned": ({"roles": ["follow"]}, (0.35, 0.4)),
    "retrieval": ({"retrieval_weight": 2.0}, (0.4, 0.5, 0.6)),
    "narrow": ({"bits": [16, 4]}, (0.67, 0.8, 0.85, 0.9)),
    "constant": ({"bits": [16, 4]}, (0.67, 0.8, 0.85)),
    "windows": ({"roles": ["window"], "align_heads": False}, (0.5, 0.63)),
}
"""Kinds of plans: what differs in the recipe's explore section, and savings at LENGTH tokens.

Narrow ones have windows of 16 + 112 tokens, constant ones windows of 128 tokens and constant sinks. Those of
windows alone say which heads razor keeps.
"""


def make_plans(only: tuple[str, ...]) -> None:
    """Every kind at every saving, or those whose names begin so, from the costs that explore measured."""
    from pod.plan.choose import choose, improved
    from pod.plan.exploration import Exploration
    from pod.plan.measured_costs import COSTS_NAME, MeasuredCosts

    for kind, (changes, savings) in KINDS.items():
        names = {f"{kind}_{saving:.0%}".replace("%", ""): saving for saving in savings}
        wanted = {name: saving for name, saving in names.items() if not only or name.startswith(only)}
        if not wanted:
            continue
        own = Exploration.of(load_recipe(ROOT / "configs" / "plans_smollm2.yaml", SETTINGS.get(kind, [])))
        costs = MeasuredCosts.load(own.folder / COSTS_NAME)
        for name, saving in wanted.items():
            explore = replace(own.explore, budget_length=LENGTH, target_saving=saving, **changes)
            choice = choose(costs, explore, own.windows)
            plan = improved(replace(own, explore=explore), costs, choice).plan
            plan.save(PLANS / f"{name}.json")
            packed = 0 if plan.bits is None else plan.bits.count(4)
            print(
                f"{kind} {saving:.0%}: {plan.num_leads} lead, {plan.num_followers} follow, "
                f"{plan.num_windows} keep windows, "
                f"{packed} layers packed, cost {plan.provenance['plan_cost']:.4f}"
            )


def rows() -> list[Row]:
    """The dense model and every plan that was made.

    Also every model that was adapted, and every method at every share.
    """
    found = [Row("dense", "full")]
    found += [
        Row(f"plan {file.stem}", "pod", file.name) for file in sorted(PLANS.glob("*.json")) if is_plan(file)
    ]
    found += [
        Row(f"adapted {folder.parent.name}", "pod", model=folder)
        for folder in sorted(ADAPTED.glob("*/export"))
    ]
    heads: dict[str, Any] = {"heads": str(PLANS / "retrieval_heads.json"), "compression": 1000.0}
    heads |= {"num_recent_tokens": 240, "num_sink_tokens": 16}
    budgets = ("snapkv", "pyramidkv", "h2o", "d2o", "roco", "streamingllm", "imdc")
    found += [Row(f"{spec} {share:.0%}", spec, None, share) for share in SHARES for spec in budgets]
    for share in SHARES[2:]:  # a window holds an eighth of the bytes
        leads = (share * LENGTH - WINDOW) / (LENGTH - WINDOW)
        found.append(Row(f"razor {share:.0%}", "razor", options=heads | {"share": leads}))
    for share in SHARES[1:3]:
        leads = (share * LENGTH - WINDOW) / (
            0.4 * LENGTH - WINDOW
        )  # 4 bits and a native residual: about 0.4 at this length
        found.append(Row(f"razor+int4 {share:.0%}", "razor+int4", options=heads | {"share": leads}))
    for share in SHARES[1:3]:
        leads = (share - NARROW_SHARE) / (INT4_SHARE - NARROW_SHARE)
        options = heads | {"num_recent_tokens": 112, "share": leads}
        found.append(Row(f"razor+int4 narrow {share:.0%}", "razor+int4", options=options))
    for name, spec, kept, recent in BY_COSTS:
        if (PLANS / f"{kept}.json").is_file():
            chosen = {"heads": heads_of(PLANS / f"{kept}.json"), "num_recent_tokens": recent}
            found.append(Row(name, spec, options=heads | chosen))
    found += [Row("int4", "int4"), Row("simlayerkv", "simlayerkv", options={"num_recent_tokens": 256})]
    return [*found, *(Row(f"snapkv+int4 {x:.0%}", "snapkv+int4", None, x / 0.4) for x in SHARES[:3])]


def heads_of(file: Path) -> pod.SharingPlan:
    """The heads with windows of a plan's file, for razor. Heads that follow keep everything there."""
    lead = pod.SharingPlan.load(file).lead
    rows = (tuple(None if one is None else layer for one in row) for layer, row in enumerate(lead))
    return pod.SharingPlan(lead=tuple(rows))


def is_plan(file: Path) -> bool:
    content = read_json(file)
    return isinstance(content, dict) and "lead" in content and file.stem != "plan"


def make_bench() -> Bench:
    recipe = load_recipe(ROOT / "configs" / "plans_smollm2.yaml")
    return Bench(recipe, PLANS, DTYPE, SIZES)


def assemble(name: str) -> None:
    """One JSON and one Markdown table from what is kept, by bytes; a picture where all rows are there.

    Rows of the committed table that were not measured here stay, if they are of the same texts.
    """
    restore(RESULTS / f"{name}.json")
    found = read_kept(KEPT, ROOT)
    measured = sorted((x for x in found if "nll" in x), key=lambda x: x["bytes_over_dense"])
    dense = {x["name"]: x for x in measured}
    trained = dense.get("adapted dense", dense["dense"])
    lines = table_head(SIZES)
    for x in measured:
        if (divergence := last_divergence(x["name"])) is not None:
            x["divergence_of_last_steps"] = divergence
        is_trained = x["name"].startswith("adapted") and not x["name"].endswith(("-distilled", "-matched"))
        start = trained if is_trained else dense["dense"]
        lines.append(table_line(x, start))
    lines += [f"\n{x['name']}: {x['refused']}" for x in found if "refused" in x]
    lines.append(
        f"\n{SIZES.texts} held-out texts of {LENGTH} tokens, {SIZES.scored} scored each; "
        f"{len(SIZES.depths) * SIZES.samples} passkeys per length."
    )
    settings = asdict(SIZES) | {"dtype": str(DTYPE)}
    write_json(
        RESULTS / f"{name}.json", {"environment": environment(), "settings": settings, "rows": measured}
    )
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if name == ALL:
        draw(measured)
    print("\n".join(lines))


def last_divergence(name: str) -> float | None:
    """Nats per token in the last 8 steps of a row that was distilled here; None = it was not."""
    metrics = ADAPTED / name.removeprefix("adapted ") / "metrics.jsonl"
    if not name.startswith("adapted ") or not metrics.is_file():
        return None
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = [step["divergence"] for step in steps if "divergence" in step]
    return fmean(found[-8:]) if found else None


def restore(table: Path) -> None:
    """Write the rows of a committed table as files of this run, where it has none.

    Raises:
        SystemExit: the table's rows are of other texts, on which the dense model has other losses. They would
            be lost.
    """
    dense = kept_at(KEPT, "dense")
    if not table.is_file():
        return
    if not dense.is_file():
        raise SystemExit("the row `dense` is not measured: run --only dense first")
    committed = {row["name"]: row for row in read_json(table)["rows"]}
    own, theirs = read_json(dense)["nll"], committed["dense"]["nll"]
    if len(own) != len(theirs) or abs(np.subtract(own, theirs)).max() > SAME_TEXT:
        raise SystemExit(f"{table.name} has rows of other texts: give the table another --name")
    keep_committed(KEPT, committed.values())


OWN = {
    "bits": "plans: roles and bits",
    "narrow": "plans: roles and bits",
    "constant": "plans: roles and bits, constant sinks",
    "roles": "plans: roles",
    "retrieval": "plans: roles",
    "windows": "plans: roles",
    "sharing": "plans: sharing alone, as in the paper",
    "aligned": "plans: sharing alone, heads aligned",
}
"""Kinds of plans as they are drawn."""


def kind_of(name: str) -> str:
    """What a row is drawn as."""
    first, _, rest = name.partition(" ")
    if first not in ("plan", "adapted"):
        return f"{first}, heads of least cost" if rest.startswith("by costs") else first
    return OWN[rest.split("_")[0]] + (", adapted" if first == "adapted" else "")


def draw(measured: list[dict[str, Any]]) -> None:
    """Perplexity over dense, with intervals, and passkeys at LENGTH tokens, by bytes.

    There is a line per kind of row.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found: dict[str, list[dict[str, Any]]] = {}
    for x in measured:
        if not x["name"].endswith("dense") and "-" not in x["name"]:  # other ways to train the same plan
            found.setdefault(kind_of(x["name"]), []).append(x)
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    panels = figure.subplots(1, 2)
    order = sorted(found, key=lambda kind: (" " not in kind, "sharing" in kind, kind))
    for number, kind in enumerate(order):
        entries, own = found[kind], " " in kind
        style = {"label": kind, "linewidth": 2.2 if own else 1, "markersize": 7 if own else 4.5}
        style |= {"marker": "osD^vPX<>*hpd"[number % 13], "color": colormaps["tab20"](number)}
        places = [100 * x["bytes_over_dense"] for x in entries]
        middles = [x["ratio"][0] for x in entries]
        ends = [[x["ratio"][0] - x["ratio"][1], x["ratio"][2] - x["ratio"][0]] for x in entries]
        panels[0].errorbar(places, middles, [*zip(*ends, strict=True)], capsize=2, elinewidth=0.7, **style)
        keys = [100 * sum(x["passkeys"][str(LENGTH)]) / len(x["passkeys"][str(LENGTH)]) for x in entries]
        panels[1].plot(places, keys, **style)
    panels[0].axhline(1, color="0.4", linewidth=0.8)
    panels[0].set_ylim(0.985, 1.2)
    panels[0].set_ylabel("perplexity / dense (95 % over texts)")
    panels[1].set_ylabel(f"passkeys at {LENGTH} tokens (%)")
    for axes in panels:
        axes.set_xlabel("bytes held (% of dense)")
        axes.set_xlim(5, 70)
        axes.grid(alpha=0.3)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(ROOT / "docs" / "images" / "plans_smollm2.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="0/1", help="which share of the rows, as 0/2")
    parser.add_argument("--only", default="", help="beginnings of names, comma-separated")
    parser.add_argument("--assemble", action="store_true", help="write the tables of what is measured")
    parser.add_argument("--name", default=ALL, help="of the tables; another one where some rows are measured")
    parser.add_argument("--plans", action="store_true", help="make the plans")
    arguments = parser.parse_args()
    names = tuple(name for name in arguments.only.split(",") if name)
    if arguments.plans:
        make_plans(names)
    elif arguments.assemble:
        assemble(arguments.name)
    else:
        first, parts = arguments.part.split("/")
        wanted = [row for row in rows() if not names or row.name.startswith(names)]
        measure_missing(make_bench, wanted, KEPT, int(first), int(parts))
