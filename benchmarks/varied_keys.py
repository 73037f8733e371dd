"""Numbers that stand far back, in prompts that all differ: what passkeys of one wording cannot tell.

    python benchmarks/plans_by_bytes.py --plans        # once: the plans
    OMP_NUM_THREADS=1 python benchmarks/varied_keys.py --only "dense,plan 20,razor+int4 20"
    python benchmarks/varied_keys.py --assemble        # writes results/varied_keys_smollm2.json and .md

All passkeys of `plans_by_bytes.py` have the same filler and the same question. So the first token of the
answer is one decision, made fifty times: if it is close, a plan finds nearly all of them or nearly none.
Here are two kinds of prompts of 2,048 tokens, `PROMPTS` of each:

* `repeated`: a passkey test where every prompt has another filler or another fact with its question;
* `essays`: one number of a city in Paul Graham's essays, as in the task niah.

No fact is worded as in `pod/plan/needles.py`, by which `pod explore` prices retrieval. The text is read and
compressed first, and the question comes then. Rows are those of `plans_by_bytes.py`, and SmolLM2's plans of
`plans_layers.py`; a row takes five to ten minutes on one core. Figures are kept in
runs/plans_by_bytes/smollm2-2048/keys/.
"""

import argparse
import itertools
import random
from dataclasses import replace
from typing import Any

import plans_layers
import torch
from judge_plans import Bench, Found, Row, Sizes, keep_committed, kept_at, key_cell, named, read_kept
from plans_by_bytes import CASES, DTYPE, RESULT, ROOT, plan_files, recipe_of, remove_older, rows

from pod.eval.statistics.confidence import mcnemar
from pod.eval.suites.haystack import Frame, load_sentences
from pod.eval.tasks import niah
from pod.eval.tasks.passkey import TASK, PasskeyPrompt
from pod.files import atomic_write_text, read_json, write_json
from pod.measure.machine import environment

CASE = CASES["smollm2-2048"]
KEPT = CASE.folder / "keys"
OUT = RESULT.with_name("varied_keys_smollm2.json")
LENGTH, PROMPTS = 2048, 40
RAZOR_OF_LAYERS = "razor 39 heads windows of 256"
"""RazorAttention as it was measured, with 50.8 % of the bytes; plans of layers hold 56.6 %."""
PAIRS = (
    ("plan stored 20", "razor+int4 20"),
    ("adapted stored_20-matched", "razor+int4 20"),
    ("plan 20", "razor+int4 20"),
    ("plan 20", "plan retrieval_0.5 20"),
    ("plan retrieval_0.5 20", "razor+int4 20"),
    ("plan retrieval_16 20", "razor+int4 20"),
    ("plan retrieval_16 20", "plan retrieval_0.5 20"),
    ("adapted retrieval_0.5_20-slow-distilled", "razor+int4 20"),
    ("adapted retrieval_16_20-slow-distilled", "razor+int4 20"),
    ("adapted retrieval_16_20-slow-distilled", "adapted retrieval_0.5_20-slow-distilled"),
    ("adapted retrieval_16_20-slow-distilled", "dense"),
    ("adapted retrieval_16_20-long-distilled", "adapted retrieval_16_20-slow-distilled"),
    ("adapted retrieval_16_20-long-distilled", "razor+int4 20"),
    ("adapted retrieval_16_20-long-distilled", "dense"),
    ("adapted packed_16_12.5-long-distilled", "razor+int4 15"),
    ("adapted packed_16_12.5-long-distilled", "dense"),
    ("plan stored 15", "razor+int4 15"),
    ("adapted stored_15-matched", "razor+int4 15"),
    ("layers 50 sinks constant", "heads 50 sinks tokens"),
    ("layers 50 sinks constant", RAZOR_OF_LAYERS),
)
"""Rows that are compared prompt by prompt. They hold equal bytes, but for the dense model, and for the last
pair (56.6 and 50.8 %)."""
FILLERS = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "A boat left the bay at dawn. The water was calm. Nobody spoke. The day was long.",
    "He read the paper and drank his tea. She looked out of the window. It was raining again.",
    "First we cut the wood. Then we carry it home. In winter it keeps us warm. That is all.",
    "The shop opens at eight. People come and go. Some buy bread, some buy milk, some only talk.",
)
FACTS = (
    (
        "The pass key is {key}. Remember it. {key} is the pass key.",
        "What is the pass key?",
        "The pass key is",
    ),
    ("Anna's extension is {key}. Again, it is {key}.", "What is Anna's extension?", "Anna's extension is"),
    ("The winning ticket is {key}. Remember {key}.", "Which ticket wins?", "The winning ticket is"),
    ("Your room for tonight is {key}. Yes, room {key}.", "Which room is yours?", "Your room is"),
    ("The parcel has number {key}. Look for {key}.", "Which is the parcel?", "The parcel has number"),
    ("The train that we take is {key}. Do not miss {key}.", "Which train do we take?", "We take train"),
    ("The year on the map is {key}. It says {key}.", "Which year is on it?", "The year on the map is"),
    ("The invoice of the baker is {key}. Pay {key}.", "Which do we pay?", "The invoice of the baker is"),
)
"""A fact, its question, and the beginning of the answer."""


def repeated(frame: Frame, filler: str, fact: str, depth: float, lines: int) -> str:
    """A prompt with so many lines of one filler, and a fact after ``depth`` of them."""
    text = [filler] * lines
    text.insert(round(depth * lines), fact)
    return frame.before + "\n".join(text) + frame.after


def repeated_prompts(tokenizer: Any, length: int = LENGTH, count: int = PROMPTS) -> list[PasskeyPrompt]:
    """Prompts of at most ``length`` tokens, each with another pair of filler and fact, at growing depths."""
    pairs = list(itertools.product(FILLERS, FACTS))
    random.Random(0).shuffle(pairs)
    made = []
    for number, (filler, (stated, question, begun)) in enumerate(itertools.islice(pairs, count)):
        key = str(random.Random(f"varied/{number}").randrange(10_000, 100_000))
        depth, fact = number / max(1, count - 1), stated.format(key=key)
        frame = Frame(tokenizer, f"{TASK}\n\n", f"\n\n{question}\n{begun}", True)
        lines = 0
        while len(frame.encode(repeated(frame, filler, fact, depth, lines + 1))) <= length:
            lines += 1
        text = repeated(frame, filler, fact, depth, lines)
        made.append(PasskeyPrompt.of((length, depth, number), text, frame.encode, text.rindex(question), key))
    return made


def essay_prompts(tokenizer: Any, length: int = LENGTH, count: int = PROMPTS) -> list[PasskeyPrompt]:
    """Prompts of the task niah with one number each, as passkeys."""
    depths = [i / 9 for i in range(10)]
    options = niah.NiahOptions(lengths=[length], depths=depths, samples=-(-count // len(depths)))
    sentences = load_sentences(None, length, "haystack")
    found = niah.make_needle_prompts(tokenizer, sentences, options, seed=0)[:count]
    return [
        PasskeyPrompt(x.length, x.depth, x.sample, x.text, x.token_ids, x.num_asked, x.values[0])
        for x in found
    ]


KINDS = {"repeated": repeated_prompts, "essays": essay_prompts}


def all_rows() -> list[Row]:
    """The rows of `plans_by_bytes.py`, the plans of `plans_layers.py`, and a RazorAttention beside them."""
    folder = plans_layers.plans_of("smollm2")
    found = rows(CASE)
    for row in plans_layers.rows("smollm2"):
        if row.spec == "razor":
            options = row.options | {"share": 39 / 90}
            found += [replace(row, name=RAZOR_OF_LAYERS, options=options)] if row.name == "razor 50" else []
        elif row.spec == "pod":
            found.append(row if row.plan is None else replace(row, plan=str(folder / row.plan)))
    return found


def measure(bench: Bench, prompts: dict[str, list[PasskeyPrompt]], row: Row) -> dict[str, Any]:
    """Whether each answer of a row is right, by kind of prompts."""
    right = {}
    for kind, asked in prompts.items():
        found = Found(row)
        for start in range(0, len(asked), bench.sizes.batch):
            bench.ask([found], asked[start : start + bench.sizes.batch], LENGTH)
        right[kind] = found.passkeys[LENGTH]
    now = environment()
    return {
        "name": row.name,
        "plan": bench.describe_plan(row),
        "right": right,
        "date": now["date"],
        "commit": now["commit"],
    }


def compared(pair: tuple[str, str], own: list[bool], other: list[bool]) -> str:
    """How often only one row of a pair is right on the same prompts, and whether that may be chance."""
    gained = sum(a and not b for a, b in zip(own, other, strict=True))
    lost = sum(b and not a for a, b in zip(own, other, strict=True))
    names = f"Of {len(own)} prompts, {pair[0]} alone finds {gained}, {pair[1]} alone {lost}"
    return f"* {names} (McNemar's exact test: p = {mcnemar(gained, lost):.2f})."


def assemble() -> None:
    """One JSON and one Markdown table.

    Rows of the committed table that were not measured here stay. They must be of the same prompts.
    """
    settings = {"length": LENGTH, "prompts": PROMPTS, "dtype": str(DTYPE)}
    committed = read_json(OUT) if OUT.is_file() else {"settings": settings, "rows": []}
    if committed["settings"] != settings:
        raise SystemExit(
            f"{OUT.name} has rows of other prompts: {committed['settings']}. Remove it to begin anew"
        )
    keep_committed(KEPT, committed["rows"])
    remove_older(KEPT, plan_files(CASE, all_rows()))
    found = sorted(read_kept(KEPT, ROOT), key=lambda x: x["name"])
    lines = [f"| | {' | '.join(KINDS)} |", "|" + "---|" * (len(KINDS) + 1)]
    lines += [f"| {x['name']} | {' | '.join(key_cell(x['right'][kind]) for kind in KINDS)} |" for x in found]
    rights = {x["name"]: list(itertools.chain(*x["right"].values())) for x in found}
    lines.append("")
    lines += [compared(pair, *map(rights.get, pair)) for pair in PAIRS if rights.keys() >= set(pair)]
    lines.append(f"\n{PROMPTS} prompts of {LENGTH} tokens of each kind, {DTYPE}.")
    write_json(OUT, {"environment": environment(), "settings": settings, "rows": found})
    atomic_write_text(OUT.with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of rows, comma-separated; a* is what begins with a")
    parser.add_argument("--assemble", action="store_true", help="write the tables of what is measured")
    given = parser.parse_args()
    if given.assemble:
        assemble()
        return
    wanted = named(all_rows(), given.only, parser)
    remove_older(KEPT, plan_files(CASE, wanted))
    missing = [row for row in wanted if not kept_at(KEPT, row.name).is_file()]
    if not missing:
        return
    bench = Bench(recipe_of(CASE, "constant"), CASE.folder / "plans", DTYPE, Sizes(key_lengths=()))
    prompts = {kind: make(bench.tokenizer) for kind, make in KINDS.items()}
    KEPT.mkdir(parents=True, exist_ok=True)
    for row in missing:
        found = measure(bench, prompts, row)
        write_json(kept_at(KEPT, row.name), found)
        print(
            row.name,
            {kind: f"{sum(right)}/{len(right)}" for kind, right in found["right"].items()},
            flush=True,
        )


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    main()
