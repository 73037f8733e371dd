"""The whole chain on one machine: model → prepare → explore → train on 2 ranks → export → reload → evaluate → summary.

Each step is a command of `pod`, in a process of its own, and keeps by itself what it finds done; an interrupted
training continues from its checkpoint. Without --config it runs configs/demo.yaml (SmolLM2-135M), with DEMO_TINY=1
configs/demo_tiny.yaml (a random model, seconds instead of minutes).
"""

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pod.files import atomic_write_text, read_json, write_json
from pod.recipe import Recipe, run
from pod.schema import to_yaml

BIN = Path(sys.executable).parent
RANKS = 2  # the least that shows ZeRO and Ulysses at work
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}


class Step(NamedTuple):
    """One command of the chain."""

    name: str
    title: str
    command: list[str]


def steps_of(recipe: Recipe, config: Path, ranks: int = RANKS) -> list[Step]:
    """The chain, in order; config: file that holds the resolved recipe."""

    def pod(name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "pod", name, "--config", str(config), *more]

    export, check = recipe.export_dir, Path(recipe.output_dir) / "export_check.json"
    windows = sum(recipe.model.windows().values())  # a prompt is to exceed them
    tokens = str(min(2 * windows, recipe.data.context_length))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    deepspeed = [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(port)]
    train = [*deepspeed, "--module", "pod.commands.train", "--config", str(config)]
    reload = [sys.executable, "-m", "pod.commands.check_export", str(export), tokens, str(check)]
    return [
        Step("prepare", "texts → tokens → length-balanced, packed rows", pod("data")),
        Step("explore", "costs of roles → plan; retrieval heads for razor", pod("explore")),
        Step("train", f"adaptation to the plan, {ranks} ranks", train),
        Step("export", "Hugging Face checkpoint with its own modeling code", pod("export")),
        Step("reload", "the export in plain transformers, against the trained model", reload),
        Step("evaluate", "perplexity, passkey, bytes, decode speed → report", pod("eval")),
    ]


def main(recipe: Recipe) -> None:
    """Run the chain and print the summary. Raises: RuntimeError when a command fails."""
    import torch

    from pod.training.predict.step_time import bfloat16_speed

    gpus, folder, seconds = torch.cuda.device_count(), Path(recipe.output_dir), dict[str, float]()
    if gpus == 0 and recipe.train.dtype == "bfloat16" and bfloat16_speed() < 1:
        recipe = replace(recipe, train=replace(recipe.train, dtype="float32"))
        print("train.dtype=float32: this CPU has no instructions for bfloat16")
    atomic_write_text(folder / "recipe.yaml", to_yaml(recipe))
    put_away_other_training(recipe)
    put_away_other_data(recipe)
    steps = steps_of(recipe, folder / "recipe.yaml", 1 if gpus == 1 else RANKS)
    for number, step in enumerate(steps, start=1):
        shown = [os.path.relpath(part) if os.path.isabs(part) else part for part in step.command]
        print(f"\n[{number}/{len(steps)}] {step.name}: {step.title}\n$ {shlex.join(shown)}", flush=True)
        started, code = time.perf_counter(), run_command(step.command, gpus > 0)
        seconds[step.name] = round(time.perf_counter() - started, 1)
        if code != 0:
            raise RuntimeError(
                f"step {step.name} ended with code {code}; run the same command again to go on"
            )
        print(f"{step.name}: {seconds[step.name]} s")
    write_json(folder / "demo.json", seconds)
    print(f"\n{summary(recipe)}  ({sum(seconds.values()):.0f} s)")


def put_away_other_training(recipe: Recipe) -> None:
    """Rename a training by another recipe, which this one would go on with; the other steps see by themselves what has changed."""
    made_from = Path(recipe.output_dir) / "trained_by.yaml"
    wanted = to_yaml(recipe, {"seed", "model", "explore", "data", "train"})
    if made_from.is_file() and made_from.read_text(encoding="utf-8") == wanted:
        return
    if recipe.train_dir.exists():
        _put_away(recipe.train_dir)
    atomic_write_text(made_from, wanted)


def put_away_other_data(recipe: Recipe) -> None:
    """Rename prepared rows of other settings, which `pod data` would refuse to replace."""
    from pod.data.rows.manifest import read_manifest

    try:
        manifest = read_manifest(recipe.data_dir)
    except ValueError:  # none, or of unknown settings: `pod data` says so
        return
    held_out = (manifest.get("held_out") or {}).get("asked", 0)
    if recipe.data.other_than(manifest, recipe.seed) or held_out < recipe.held_out_tokens:
        _put_away(recipe.data_dir)


def _put_away(folder: Path) -> None:
    """Rename a folder to the first of `<folder>-1`, `<folder>-2` and so on that is free."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    kept = folder.rename(next(name for name in names if not name.exists()))
    print(f"{folder} is of another recipe or unknown; it is kept as {kept}")


def run_command(command: list[str], has_gpu: bool) -> int:
    """Run a command with this terminal's output; returns its exit code."""
    environment = QUIET | dict(os.environ) | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    if "--num_gpus" in command and not has_gpu:
        threads = max(1, (os.cpu_count() or 1) // RANKS)
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # this process was interrupted: let the step save what it can
                process.terminate()


def summary(recipe: Recipe) -> str:
    """What was made and measured: the loss, whether the export reloads, and the head of the report."""
    metrics = (recipe.train_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    error = read_json(Path(recipe.output_dir) / "export_check.json")["relative_logit_error"]
    report = (recipe.eval_dir / "report.md").read_text(encoding="utf-8").split("\n* ")[0]
    return (
        f"{report}\ntraining: {len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}\n"
        f"export: reloads in plain transformers with logits equal to {error:.0e} of their scale\n"
        f"report: {recipe.eval_dir / 'report.html'}"
    )


def estimate(recipe: Recipe) -> str:
    """The commands, in order."""
    steps = steps_of(recipe, Path(recipe.output_dir) / "recipe.yaml")
    lines = (f"{step.name}: {step.title}\n" for step in steps)
    return "".join(lines) + "Each launcher's own --dry-run tells what its step needs."


def start() -> None:
    """The command line."""
    arguments = sys.argv[1:]
    if not any(argument.split("=")[0] == "--config" for argument in arguments):
        name = "demo_tiny.yaml" if os.environ.get("DEMO_TINY") == "1" else "demo.yaml"
        arguments = ["--config", name, *arguments]
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # both use what is installed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the step at work would go on alone
    sections = "model", "explore", "data", "train", "export", "eval"
    run(main, sections=sections, description=__doc__, estimate=estimate, argv=arguments)
