"""Ways to train plans of SmolLM2-135M.

    # once: the plans (see there for what comes before)
    python benchmarks/plans_by_bytes.py --model smollm2 --plans
    # train and export every row; a finished row is kept while its plan is the same
    OMP_NUM_THREADS=1 python benchmarks/adaptation_smollm2.py
    # judge them as every other plan and method
    OMP_NUM_THREADS=1 python benchmarks/plans_by_bytes.py --model smollm2 --only "adapted*"
    python benchmarks/plans_by_bytes.py --assemble

A row trains STEPS steps of one packed row, or four times as many (`LONG`), through `launch/train_pod.py`, in
the same order (seed 0), and leaves runs/adaptation_smollm2/<row>/export. The text with copies is the same
rows, in which later spans are replaced by copies of earlier ones that lie behind every window: which tokens
teach a model to look far back is one of the questions.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import pod
from pod.data import PackedDataset, write_packed_rows
from pod.files import write_json
from pod.training.checkpoint.run_identity import plan_sha256

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "adaptation_smollm2"
OF_PLANS = ROOT / "runs" / "plans_by_bytes" / "smollm2-2048"
"""Where plans_by_bytes.py has its plans and its text."""
STEPS = 64
COPIED, FAR = 96, 384  # tokens of a copied span, and least distance between its end and its copy
TRAIN: dict[str, Any] = {
    "distill": 1.0,
    "max_steps": STEPS,
    "gradient_accumulation_steps": 1,
    "dtype": "bfloat16",
    "gradient_checkpointing": "none",
    "method": "lora",
    "learning_rate": 3e-3,
    "warmup_ratio": 4 / STEPS,
    "save_every_steps": 0,
    "keep_last": 1,
}
"""Distilled rows are compared with the dense model as it is: distilled alike, that one would not change."""
LABELS: dict[str, Any] = {"distill": 0.0, "learning_rate": 1e-3}
"""Such rows learn from the text itself, and are compared with the dense model trained alike."""
SLOW: dict[str, Any] = {"learning_rate": 1e-3}
LONG: dict[str, Any] = SLOW | {"max_steps": 4 * STEPS, "warmup_ratio": 1 / STEPS, "allow_repeats": True}
"""Four times as many tokens, which are each row of the text twice."""
SLOW_EVERYWHERE: dict[str, Any] = SLOW | {
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
}
"""Adapters in the feed-forward parts too."""
MATCHED: dict[str, Any] = {"distill_attention": 10.0}
"""Each layer learns the output of the dense model's attention too."""


@dataclass(frozen=True)
class Row:
    """A plan and a way to train it.

    Attributes:
        name: its folder.
        plan: stem of a plan's file, as plans_by_bytes.py names it; None = dense.
        train: what differs from TRAIN.
        text: ``plain`` or ``copies``.
    """

    name: str
    plan: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    text: str = "plain"


def rows() -> list[Row]:
    return [
        Row("dense", None, LABELS),
        Row("33-labels", "plan_33", LABELS),
        Row("stored_20-distilled", "plan_stored_20"),
        Row("stored_20-matched", "plan_stored_20", MATCHED),
        Row("stored_15-matched", "plan_stored_15", MATCHED),
        Row("retrieval_0.5_20-distilled", "plan_retrieval_0.5_20"),
        Row("retrieval_0.5_20-copies-distilled", "plan_retrieval_0.5_20", text="copies"),
        Row("retrieval_0.5_20-slow-distilled", "plan_retrieval_0.5_20", SLOW),
        Row("retrieval_0.5_20-all-distilled", "plan_retrieval_0.5_20", SLOW_EVERYWHERE),
        Row("20-slow-distilled", "plan_20", SLOW),
        Row("retrieval_16_20-slow-distilled", "plan_retrieval_16_20", SLOW),
        Row("retrieval_16_20-long-distilled", "plan_retrieval_16_20", LONG),
        Row("retrieval_16_12.5-slow-distilled", "plan_retrieval_16_12.5", SLOW),
        Row("retrieval_16_12.5-long-distilled", "plan_retrieval_16_12.5", LONG),
        Row("33-slow-distilled", "plan_33", SLOW),
        Row("packed_16_12.5-long-distilled", "plan_packed_16_12.5", LONG),
        Row("packed_16_20-long-distilled", "plan_packed_16_20", LONG),
    ]


def write_recipe(row: Row) -> Path:
    """The recipe of a row, in its own folder, which shares the rows of its text."""
    folder = WORK / row.name
    folder.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((ROOT / "configs" / "plans_smollm2.yaml").read_text(encoding="utf-8"))
    recipe["output_dir"] = str(folder)
    if row.plan is not None:
        file = OF_PLANS / "plans" / f"{row.plan}.json"
        plan = pod.SharingPlan.load(file)
        recipe["model"] |= {name: getattr(plan, name) for name in ("num_sink_tokens", "num_recent_tokens")}
        recipe["model"] |= {} if plan.sinks == "tokens" else {"sinks": plan.sinks}
        recipe["model"]["plan"] = str(file)
    else:
        recipe["model"]["layout"] = "dense"
    recipe["train"] = TRAIN | row.train
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def launch(script: str, recipe: Path, *settings: str) -> None:
    """Run a launcher in one process, with these arguments behind its recipe; its output passes through."""
    environment = {"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, ROOT / "launch" / script, "--config", recipe, *settings]
    subprocess.run(command, env=environment, check=True)


def prepared(row: Row) -> None:
    """The packed rows of the row's text, made once and linked into its folder."""
    data = WORK / row.text / "data"
    if not (data / "manifest.json").is_file():
        if row.text == "plain":
            # Those whose held-out text judges the plans: none of it is trained on.
            data.parent.mkdir(parents=True, exist_ok=True)
            data.symlink_to(OF_PLANS / "data")
        else:
            prepared(Row("plain"))
            write_copies(PackedDataset(WORK / "plain" / "data"), data)
    link = WORK / row.name / "data"
    if not link.is_symlink() and row.name != row.text:
        link.symlink_to(data)


def write_copies(plain: PackedDataset, target: Path) -> None:
    """The plain rows with copies.

    In their longer documents, spans are replaced by copies of spans that lie behind every window.
    """
    draw = np.random.default_rng(0)

    def with_copies(tokens: np.ndarray) -> np.ndarray:
        for place in range(COPIED + FAR, len(tokens) - COPIED, 2 * COPIED):
            start = int(draw.integers(place - FAR - COPIED + 1))
            tokens[place : place + COPIED] = tokens[start : start + COPIED]
        return tokens

    same = ("context_length", "vocab_size", "tokenizer_sha256", "pad_token_id")
    rows = ([with_copies(tokens.copy()) for tokens in plain.documents(i)] for i in range(len(plain)))
    write_packed_rows(target, rows, **{name: plain.manifest[name] for name in same})


def is_trained(row: Row) -> bool:
    """Whether a row was exported, with the plan that is there now."""
    export = WORK / row.name / "export"
    now = OF_PLANS / "plans" / f"{row.plan}.json"
    if not export.is_dir() or row.plan is None or not now.is_file():
        return export.is_dir()
    made, wanted = (pod.SharingPlan.load(file) for file in (export / "plan.json", now))
    decided = [(plan_sha256(plan), plan.bits, plan.residual) for plan in (made, wanted)]
    return decided[0] == decided[1]


def adapt(row: Row) -> None:
    """Train and export a row, then remove its checkpoints."""
    recipe = write_recipe(row)
    prepared(row)
    if (WORK / row.name / "export").is_dir():  # of another plan
        shutil.rmtree(WORK / row.name / "export")
        shutil.rmtree(WORK / row.name / "train", ignore_errors=True)
    launch("train_pod.py", recipe)
    launch("export_hf.py", recipe)
    shutil.copy(WORK / row.name / "train" / "metrics.jsonl", WORK / row.name / "metrics.jsonl")
    shutil.rmtree(WORK / row.name / "train")
    write_json(WORK / row.name / "row.json", {"plan": row.plan, "train": TRAIN | row.train, "text": row.text})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of rows, comma-separated")
    names = {name for name in parser.parse_args().only.split(",") if name}
    for each in rows():
        if (not names or each.name in names) and not is_trained(each):
            adapt(each)
