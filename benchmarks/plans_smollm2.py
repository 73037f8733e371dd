"""Plans by byte budget on SmolLM2-135M beside every training-free method at the same bytes: perplexity, passkeys, bytes held.

    python launch/prepare_data.py --config configs/plans_smollm2.yaml           # once: text, also for output_dir=…/narrow
    python launch/explore.py --config configs/plans_smollm2.yaml                # once: costs of roles
    python launch/explore.py --config configs/plans_smollm2.yaml --set output_dir=runs/plans_smollm2/narrow \
        --set model.num_recent_tokens=112 --set explore.loss_sequences=0        # once: the same with windows of 128 tokens
    python launch/explore.py --config configs/plans_smollm2.yaml --heads        # once: retrieval heads for razor
    python benchmarks/plans_smollm2.py --plans                                  # plans of every kind and saving from these costs
    OMP_NUM_THREADS=1 python benchmarks/plans_smollm2.py --part 0/2 &
    OMP_NUM_THREADS=1 python benchmarks/plans_smollm2.py --part 1/2
    python benchmarks/plans_smollm2.py --assemble            # benchmarks/results/plans_smollm2.json and .md

A row is a plan or a method at a share of the dense bytes at 2,048 tokens. Its figures are kept in runs/plans_smollm2/, so that an
interrupted run goes on where it stopped. Perplexity: the last SCORED tokens of TEXTS held-out texts, decoded one by one
from the compressed cache; the ratio to dense has a 95 % interval over texts (paired, Student's t). Passkeys: the text is read
and compressed first, then asked. Nothing is trained but what adaptation_smollm2.py exported: those models are rows too, and
their ratio is to the dense model that was trained on the same tokens.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pod
from pod.data import held_out_documents, long_sequences
from pod.eval.answer.reading import answer_behind, branch, in_parts, judge_ahead, left_padded, pad_id
from pod.eval.answer.texts import nll_behind
from pod.eval.judge.intervals import wilson
from pod.eval.judge.verdicts import perplexity_change
from pod.eval.suites.buckets import Bucket
from pod.eval.suites.own import passkey
from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.modeling.shipped.rows import GroupedCache
from pod.models import resolve_model
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
KEPT, RESULTS = ROOT / "runs" / "plans_smollm2" / "rows", Path(__file__).parent / "results"
PLANS, NARROW = (ROOT / "runs" / "plans_smollm2" / name for name in ("plan", "narrow/plan"))
ADAPTED = ROOT / "runs" / "adaptation_smollm2"
LENGTH, SCORED, TEXTS = 2048, 128, 16
KEY_LENGTHS, DEPTHS, SAMPLES, NEW_TOKENS = (1024, 2048), tuple(i / 9 for i in range(10)), 5, 8
WINDOW = 16 + 240
SHARES = (0.10, 0.15, 0.20, 0.33, 0.50, 0.65)
DTYPE = torch.bfloat16
BATCH = 8
GROWING = {"snapkv", "pyramidkv"}
"""Methods that keep every decoded token: their prompt gets so many slots less."""
WHOLE_PROMPT = {"snapkv", "pyramidkv", "h2o", "d2o", "roco"}
"""Methods that hold the whole prompt until it ends: it is read once for all their shares."""


KINDS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "roles": ({}, (0.35, 0.4, 0.5, 0.6, 0.67, 0.7, 0.8)),
    "bits": ({"bits": [16, 4]}, (0.5, 0.67, 0.8, 0.85)),
    "sharing": ({"roles": ["follow"], "align_heads": False}, (0.35, 0.4)),
    "aligned": ({"roles": ["follow"]}, (0.35, 0.4)),
    "retrieval": ({"retrieval_weight": 10.0}, (0.4, 0.5, 0.6)),
    "narrow": ({"bits": [16, 4]}, (0.67, 0.8, 0.85, 0.9)),
    "windows": ({"roles": ["window"], "align_heads": False}, (0.5, 0.63)),
}
"""Kinds of plans: what differs in the recipe's explore section, and savings at LENGTH tokens; narrow ones have windows of 128 tokens,
those of windows alone say which heads razor keeps."""


def make_plans() -> None:
    """Every kind at every saving, from the costs that explore measured."""
    from pod.training.plans.choose import choose
    from pod.training.plans.measure import COSTS_NAME, Measured

    recipe = load_recipe(ROOT / "configs" / "plans_smollm2.yaml")
    measured = {folder: Measured.load(folder / COSTS_NAME) for folder in (PLANS, NARROW)}
    for kind, (changes, savings) in KINDS.items():
        costs = measured[NARROW if kind == "narrow" else PLANS]
        windows = {name: costs.provenance[name] for name in ("num_sink_tokens", "num_recent_tokens")}
        for saving in savings:
            explore = replace(recipe.explore, budget_length=LENGTH, target_saving=saving, **changes)
            plan = choose(costs, explore, windows).plan
            plan.save(PLANS / f"{kind}_{saving:.0%}.json".replace("%", ""))
            packed = 0 if plan.bits is None else plan.bits.count(4)
            print(
                f"{kind} {saving:.0%}: {plan.num_leads} lead, {plan.num_followers} follow, {plan.num_windows} keep windows, "
                f"{packed} layers packed, cost {plan.provenance['plan_cost']:.4f}"
            )


@dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        name: file name and line of the table.
        spec: as in ``pod.make_cache``.
        plan: file of a plan in PLANS; None = the dense model, or the plan of ``model``.
        model: folder of an adapted model; None = the model of the recipe.
        share: of the dense bytes, for methods with a budget; None = what the method holds.
        options: parameters beside the budget.
    """

    name: str
    spec: str
    plan: str | None = None
    share: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: Path | None = None


def rows() -> list[Row]:
    """The dense model, every plan that was made, every model that was adapted, every method at every share."""
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
    for spec, share, kept in (("razor", 0.5, "windows_50"), ("razor+int4", 0.2, "windows_63")):
        chosen = {"heads": pod.SharingPlan.load(PLANS / f"{kept}.json")}
        found.append(Row(f"{spec} by costs {share:.0%}", spec, options=heads | chosen))
    found += [Row("int4", "int4"), Row("simlayerkv", "simlayerkv", options={"num_recent_tokens": 256})]
    return [*found, *(Row(f"snapkv+int4 {x:.0%}", "snapkv+int4", None, x / 0.4) for x in SHARES[:3])]


def is_plan(file: Path) -> bool:
    content = read_json(file)
    return isinstance(content, dict) and "lead" in content and file.stem != "plan"


@dataclass
class Found:
    """What was measured of a row so far: NLL per text, bytes of all caches, answers by length."""

    row: Row
    nll: list[float] = field(default_factory=list)
    held: int = 0
    passkeys: dict[int, list[bool]] = field(default_factory=dict)


class Bench:
    """Texts and prompts, loaded once; the model of the last row."""

    def __init__(self) -> None:
        self.recipe = load_recipe(ROOT / "configs" / "plans_smollm2.yaml")
        self.path = resolve_model(self.recipe.model.path)
        self.tokenizer = pod.load_tokenizer(self.path)
        text = long_sequences(
            held_out_documents(self.recipe.data_dir, self.tokenizer), TEXTS, LENGTH, self.recipe.seed + 1
        )
        self.text = torch.from_numpy(text)
        self.bucket = Bucket(start=LENGTH // 2, end=LENGTH, first=LENGTH - SCORED)
        made = passkey.make_prompts(self.tokenizer, list(KEY_LENGTHS), list(DEPTHS), SAMPLES, seed=0)
        made = [self._in_parts(prompt) for prompt in made]
        self.prompts = {length: [p for p in made if p.length == length] for length in KEY_LENGTHS}
        self.loaded: tuple[Any, Any] = None, None

    def model(self, row: Row) -> Any:
        if self.loaded[0] != (row.plan, row.model):
            self.loaded = (row.plan, row.model), self._load(row)
        return self.loaded[1]

    def _load(self, row: Row) -> Any:
        if row.plan is None:
            return pod.load_model(row.model or self.path, dtype=DTYPE)
        measured = pod.SharingPlan.load(PLANS / row.plan).provenance
        windows = {name: measured[name] for name in ("num_sink_tokens", "num_recent_tokens")}
        return pod.load_model(self.path, plan=PLANS / row.plan, dtype=DTYPE, **windows)

    def cache(self, row: Row, length: int, fed: int) -> pod.PodCache:
        """A new cache that holds the row's share of dense bytes when it has seen ``length`` tokens, ``fed`` of them behind the prompt."""
        budget = None
        if row.share is not None:
            budget = round(row.share * length) - (fed if row.spec.split("+")[0] in GROWING else 0)
        return pod.make_cache(self.model(row), row.spec, budget=budget, **row.options)

    def measure(self, rows: list[Row]) -> list[dict[str, Any]]:
        """NLL per text, bytes and passkeys of rows that differ in their budgets only."""
        began, found = time.perf_counter(), [Found(row) for row in rows]
        for start in range(0, TEXTS, BATCH):
            text = self.text[start : start + BATCH]
            for x, cache, _ in self.read(found, text[:, : self.bucket.first - 1], None, LENGTH, SCORED):
                judge_ahead(self.model(x.row), cache, None, last=text[:, self.bucket.first - 1 :][:, :1])
                nll = nll_behind(self.model(x.row), cache, text, self.bucket.first, self.bucket.end)
                x.nll += nll.mean(1).tolist()
                x.held += cache.nbytes
        for length, prompts in self.prompts.items():
            for start in range(0, len(prompts), BATCH):
                self.ask(found, prompts[start : start + BATCH], length)
        now, seconds = environment(), (time.perf_counter() - began) / len(rows)
        same = {"seconds": seconds, "date": now["date"], "commit": now["commit"]}
        return [self.describe(x) | same for x in found]

    def ask(self, found: list[Found], prompts: list[passkey.Prompt], length: int) -> None:
        """Whether each answer is right; the question comes behind the compressed text."""
        model, pad = self.model(found[0].row), pad_id(self.tokenizer)
        before, asked = in_parts(prompts)
        assert before is not None
        fed = max(prompt.num_asked for prompt in prompts) + NEW_TOKENS
        ids, mask = left_padded(before, pad)
        for x, cache, hidden in self.read(found, ids, mask, prompts[0].length, fed):
            judge_ahead(model, cache, mask, hidden=hidden)
            said = answer_behind(model, self.tokenizer, cache, mask, asked, NEW_TOKENS)
            right = [passkey.is_correct(text, p.key) for text, p in zip(said, prompts, strict=True)]
            x.passkeys.setdefault(length, []).extend(right)

    @torch.no_grad()
    def read(
        self, found: list[Found], ids: Tensor, mask: Tensor | None, length: int, fed: int
    ) -> Iterator[tuple[Found, pod.PodCache, Tensor]]:
        """Each row with a cache that has read and compressed the prompts ``ids``, and the last hidden states ``[B, 1, D]``; of several
        rows what comes before the last token is read once."""
        model = self.model(found[0].row)
        common, count = self.cache(found[0].row, length, fed), ids.shape[1]

        def feed(cache: pod.PodCache, columns: slice) -> Tensor:
            seen = None if mask is None else mask[:, : columns.stop]
            given = {"input_ids": ids[:, columns], "attention_mask": seen, "past_key_values": cache}
            return model.model(**given, use_cache=True).last_hidden_state[:, -1:]

        if len(found) == 1:
            yield found[0], common, feed(common, slice(0, count))
            return
        common.begin_prompt(count)
        feed(common, slice(0, count - 1))
        for x in found:
            cache = self.cache(x.row, length, fed)
            cache.from_state(branch(common).state())
            assert isinstance(cache, GroupedCache)
            for index, layer in ((i, x) for group in cache.groups for i, x in enumerate(group.layers)):
                own = vars(cache.new_layer(index))
                vars(layer).update({name: own[name] for name in ("budget", "recents") if name in own})
            yield x, cache, feed(cache, slice(count - 1, count))

    def _in_parts(self, prompt: passkey.Prompt) -> passkey.Prompt:
        """The prompt with text and question as tokens of their own."""
        text, _, _ = prompt.text.rpartition(passkey.QUESTION)
        parts = (text, prompt.text.removeprefix(text))
        before, asked = (self.tokenizer(x, add_special_tokens=False)["input_ids"] for x in parts)
        return replace(prompt, token_ids=(*before, *asked), num_asked=len(asked))

    def describe(self, found: Found) -> dict[str, Any]:
        """What is kept of a row."""
        row, plan = found.row, self.model(found.row).config.sharing_plan
        roles = None
        if row.spec == "pod" and plan is not None:
            roles = {
                "leads": plan.num_leads,
                "followers": plan.num_followers,
                "windows": plan.num_windows,
                "bits": plan.bits,
                "asymptotic_saving": plan.asymptotic_saving,
                "cost": plan.provenance.get("cost"),
            }
        return {
            "name": row.name,
            "spec": row.spec,
            "plan": roles,
            "share": row.share,
            "nll": found.nll,
            "bytes_over_dense": found.held / TEXTS / self.dense_bytes(row),
            "passkeys": found.passkeys,
        }

    def dense_bytes(self, row: Row) -> int:
        config = self.model(row).config
        heads = config.num_hidden_layers * config.num_key_value_heads
        return 2 * heads * config.head_dim * (LENGTH - 1) * DTYPE.itemsize


def run(part: int, parts: int, only: list[str]) -> None:
    """Measure what is missing of this part."""
    wanted = [row for row in rows() if not only or any(row.name.startswith(name) for name in only)]
    together: dict[Any, list[Row]] = {}
    for row in wanted:
        if not kept_at(row).is_file():
            whole = row.share is not None and row.spec in WHOLE_PROMPT
            together.setdefault((row.spec, whole or row.name), []).append(row)
    bench = None
    for number, group in list(enumerate(together.values()))[part::parts]:
        bench = bench or Bench()
        for row, found in measured(bench, group):
            kept_at(row).parent.mkdir(parents=True, exist_ok=True)
            write_json(kept_at(row), found)
            print(f"{number + 1}/{len(together)} {headline(found)}", flush=True)


def kept_at(row: Row) -> Path:
    return KEPT / f"{row.name.replace(' ', '_').replace('%', '')}.json"


def measured(bench: Bench, group: list[Row]) -> list[tuple[Row, dict[str, Any]]]:
    """Rows with their figures, or with why a method refused."""
    refused, taken = [], []
    for row in group:
        try:
            bench.cache(row, LENGTH, SCORED)
            for length, prompts in bench.prompts.items():
                bench.cache(row, length, max(prompt.num_asked for prompt in prompts) + NEW_TOKENS)
            taken.append(row)
        except ValueError as error:
            refused.append((row, {"name": row.name, "spec": row.spec, "refused": str(error)}))
    return refused + list(zip(taken, bench.measure(taken) if taken else [], strict=True))


def headline(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"{found['name']}: refused: {found['refused']}"
    keys = {length: sum(right) / len(right) for length, right in found["passkeys"].items()}
    mean = math.exp(sum(found["nll"]) / len(found["nll"]))
    return f"{found['name']}: perplexity {mean:.2f}, bytes {found['bytes_over_dense']:.1%}, passkeys {keys}, {found['seconds']:.0f} s"


def ratio(own: list[float], dense: list[float]) -> list[float]:
    """Perplexity over dense, and its 95 % interval over texts."""
    found = perplexity_change(own, dense, [1] * len(own))
    return [1 + end for end in (found.value, *(found.interval or ()))]


def key_cell(right: list[bool]) -> str:
    """Keys found, with Wilson's interval."""
    low, high = wilson(sum(right), len(right))
    return f"{sum(right) / len(right):.0%} ({low:.0%}–{high:.0%})"


def assemble() -> None:
    """One JSON and one Markdown table from what is kept, by bytes."""
    texts = [file.read_text(encoding="utf-8").replace(f"{ROOT}/", "") for file in sorted(KEPT.glob("*.json"))]
    found = [json.loads(text) for text in texts]
    measured = sorted((x for x in found if "nll" in x), key=lambda x: x["bytes_over_dense"])
    dense = {x["name"]: x for x in measured}
    trained = dense.get("adapted dense", dense["dense"])
    columns = [
        "",
        "bytes of dense",
        "perplexity / dense (95 %)",
        *(f"passkeys {n}" for n in KEY_LENGTHS),
        "L/F/W",
    ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for x in measured:
        start = trained if x["name"].startswith("adapted") else dense["dense"]
        mean, low, high = ratio(x["nll"], start["nll"])
        x["ratio"] = [mean, low, high]
        keys = [key_cell(right) for right in x["passkeys"].values()]
        roles = (
            "–"
            if x["plan"] is None
            else "/".join(str(x["plan"][k]) for k in ("leads", "followers", "windows"))
        )
        cells = [
            x["name"],
            f"{x['bytes_over_dense']:.1%}",
            f"{mean:.3f} ({low:.3f}–{high:.3f})",
            *keys,
            roles,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{x['name']}: {x['refused']}" for x in found if "refused" in x]
    lines.append(
        f"\n{TEXTS} held-out texts of {LENGTH} tokens, {SCORED} scored each; {len(DEPTHS) * SAMPLES} passkeys per length."
    )
    settings = {
        "length": LENGTH,
        "scored": SCORED,
        "texts": TEXTS,
        "depths": DEPTHS,
        "samples": SAMPLES,
        "dtype": str(DTYPE),
    }
    write_json(
        RESULTS / "plans_smollm2.json", {"environment": environment(), "settings": settings, "rows": measured}
    )
    (RESULTS / "plans_smollm2.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(measured)
    print("\n".join(lines))


OWN = {
    "bits": "plans: roles and bits",
    "narrow": "plans: roles and bits",
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
    """Perplexity over dense, with intervals, and passkeys at LENGTH tokens, by bytes; a line per kind of row."""
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
    parser.add_argument("--plans", action="store_true", help="make the plans")
    arguments = parser.parse_args()
    if arguments.plans:
        make_plans()
    elif arguments.assemble:
        assemble()
    else:
        first, parts = arguments.part.split("/")
        run(int(first), int(parts), [x for x in arguments.only.split(",") if x])
