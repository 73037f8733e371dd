"""Plans of SmolLM2-135M by allowed roles and saving: roles, cost and perplexity.

Roles are those chosen. Perplexity is before any adaptation.

    python launch/explore.py --config configs/plans_smollm2.yaml    # once: the costs
    # benchmarks/results/plan_costs_smollm2.json
    python benchmarks/plan_costs_smollm2.py

Costs, calibration texts and windows (16 + 240) are those of the recipe. Perplexity is that of 2,048-token
sequences of the same held-out text which calibration has not seen: of the last eight of 24 the first
--sequences of EVALUATION. Savings are meant in the limit of long sequences. Plans go to
runs/plan_costs/<kind>_<percent>.json; rows that are in the result are not measured again. Weights and hidden
states are bfloat16.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pod
from pod.files import write_json
from pod.measure.machine import environment
from pod.plan.args import ExploreArgs
from pod.plan.choose import Choice, choose, choose_by_similarity, plan_loss
from pod.plan.exploration import Exploration
from pod.plan.measured_costs import find_costs, find_similarity
from pod.plan.similarity import greedy_plan
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_costs_smollm2.json"
PLANS = ROOT / "runs" / "plan_costs"
SEQUENCES = 24
EVALUATION = (18, 20, 23, 22, 16, 17, 19, 21)  # taken from the left; 18 and 23 are prose, the others code
SIMILARITY: dict[str, Any] = {"cost": "similarity", "roles": ["follow"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": SIMILARITY,
    "dp": SIMILARITY,
    "text": {"roles": ["follow"], "align_heads": False, "retrieval_weight": 0.0},
    "retrieval": {"roles": ["follow"], "align_heads": False},
    "aligned": {"roles": ["follow"]},
    "windows": {"roles": ["window"]},
    "roles": {},
    "roles-text": {"retrieval_weight": 0.0},
}
"""What the settings of `explore` are beside the saving."""


def plan_at(kind: str, percent: int, own: Exploration) -> pod.SharingPlan | None:
    """The plan of a kind, None where its roles do not reach the saving."""
    changes = KINDS[kind] | {"target_saving": percent / 100, "budget_length": 0}
    if percent >= 50 and "window" not in changes.get("roles", ["window"]):
        return None
    explore: ExploreArgs = replace(own.explore, **changes)
    if kind == "greedy":
        similarity = find_similarity(own)
        plans = (
            greedy_plan(
                similarity.tensors["similarity"], similarity.provenance["num_key_value_heads"], t / 1000
            )
            for t in range(1001)
        )
        return min(plans, key=lambda plan: abs(plan.asymptotic_saving - percent / 100))
    if kind == "dp":
        return choose_by_similarity(find_similarity(own), explore, own.windows).plan
    choice: Choice = choose(find_costs(own, say=lambda line: None), explore, own.windows)
    return choice.plan


class Losses:
    """Loss of plans on the evaluation texts, the weights in the order that each plan names."""

    def __init__(self, own: Exploration, sequences: int):
        self.own, self.order = own, ()
        every = replace(own, explore=replace(own.explore, num_sequences=SEQUENCES))
        tokens = every.read()
        self.tokens = [tokens[index] for index in EVALUATION[:sequences]]

    def perplexity(self, plan: pod.SharingPlan) -> float:
        if self.order != plan.head_order:
            dense = pod.SharingPlan.dense(plan.num_layers, plan.num_key_value_heads)
            self.model = replace(self.own, settings=self.own.settings | {"dtype": "bfloat16"}).load_model(
                replace(dense, head_order=plan.head_order)
            )
            self.order = plan.head_order
        return math.exp(plan_loss(self.model, plan, self.tokens))


def row_of(kind: str, percent: int, plan: pod.SharingPlan) -> dict[str, Any]:
    found = plan.provenance
    return {
        "plan": kind,
        "percent": percent,
        "saving": plan.asymptotic_saving,
        "leads": plan.num_leads,
        "followers": plan.num_followers,
        "windows": plan.num_windows,
        "cost": found.get("plan_cost"),
        "cost_without_follow": found.get("plan_cost_without_follow"),
        "cost_without_window": found.get("plan_cost_without_window"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=4, help="sequences to evaluate on, at most 8")
    parser.add_argument("--savings", default="40,50,60,70,35,30", help="savings in percent, in this order")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of plans, in this order")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    PLANS.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(ROOT / "configs" / "plans_smollm2.yaml", [])
    own = Exploration.of(recipe)
    settings = {
        "sequences": list(EVALUATION[: args.sequences]),
        "explore": vars(recipe.explore),
        **own.windows,
    }
    rows: list[dict[str, Any]] = []
    if args.output.exists() and json.loads(args.output.read_text()).get("settings") == settings:
        rows = json.loads(args.output.read_text())["rows"]
    losses = Losses(own, args.sequences)
    dense = pod.SharingPlan.dense(*np.shape(find_costs(own).tensors["lead4"]))
    cells = [
        ("dense", 0),
        *((k, p) for p in map(int, args.savings.split(",")) for k in args.kinds.split(",")),
    ]
    for kind, percent in cells:
        plan = dense if kind == "dense" else plan_at(kind, percent, own)
        if plan is None or any((x["plan"], x["percent"]) == (kind, percent) for x in rows):
            continue
        plan.save(PLANS / f"{kind}_{percent}.json")
        rows.append(row_of(kind, percent, plan) | {"perplexity": losses.perplexity(plan)})
        result = {"benchmark": "plan_costs_smollm2", "environment": environment(), "settings": settings}
        write_json(args.output, result | {"rows": rows})
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
