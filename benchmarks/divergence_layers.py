"""How far a plan is from the dense model, in nats per token: whole layers and heads, constants and tokens.

    python benchmarks/divergence_layers.py --model smollm2     # three minutes a row on one core
    python benchmarks/divergence_layers.py --assemble          # writes results/divergence_layers.json, .md

Rows are the plans of `plans_layers.py`, and the models that were distilled there. Its table has perplexities
of 16 texts, 128 tokens each, whose intervals are too wide to compare two plans. Here it is the divergence
KL(dense ‖ plan) in the second half of the same texts, and the loss there. Windows hold while a text is read,
as in an engine. So RazorAttention, which reads with all tokens, is left out.

Intervals are over texts (Student's t). Figures are kept in runs/plans_layers/<model>/divergence/. What is
made anew must be removed there by hand.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from judge_plans import Bench, keep_committed, kept_at, read_kept
from plans_layers import DTYPE, RESULT, ROOT, SIZES, WORK, own_recipe, plans_of, rows, way_of
from torch import Tensor
from tqdm import tqdm

import pod
from pod.eval.statistics.confidence import mean
from pod.files import atomic_write_text, read_json, write_json
from pod.measure.machine import environment
from pod.recipe import load_recipe

OUT = RESULT.with_name("divergence_layers.json")
FIRST = SIZES["smollm2"].length // 2
BLOCK = 256
"""Positions whose logits are held at a time."""
PAIRS = (
    ("heads 50 sinks constant", "heads 50 sinks tokens"),
    ("distilled heads constant 50", "distilled heads tokens 50"),
    ("layers 50 sinks constant", "layers 50 sinks tokens"),
    ("distilled layers constant 50", "distilled heads constant 50"),
    ("matched layers constant 67", "distilled layers constant 67"),
)
"""Rows that are compared: the first over the second."""


@torch.no_grad()
def states(model: pod.PodForCausalLM, ids: Tensor) -> Tensor:
    """Final hidden states ``[n - 1 - FIRST, hidden]`` of a text ``[n]``, from position FIRST on."""
    return model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, FIRST:-1]


@torch.no_grad()
def figures(dense: Tensor, own: Tensor, head: Any, labels: Tensor) -> tuple[float, float]:
    """Divergence and loss in nats per token, from final hidden states ``[m, hidden]`` and labels ``[m]``.

    Both models have the same output weights: adapters are in the attention only.
    """
    divergences, losses = [], []
    for wanted, seen, label in zip(dense.split(BLOCK), own.split(BLOCK), labels.split(BLOCK), strict=True):
        expected, found = (head(one).float().log_softmax(-1) for one in (wanted, seen))
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        losses.append(-found.gather(1, label[:, None])[:, 0])
    return torch.cat(divergences).mean().item(), torch.cat(losses).mean().item()


def measure(model: str, only: list[str]) -> Iterator[dict[str, Any]]:
    """Figures of each row that is missing, dense first."""
    wanted = [row for row in rows(model) if row.spec in ("full", "pod") and way_of(row.name) != "adapted"]
    wanted = [row for row in wanted if row.name == "dense" or not only or row.name.startswith(tuple(only))]
    missing = [row for row in wanted if not kept_at(WORK / model / "divergence", row.name).is_file()]
    if not missing:
        return
    sizes = replace(SIZES[model], key_lengths=())
    bench = Bench(load_recipe(own_recipe(model, "tokens")), plans_of(model), DTYPE, sizes)
    ids, dense = bench.text, bench.model(wanted[0])
    expected = [states(dense, one) for one in tqdm(ids, desc="dense", unit="text")]
    for row in missing:
        own = bench.model(row)
        found = [
            figures(wanted, states(own, one), dense.lm_head, one[FIRST + 1 :])
            for wanted, one in zip(expected, tqdm(ids, desc=row.name, unit="text"), strict=True)
        ]
        divergence, loss = (list(each) for each in zip(*found, strict=True))
        now = environment()
        same = {"date": now["date"], "commit": now["commit"]}
        yield {"name": row.name, "divergence": divergence, "loss": loss} | same


def cell(values: list[float]) -> str:
    """The mean, and its 95 % interval."""
    found = mean(values)
    return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"


def less(own: list[float], other: list[float]) -> list[float]:
    return [a - b for a, b in zip(own, other, strict=True)]


def tables(kept: list[dict[str, Any]]) -> list[str]:
    """Markdown: a line per row, by divergence, and a line per pair."""
    found = {x["name"]: x for x in kept}
    lines = ["| | divergence, nats per token | loss - dense |", "|---|---|---|"]
    others = sorted((x for x in kept if x["name"] != "dense"), key=lambda x: fmean(x["divergence"]))
    for x in sorted(others, key=lambda x: bool(way_of(x["name"]))):
        loss = less(x["loss"], found["dense"]["loss"])
        lines.append(f"| {x['name']} | {cell(x['divergence'])} | {cell(loss)} |")
    lines += ["", "| difference of | and | divergence | loss |", "|---|---|---|---|"]
    for one, other in PAIRS:
        if one in found and other in found:
            both = (less(found[one][kind], found[other][kind]) for kind in ("divergence", "loss"))
            lines.append(f"| {one} | {other} | {' | '.join(cell(each) for each in both)} |")
    return lines


def restore(model: str) -> None:
    """Write the rows of the committed JSON as files of this run, where it has none.

    Raises:
        SystemExit: they are of other texts, on which the dense model has other losses.
    """
    committed = {row["name"]: row for row in read_json(OUT)["models"].get(model, [])}
    folder = WORK / model / "divergence"
    dense = kept_at(folder, "dense")
    if committed and dense.is_file():
        change = less(read_json(dense)["loss"], committed["dense"]["loss"])
        if max(map(abs, change)) > 1e-3:
            raise SystemExit(f"{OUT.name} has rows of other texts: remove it to begin anew")
    keep_committed(folder, committed.values())


def assemble() -> None:
    """One JSON and one Markdown table of all models. Rows that were not measured here stay."""
    lines, kept = [], {}
    for model, sizes in SIZES.items():
        if OUT.is_file():
            restore(model)
        found = read_kept(WORK / model / "divergence", ROOT)
        if not found:
            continue
        kept[model] = found
        tokens = f"{sizes.texts} held-out texts of {sizes.length} tokens, the second half of each"
        lines += [f"\n## {model}\n", *tables(found), f"\n{tokens}."]
    write_json(OUT, {"environment": environment(), "dtype": str(DTYPE), "first": FIRST, "models": kept})
    atomic_write_text(OUT.with_suffix(".md"), "\n".join(lines).strip() + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(SIZES))
    parser.add_argument("--only", default="", help="beginnings of names, comma-separated")
    parser.add_argument("--assemble", action="store_true", help="write the tables of what is measured")
    given = parser.parse_args()
    torch.set_flush_denormal(True)
    if given.assemble:
        assemble()
        return
    folder = WORK / given.model / "divergence"
    for found in measure(given.model, [name for name in given.only.split(",") if name]):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(kept_at(folder, found["name"]), found)
        print(found["name"], cell(found["divergence"]), flush=True)


if __name__ == "__main__":
    main()
