"""Plans and methods by the bytes that they hold: perplexity and passkeys.

    # once: text, costs, plans
    python benchmarks/plans_by_bytes.py --model smollm2 --length 2048 --plans
    OMP_NUM_THREADS=1 python benchmarks/plans_by_bytes.py --model smollm2 --length 2048 --part 0/2 &
    OMP_NUM_THREADS=1 python benchmarks/plans_by_bytes.py --model smollm2 --length 2048 --part 1/2
    python benchmarks/plans_by_bytes.py --assemble     # results/plans_by_bytes.json and .md, pictures

Models: `smollm2` (SmolLM2-135M, 30 layers of 3 KV heads), `qwen` (Qwen2.5-Coder-0.5B-Instruct, 24 of 2) and
`gemma3` (Gemma 3 270M, 18 of 1, of which 15 layers were trained with windows of 512 tokens).
`joined_models.py` says how to install the last two. Texts of 8,192 tokens are not measured yet.

A row is a plan or a method at a share of the bytes that the dense model holds at this length. `pod explore`
chooses a plan by nats: heads keep windows, layers keep 4 bits. A plan's name says its share of the layers
that see all tokens; `gemma3` has others too, so its table says another share. Perplexity: the last tokens of
held-out texts, decoded one by one from the compressed cache. Passkeys: the text is read and compressed first,
then asked. `judge_plans.py` measures. Models that adaptation_smollm2.py exported are rows too. Those that
learned from labels are compared with the dense model trained alike, all other rows with the dense model as it
is.

Figures are kept in runs/plans_by_bytes/<model>-<length>/ and in the committed JSON, so that an interrupted
run goes on, elsewhere too. A plan of other costs is made and measured anew. To begin from nothing, remove
both.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import adaptation_smollm2
import torch
from judge_plans import (
    Bench,
    Row,
    Sizes,
    keep_committed,
    kept_at,
    measure_missing,
    named,
    of_current_plans,
    read_kept,
    table_head,
    table_line,
)
from plans_layers import model_path, plans_of

from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.modeling.model.packed_bytes import RESIDUAL
from pod.modeling.model.sharing import SharingPlan
from pod.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "plans_by_bytes"
ADAPTED = adaptation_smollm2.WORK
RESULT = Path(__file__).parent / "results" / "plans_by_bytes.json"
PICTURES = ROOT / "docs" / "images"
RECIPE = ROOT / "configs" / "plans_smollm2.yaml"
DTYPE = torch.bfloat16
STORED = 16
"""First tokens that are stored where no constants stand for them."""


KINDS: dict[str, dict[str, Any]] = {
    "retrieval_0.5": {"retrieval_weight": 0.5, "residual": 128},
    "retrieval_16": {"retrieval_weight": 16.0, "residual": 128},
    "packed_16": {"retrieval_weight": 16.0},
    "costs_0.5": {"retrieval_weight": 0.5, "rounds": 0},
}
"""Kinds of plans with constants: what differs from the section `explore` of those of the kind ``constant``.

With a residual of 128, windows of 128 tokens stay in 16 bits. By default three quarters of them are packed.
Without rounds, plans are those of the costs alone.
"""
PACKED_WINDOWS = 32
"""Residual of RazorAttention with packed windows, as that of plans."""


@dataclass(frozen=True)
class Case:
    """A model, a length, and what is measured.

    Attributes:
        model: as `--model` names it.
        pairs: layers of the model, and KV heads of one of them.
        window: tokens of a window, stored first tokens included.
        plans: shares of the dense bytes that plans hold, by their kind. What stands for the first tokens is
            the kind ``constant`` or ``stored``; those of ``KINDS`` have constants. The first kind has its
            costs in the case's own folder.
        methods: shares of the methods, by their names in ``pod.make_cache``; None = what the method holds.
            ``packed`` behind a name: older tokens of windows are packed too.
        sizes: texts and prompts.
        measuring: changes of the recipe's section `explore`.
    """

    model: str
    pairs: tuple[int, int]
    window: int
    plans: dict[str, tuple[float, ...]]
    methods: dict[str, tuple[float | None, ...]]
    sizes: Sizes
    measuring: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}-{self.sizes.length}"

    @property
    def folder(self) -> Path:
        return WORK / self.name

    def folder_of(self, kind: str) -> Path:
        """The folder of the costs of one kind of plans. Those of ``KINDS`` share those of constants."""
        own = "constant" if kind in KINDS else kind
        return self.folder if own == next(iter(self.plans)) else self.folder / own


CASES = {
    case.name: case
    for case in (
        Case(
            "smollm2",
            pairs=(30, 3),
            window=128,
            plans={
                "constant": (0.125, 0.15, 0.2, 0.33, 0.5),
                "retrieval_0.5": (0.2,),
                "retrieval_16": (0.125, 0.2),
                "packed_16": (0.125, 0.2),
                "stored": (0.15, 0.2),
            },
            methods={
                "razor+int4": (0.125, 0.15, 0.2),
                "razor+int4 packed": (0.125, 0.15, 0.2),
                "razor": (0.33, 0.5, 0.65),
                "snapkv": (0.15, 0.2, 0.33, 0.5, 0.65),
                "pyramidkv": (0.15, 0.2, 0.33, 0.5, 0.65),
                "h2o": (0.15, 0.2, 0.33, 0.5, 0.65),
                "d2o": (0.15, 0.2, 0.33, 0.5, 0.65),
                "snapkv+int4": (0.15, 0.2),
                "simlayerkv": (None,),
                "int4": (None,),
            },
            sizes=Sizes(),
        ),
        Case(
            "smollm2",
            pairs=(30, 3),
            window=256,
            plans={"constant": (0.125, 0.2, 0.33)},
            methods={"razor+int4": (0.125, 0.2), "int4": (None,)},
            sizes=Sizes(length=8192, texts=8, key_lengths=(4096, 8192), samples=2, batch=4),
            measuring=("roles=[window]", "align_heads=false"),
        ),
        Case(
            "qwen",
            pairs=(24, 2),
            window=128,
            plans={
                "constant": (0.2,),
                "retrieval_0.5": (0.125, 0.2, 0.33),
                "retrieval_16": (0.2,),
                "costs_0.5": (0.125, 0.2, 0.33),
            },
            methods={"razor+int4": (0.125, 0.2), "razor+int4 packed": (0.125, 0.2), "int4": (None,)},
            sizes=Sizes(samples=2, batch=4),
        ),
        Case(
            "gemma3",
            pairs=(3, 1),  # 15 more layers were trained with windows: no head of them has a role
            window=128,
            plans={"stored": (0.2, 0.33, 0.5)},
            methods={"pod+int4": (None,)},  # the others refuse models with windows of their own
            sizes=Sizes(batch=4),
            measuring=("rounds=0",),  # four minutes for each of a handful of plans
        ),
    )
}


def settings(case: Case, kind: str) -> list[str]:
    """What differs from the recipe, for one kind of plans."""
    length = case.sizes.length
    stored = STORED if kind == "stored" else 0
    held_out = 32_768 if length <= 2048 else case.sizes.texts * length * 5 // 4
    found = [
        f"output_dir={case.folder_of(kind)}",
        f"model.path={model_path(case.model)}",
        f"model.num_sink_tokens={stored}",
        f"model.num_recent_tokens={case.window - stored}",
        f"data.context_length={length}",
        f"data.held_out_tokens={held_out}",
        f"explore.sequence_length={length}",
        f"explore.budget_length={length}",
        "explore.loss_sequences=0",
        "explore.bits=[16, 4]",
    ]
    found += [] if kind == "stored" else ["model.sinks=constant"]
    found += [f"explore.{name}={value}" for name, value in KINDS.get(kind, {}).items()]
    return found + [f"explore.{change}" for change in case.measuring]


def recipe_of(case: Case, kind: str) -> Recipe:
    return load_recipe(RECIPE, settings(case, kind))


def run(case: Case, kind: str, script: str, *more: str) -> None:
    """Run a launcher with the recipe of one kind of plans."""
    changes = [part for setting in settings(case, kind) for part in ("--set", setting)]
    adaptation_smollm2.launch(script, RECIPE, *changes, *more)


def percent(share: float) -> str:
    """0.125 as 12.5."""
    return f"{100 * share:g}"


def plan_name(kind: str, share: float) -> str:
    """The name of a plan, which is also that of its row: plan 20, or plan stored 20."""
    return f"plan {percent(share)}" if kind == "constant" else f"plan {kind} {percent(share)}"


def plan_file(case: Case, kind: str, share: float) -> Path:
    return file_of(case, plan_name(kind, share))


def file_of(case: Case, name: str) -> Path:
    """The file of the plan of this name."""
    return case.folder / "plans" / f"{name.replace(' ', '_')}.json"


def make_plans(case: Case) -> None:
    """Text, and for each kind costs and a plan for every share. What is there stays."""
    first = next(iter(case.plans))
    (case.folder / "plans").mkdir(parents=True, exist_ok=True)
    if not (case.folder / "data" / "manifest.json").is_file():
        run(case, first, "prepare_data.py")
    for kind, shares in case.plans.items():
        data = case.folder_of(kind) / "data"
        if not data.exists() and not data.is_symlink():
            data.parent.mkdir(parents=True, exist_ok=True)
            data.symlink_to(case.folder / "data")
        make_plans_of(case, kind, shares)


def make_plans_of(case: Case, kind: str, shares: tuple[float, ...]) -> None:
    """Costs, and a plan for every share that these windows can reach."""
    from pod.plan.choose import choose, improved, in_all_layers
    from pod.plan.exploration import Exploration, residual_of
    from pod.plan.measured_costs import COSTS_NAME, MeasuredCosts
    from pod.plan.rounds import LIGHTER

    own = Exploration.of(recipe_of(case, kind))
    run(case, kind, "explore.py", "--set", "explore.rounds=0")  # costs that fit are used again
    costs = MeasuredCosts.load(own.folder / COSTS_NAME)
    made_of = costs.provenance | {"retrieval_weight": own.explore.retrieval_weight}
    residual = residual_of(own.explore, own.windows)
    if own.explore.rounds:
        made_of["lighter_costs_on_prompts"] = list(LIGHTER)
    for share in shares:
        file = plan_file(case, kind, share)
        if file.is_file() and is_made_of(SharingPlan.load(file), made_of, residual):
            continue
        explore = replace(own.explore, target_saving=1 - share)
        try:
            choice = choose(costs, explore, own.windows)
        except ValueError as error:
            print(f"{file.stem}: {error}", flush=True)
            file.unlink(missing_ok=True)  # of other costs
            continue
        plan = improved(replace(own, explore=explore), costs, choice).plan
        in_all_layers(plan).save(file)
        packed = 0 if plan.bits is None else plan.bits.count(4)
        roles = f"{plan.num_leads} lead, {plan.num_followers} follow, {plan.num_windows} keep windows"
        print(f"{file.stem}: {roles}, {packed} layers in 4 bits", flush=True)


def is_made_of(plan: SharingPlan, wanted: dict[str, Any], residual: int) -> bool:
    """Whether a plan was chosen by costs with this provenance, and with these settings."""
    if plan.packs and plan.residual != residual:
        return False
    return all(plan.provenance.get(name) == value for name, value in wanted.items())


def retrieval_heads(case: Case) -> Path:
    """The heads that RazorAttention's search found, which plans_layers.py made and which are committed."""
    return plans_of(case.model) / "retrieval_heads.json"


def razor_share(case: Case, share: float, bits: int, residual: int) -> float:
    """The share of heads that RazorAttention leaves whole to hold about so many of the bytes.

    Args:
        bits: of all layers.
        residual: how many of the newest tokens stay in 16 bits.
    """
    layers, heads = case.pairs
    for whole in range(layers * heads, -1, -1):
        lead = [
            [layer if layer * heads + head < whole else None for head in range(heads)]
            for layer in range(layers)
        ]
        plan = SharingPlan(lead=lead, bits=[bits] * layers, residual=residual)
        if plan.saving(case.sizes.length, STORED, case.window - STORED) >= 1 - share:
            return whole / (layers * heads)
    raise ValueError(f"windows of {case.window} tokens hold more than {percent(share)} % of the bytes")


def packed_budget(case: Case, share: float, bits: int) -> float:
    """The share of the tokens that every head may keep in so many bits, to hold a share of the bytes."""
    layers, heads = case.pairs
    whole = SharingPlan(lead=[[layer] * heads for layer in range(layers)], bits=[bits] * layers)
    length = case.sizes.length
    held = (
        tokens
        for tokens in range(length, 0, -1)
        if tokens * (1 - whole.saving(tokens, 0, 0)) <= share * length
    )
    return next(held) / length


def method_row(case: Case, method: str, share: float | None) -> Row:
    """The row of a method: its heads or its budget make it hold so many of the bytes."""
    name = method if share is None else f"{method} {percent(share)}"
    spec, _, packed = method.partition(" ")
    if spec == "simlayerkv":
        return Row(name, spec, options={"num_recent_tokens": 2 * case.window})
    if share is None:
        return Row(name, spec)
    bits = 4 if spec.endswith("+int4") else 16
    if spec.startswith("razor"):
        options: dict[str, Any] = {
            "heads": str(retrieval_heads(case)),
            "compression": 1000.0,
            "num_sink_tokens": STORED,
            "num_recent_tokens": case.window - STORED,
            "share": razor_share(case, share, bits, PACKED_WINDOWS if packed else RESIDUAL),
        }
        options |= {"residual": PACKED_WINDOWS} if packed else {}
        return Row(name, spec, options=options)
    return Row(name, spec, None, share if bits == 16 else packed_budget(case, share, bits))


def rows(case: Case) -> list[Row]:
    """The dense model, every plan that was made, every method, and every model that was adapted."""
    found = [Row("dense", "full")]
    for kind, shares in case.plans.items():
        files = [(plan_name(kind, share), plan_file(case, kind, share)) for share in shares]
        found += [Row(name, "pod", file.name) for name, file in files if file.is_file()]
    found += [method_row(case, name, share) for name, shares in case.methods.items() for share in shares]
    if case.name == "smollm2-2048":
        exports = {row.name: ADAPTED / row.name / "export" for row in adaptation_smollm2.rows()}
        found += [Row(f"adapted {name}", "pod", model=x) for name, x in exports.items() if x.is_dir()]
    return found


def restore(case: Case) -> None:
    """Write the rows of the committed table as files of this run, so that they are not measured again.

    What is older than its plan is removed.

    Raises:
        SystemExit: the committed rows are of other texts or prompts.
    """
    plans = plan_files(case, rows(case))
    folder = case.folder / "rows"
    committed = read_json(RESULT)["cases"].get(case.name) if RESULT.is_file() else None
    if committed is not None:
        if committed["sizes"] != sizes_of(case):
            raise SystemExit(f"{RESULT.name} has rows of {case.name} of other sizes: remove it to begin anew")
        keep_committed(folder, of_current_plans(committed["rows"], plans))
    remove_older(folder, plans)


def plan_files(case: Case, found: list[Row]) -> dict[str, Path]:
    """The file of each row's plan, or of its model's plan, by the row's name. Methods have none."""
    of_plans = {row.name: case.folder / "plans" / row.plan for row in found if row.plan is not None}
    return of_plans | {row.name: row.model / "plan.json" for row in found if row.model is not None}


def remove_older(folder: Path, plans: dict[str, Path]) -> None:
    """Remove kept figures of plans that were made anew, and of models that were trained anew with them."""
    for name in plans:
        file = kept_at(folder, name)
        if file.is_file() and not of_current_plans([read_json(file)], plans):
            file.unlink(missing_ok=True)


def sizes_of(case: Case) -> dict[str, Any]:
    """What rows of a case have in common, as JSON has it."""
    sizes = asdict(case.sizes) | {"window": case.window, "dtype": str(DTYPE)}
    return json.loads(json.dumps(sizes))


def last_divergence(name: str) -> float | None:
    """Nats per token in the last 8 steps of a row that was trained here; None = it was not."""
    metrics = ADAPTED / name.removeprefix("adapted ") / "metrics.jsonl"
    if not name.startswith("adapted ") or not metrics.is_file():
        return None
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = [step["divergence"] for step in steps if "divergence" in step]
    return fmean(found[-8:]) if found else None


def assemble() -> None:
    """One JSON, one Markdown file, and a picture of each case that has its dense row."""
    lines: list[str] = []
    kept: dict[str, Any] = {}
    for case in CASES.values():
        restore(case)
        found = read_kept(case.folder / "rows", ROOT)
        measured = sorted((x for x in found if "nll" in x), key=lambda x: x["bytes_over_dense"])
        names = [x["name"] for x in measured]
        if "dense" not in names:
            continue
        for x in measured:
            add_what_is_known(case, x)
        current = [roles_of(x) for x in measured if (x["plan"] or {}).get("prompts")]
        lines += [f"\n## {case.model}, {case.sizes.length:,} tokens\n", *table_head(case.sizes)]
        for x in measured:
            dense = dense_of(x["name"])
            if dense not in names:
                print(f"{x['name']} is left out: it is compared with {dense}, which is not measured")
                continue
            star = " *" if x["plan"] is not None and roles_of(x) not in current else ""
            lines.append(table_line(x, measured[names.index(dense)], more=star))
        lines += [f"\n{x['name']}: {x['refused']}" for x in found if "refused" in x]
        lines.append(f"\n{how_measured(case)}")
        compared = [x for x in measured if "ratio" in x]
        kept[case.name] = {"sizes": sizes_of(case), "rows": compared}
        draw(case, compared)
    write_json(RESULT, {"environment": environment(), "cases": kept})
    RESULT.with_suffix(".md").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    print("\n".join(lines))


def roles_of(x: dict[str, Any]) -> tuple[Any, Any]:
    """What the plan of a row decides: the fingerprint of its heads, and its bits."""
    return x["plan"].get("sha256"), x["plan"].get("bits")


def add_what_is_known(case: Case, x: dict[str, Any]) -> None:
    """Add to a row what its plan and its training recorded, where they are here."""
    divergence = last_divergence(x["name"])
    if divergence is not None:
        x.setdefault("divergence_of_last_steps", divergence)
    if (file := file_of(case, x["name"])).is_file():
        provenance = SharingPlan.load(file).provenance
        x["plan"] |= {name: provenance.get(name) for name in ("rounds", "prompts")}


def dense_of(name: str) -> str:
    """The row that a row is compared with: for models that learned from labels, dense trained alike."""
    return "adapted dense" if name == "adapted dense" or name.endswith("-labels") else "dense"


def how_measured(case: Case) -> str:
    """What a reader needs to know of the rows of a case."""
    sizes = case.sizes
    keys = len(sizes.depths) * sizes.samples
    return (
        f"{sizes.texts} held-out texts, {sizes.scored} tokens scored each; {keys} passkeys per length. "
        f"Windows hold {case.window} tokens. * = retrieval weighed 0.5, unless the name says 16, and was "
        "measured on prompts of 800 tokens. Today's prompts hold whole texts."
    )


def kind_of(name: str) -> str | None:
    """What a row is drawn as; None = it is not drawn."""
    words = name.split()
    if words[0] == "dense":
        return None
    if words[0] == "adapted":
        kind = next((kind for kind in KINDS if words[1].startswith(f"{kind}_")), None)
        drawn = kind is not None and name.endswith("-long-distilled")
        return f"{label_of(KINDS[kind])}, distilled" if drawn else None
    if words[0] == "plan":
        if words[1] in KINDS:
            return label_of(KINDS[words[1]])
        return "plan, stored first tokens" if words[1] == "stored" else "plan"
    return f"{words[0]}, packed windows" if "packed" in words else words[0]


def label_of(changes: dict[str, Any]) -> str:
    """How a picture names plans with these changes of the settings."""
    windows = ", windows in 16 bits" if "residual" in changes else ""
    return f"plan, retrieval weighs {changes['retrieval_weight']:g}{windows}"


def draw(case: Case, measured: list[dict[str, Any]]) -> None:
    """Perplexity over dense, with intervals, and passkeys at the full length, by bytes: a line per kind."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found: dict[str, list[dict[str, Any]]] = {}
    for x in measured:
        kind = kind_of(x["name"])
        if kind is not None:
            found.setdefault(kind, []).append(x)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    answers = [x["passkeys"][str(case.sizes.key_lengths[-1])] for x in measured]
    all_found = all(map(all, answers))  # then a picture of them says nothing
    panels = figure.subplots(1, 1 if all_found else 2, squeeze=False)[0]
    order = sorted(found, key=lambda kind: (not kind.startswith("plan"), kind))
    for number, kind in enumerate(order):
        entries, own = found[kind], kind.startswith("plan")
        style = {"label": kind, "linewidth": 2.2 if own else 1, "markersize": 7 if own else 4.5}
        style |= {"marker": "osD^vPX<>*hpd"[number % 13], "color": colormaps["tab20"](number)}
        places = [100 * x["bytes_over_dense"] for x in entries]
        middles = [x["ratio"][0] for x in entries]
        ends = [[x["ratio"][0] - x["ratio"][1], x["ratio"][2] - x["ratio"][0]] for x in entries]
        panels[0].errorbar(places, middles, [*zip(*ends, strict=True)], capsize=2, elinewidth=0.7, **style)
        if not all_found:
            right = [x["passkeys"][str(case.sizes.key_lengths[-1])] for x in entries]
            panels[1].plot(places, [100 * fmean(answers) for answers in right], **style)
    panels[0].axhline(1, color="0.4", linewidth=0.8)
    drawn = [x for entries in found.values() for x in entries]
    highest = max(x["ratio"][2] for x in drawn)
    widest = max(100 * x["bytes_over_dense"] for x in drawn)
    panels[0].set_ylim(0.985, min(highest + 0.01, 1.5))
    panels[0].set_ylabel("perplexity / dense (95 % over texts)")
    if not all_found:
        panels[1].set_ylim(-3, 103)
        panels[1].set_ylabel(f"passkeys at {case.sizes.key_lengths[-1]:,} tokens (%)")
    for axes in panels:
        axes.set_xlabel("bytes held (% of 16 bits)")
        axes.set_xlim(5, max(70, widest + 3))
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(PICTURES / f"plans_{case.name.replace('-', '_')}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = list(dict.fromkeys(case.model for case in CASES.values()))
    parser.add_argument("--model", default=models[0], choices=models)
    parser.add_argument("--length", type=int, default=2048, choices=(2048, 8192), help="tokens of a text")
    parser.add_argument("--part", default="0/1", help="which share of the rows, as 0/2")
    parser.add_argument("--only", default="", help="names of rows, comma-separated; a* is what begins with a")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plans", action="store_true", help="make the plans")
    action.add_argument("--assemble", action="store_true", help="write the tables of what is measured")
    given = parser.parse_args()
    if given.assemble:
        assemble()
        return
    case = CASES.get(f"{given.model}-{given.length}")
    if case is None:
        parser.error(f"no such case: choose {', '.join(CASES)}")
    if given.plans:
        make_plans(case)
        return
    wanted = named(rows(case), given.only, parser)
    first, parts = map(int, given.part.split("/"))
    restore(case)
    recipe = recipe_of(case, next(iter(case.plans)))
    bench = partial(Bench, recipe, case.folder / "plans", DTYPE, case.sizes)
    measure_missing(bench, wanted, case.folder / "rows", first, parts)


if __name__ == "__main__":
    main()
