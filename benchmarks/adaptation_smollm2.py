"""Adaptation of plans on SmolLM2-135M with the same tokens.

Compared are ways to train, plans of every kind, and text that asks for distant tokens.

    # once: the plans (see there for what comes before)
    python benchmarks/plans_smollm2.py --plans
    # train and export every row; a finished row is kept
    OMP_NUM_THREADS=1 python benchmarks/adaptation_smollm2.py
    # judge them as every other plan and method
    OMP_NUM_THREADS=1 python benchmarks/plans_smollm2.py --only adapted
    python benchmarks/plans_smollm2.py --assemble

Every row trains STEPS steps of ROWS packed rows through `launch/train_pod.py`, in the same order (seed 0),
and leaves runs/adaptation_smollm2/<row>/export. A distilled row sees the same packed rows, one a step. The
text with copies is the same rows, in which later spans are replaced by copies of earlier ones that lie behind
every window: which tokens teach a model to look far back is one of the questions.
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

ROOT = Path(__file__).parents[1]
WORK, PLANS = ROOT / "runs" / "adaptation_smollm2", ROOT / "runs" / "plans_smollm2" / "plan"
CONTEXT, STEPS, ROWS = 2048, 32, 2
COPIED, FAR = 96, 384  # tokens of a copied span, and least distance between its end and its copy
TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ROWS,
    "dtype": "bfloat16",
    "gradient_checkpointing": "none",
    "method": "lora",
    "learning_rate": 1e-3,
    "warmup_ratio": 4 / STEPS,
    "save_every_steps": 0,
    "keep_last": 1,
}
FULL: dict[str, Any] = {"method": "full", "learning_rate": 5e-5}
DISTILLED: dict[str, Any] = {
    "distill": 1.0,
    "learning_rate": 3e-3,
    "max_steps": STEPS * ROWS,
    "gradient_accumulation_steps": 1,
    "warmup_ratio": 4 / (STEPS * ROWS),
}
"""Such a row is compared with the dense model as it is: distilled alike, that one would not change.

Its steps have half the tokens and three times the rate, as those of plans_layers.py (LOG.md)."""
SLOW: dict[str, Any] = DISTILLED | {"learning_rate": 1e-3}
"""The rate of rows that learn from labels."""
SLOW_EVERYWHERE: dict[str, Any] = SLOW | {
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
}
"""Adapters in the feed-forward parts too."""
MATCHED: dict[str, Any] = DISTILLED | {"distill_attention": 10.0}
"""Each layer learns the output of the dense model's attention too."""


@dataclass(frozen=True)
class Row:
    """A plan and a way to train it.

    Attributes:
        name: its folder.
        plan: name of a plan of plans_smollm2.py; None = dense.
        train: what differs from TRAIN.
        text: ``plain`` or ``copies``.
    """

    name: str
    plan: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    text: str = "plain"


def rows() -> list[Row]:
    """The most telling first."""
    return [
        Row("dense"),
        Row("roles_50", "roles_50"),
        Row("roles_50-copies", "roles_50", text="copies"),
        Row("bits_67", "bits_67"),
        Row("aligned_40", "aligned_40"),
        Row("sharing_40", "sharing_40"),
        Row("bits_80", "bits_80"),
        Row("narrow_85", "narrow_85"),
        Row("bits_50", "bits_50"),
        Row("roles_67", "roles_67"),
        Row("aligned_35", "aligned_35"),
        Row("sharing_35", "sharing_35"),
        Row("dense-full", None, FULL),
        Row("roles_50-full", "roles_50", FULL),
        Row("narrow_80-distilled", "narrow_80", DISTILLED),
        Row("narrow_80-matched", "narrow_80", MATCHED),
        Row("narrow_85-matched", "narrow_85", MATCHED),
        Row("constant_80-distilled", "constant_80", DISTILLED),
        Row("constant_80-copies-distilled", "constant_80", DISTILLED, text="copies"),
        Row("constant_80-slow-distilled", "constant_80", SLOW),
        Row("constant_80-all-distilled", "constant_80", SLOW_EVERYWHERE),
    ]


def write_recipe(row: Row) -> Path:
    """The recipe of a row, in its own folder, which shares the rows of its text."""
    folder = WORK / row.name
    folder.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((ROOT / "configs" / "plans_smollm2.yaml").read_text(encoding="utf-8"))
    recipe["output_dir"] = str(folder)
    if row.plan is not None:
        file = PLANS / f"{row.plan}.json"
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
            data.symlink_to(PLANS.parent / "data")
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


def adapt(row: Row) -> None:
    """Train and export a row, then remove its checkpoints."""
    recipe = write_recipe(row)
    prepared(row)
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
        if (not names or each.name in names) and not (WORK / each.name / "export").is_dir():
            adapt(each)
