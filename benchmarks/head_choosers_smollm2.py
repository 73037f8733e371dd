"""Which heads of SmolLM2-135M keep every token? RazorAttention's search, costs in nats, and a round.

All choose as many heads.

    pod data    --config plans_smollm2                 # once: texts
    pod explore --config plans_smollm2                 # once: the costs
    pod explore --config plans_smollm2 --heads         # once: RazorAttention's search
    python benchmarks/head_choosers_smollm2.py         # benchmarks/results/head_choosers_smollm2.json and .md

All other heads keep windows of 16 + 240 tokens, also while a prompt is read, and nothing is trained. A figure
is the divergence KL(dense ‖ plan), in nats per token:

* of text: the second half of 2,048-token sequences that no cost was measured on;
* of answers: passkeys, and RULER's single and several keys and variable tracking, prompts of 1,024 tokens.
  Each token of an answer follows the right ones before it. An answer is right if each of its tokens is the
  likeliest one.

Passkey prompts share their filler and their question, so one near tie at the first token of the answer can
decide all of them. The other tasks have texts of their own.
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import pod
from pod.eval.suites.ruler.ruler_tasks import make_rows
from pod.eval.tasks import passkey
from pod.files import atomic_write_text, write_json
from pod.measure.machine import environment
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.plan.choose import choose, improved
from pod.plan.exploration import Exploration
from pod.plan.measured_costs import COSTS_NAME, HEADS_NAME, MeasuredCosts
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "head_choosers_smollm2.json"
SEQUENCES, LAST = 24, 8  # of so many sequences of text, the last ones are judged
LENGTH = 1024
RULER = ("niah_single_2", "niah_multikey_1", "vt")
LEADS = (45, 30, 22)
ROUNDS = {"costs": 0, "costs and a round": 1}
"""How often windows are measured again under the plan, by what chooses."""


@dataclass(frozen=True)
class Judged:
    """Tokens ``[n]``, and the positions whose next token is judged."""

    kind: str
    input_ids: Tensor
    at: Tensor


@dataclass
class Figures:
    """What was found of one plan, by kind: divergences, and whether an answer is right."""

    divergence: dict[str, list[float]] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)


def plans(own: Exploration, folder: Path) -> dict[str, pod.SharingPlan]:
    """Plans by name, with the same number of leads for each chooser."""
    costs, heads = MeasuredCosts.load(folder / COSTS_NAME), RetrievalHeads.load(folder / HEADS_NAME)
    found = {}
    for leads in LEADS:
        found[f"RazorAttention, {leads}"] = heads.plan(leads / 90)
        for name, rounds in ROUNDS.items():
            explore = replace(
                own.explore,
                roles=["window"],
                align_heads=False,
                budget_length=0,
                target_saving=1 - leads / 90 - 1e-6,
                rounds=rounds,
                retrieval_weight=0.5,
            )
            choice = choose(costs, explore, own.windows)
            found[f"{name}, {leads}"] = improved(replace(own, explore=explore), costs, choice).plan
    for name, plan in found.items():
        assert name.endswith(f", {plan.num_leads}"), f"{name} has {plan.num_leads} leads"
    return found


def judged(own: Exploration, tokenizer: Any, texts: int, prompts: int) -> list[Judged]:
    """Texts and prompts with their answers."""
    every = replace(own, explore=replace(own.explore, num_sequences=SEQUENCES)).read()
    half = own.explore.sequence_length // 2
    found = [Judged("text", ids, torch.arange(half, len(ids) - 1)) for ids in every[-LAST:][:texts]]
    depths = [i / max(1, prompts - 1) for i in range(prompts)]
    asked = [("passkey", x.text, x.key) for x in passkey.make_prompts(tokenizer, [LENGTH], depths, 1, seed=1)]
    for task in RULER:
        rows = make_rows(task, LENGTH, tokenizer, seed=1, count=prompts)
        asked += [(task, row["input"] + row["prefix"], " ".join(row["answers"])) for row in rows]
    for kind, prompt, answer in asked:
        before, whole = (tokenizer(text)["input_ids"] for text in (prompt, f"{prompt} {answer}"))
        assert whole[: len(before)] == before, "the answer changes the tokens in front of it"
        found.append(Judged(kind, torch.tensor(whole), torch.arange(len(before) - 1, len(whole) - 1)))
    return found


@torch.no_grad()
def log_probabilities(model: Any, one: Judged) -> Tensor:
    """``[a, V]`` at the judged positions."""
    hidden = model.model(input_ids=one.input_ids[None]).last_hidden_state[0, one.at]
    return model.lm_head(hidden).float().log_softmax(-1)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per plan, with divergences and, for prompts, the share of right answers."""
    kinds = list(rows[0]["divergence"])
    lines = ["| chosen by, heads | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for row in rows:
        cells = []
        for kind in kinds:
            cell = f"{fmean(row['divergence'][kind]):.4f}"
            if kind != "text":
                cell += f", {sum(row['right'][kind])} of {len(row['right'][kind])}"
            cells.append(cell)
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=8, help="sequences of text, at most 8")
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each task")
    parser.add_argument("--set", action="append", default=[], help="settings of the recipe")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    recipe = load_recipe(ROOT / "configs" / "plans_smollm2.yaml", given.set)
    own = Exploration.of(recipe)
    dense = own.load_model()
    chosen = plans(own, recipe.plan_dir)
    models = {name: pod.load_model(dense, plan=plan) for name, plan in chosen.items()}
    found = {name: Figures() for name in ["dense", *models]}
    for one in tqdm(judged(own, own.load_tokenizer(), given.texts, given.prompts), unit="text"):
        expected = log_probabilities(dense, one)
        labels = one.input_ids[one.at + 1]
        for name, figures in found.items():
            seen = expected if name == "dense" else log_probabilities(models[name], one)
            divergence = (expected.exp() * (expected - seen)).sum(-1).mean().item()
            figures.divergence.setdefault(one.kind, []).append(divergence)
            figures.right.setdefault(one.kind, []).append(bool((seen.argmax(-1) == labels).all()))
    rows = [
        {"name": name, "divergence": figures.divergence, "right": figures.right}
        for name, figures in found.items()
    ]
    settings = {
        "texts": given.texts,
        "prompts": given.prompts,
        "length": LENGTH,
        "explore": vars(recipe.explore),
    }
    leads = {name: [list(row) for row in plan.lead] for name, plan in chosen.items()}
    write_json(given.out, {"environment": environment(), "settings": settings, "rows": rows, "plans": leads})
    atomic_write_text(given.out.with_suffix(".md"), table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
