"""Run all steps on one machine: prepare data, explore, train, export, reload, evaluate.

Without --config the command runs the recipe demo (SmolLM2-135M). With DEMO_TINY=1 it runs demo_tiny: a random
model that takes seconds and gives numbers without meaning. Each step is a command of its own, which is
printed before it starts. To continue an interrupted run, use the same command again; it keeps finished steps.

  pod demo
  pod demo --config demo_tiny
  pod demo --dry-run                           the steps, without running them"""

import contextlib
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
from typing import Any, NamedTuple

from pod.files import atomic_write_text, read_json, write_json
from pod.recipe import Recipe, run
from pod.schema import to_yaml
from pod.verbosity import is_quiet

BIN = Path(sys.executable).parent
"""Folder with the programs of this Python, such as `deepspeed`."""
RESOLVED = "demo_recipe.yaml"
"""The file in a demo's output_dir that holds its recipe with every field.

It is not recipe.yaml, because one that lies there may be the user's own.
"""
RANKS = 2  # the smallest number with which ZeRO and Ulysses have something to divide
# A step has this time to save and to end by itself; then it gets SIGTERM.
_CTRL_C_SECONDS = 30
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}
"""Environment variables that silence libraries in the steps. Those that are set already keep their value."""


class DemoStep(NamedTuple):
    """One command of the chain."""

    name: str
    title: str
    """What the step does, in the words that are printed before it starts."""
    command: list[str]
    """The program and its arguments."""


def steps_of(recipe: Recipe, config: Path, ranks: int = RANKS) -> list[DemoStep]:
    """The steps of the chain, in order.

    Args:
        config: the file that holds the resolved recipe.
        ranks: processes of the training.
    """

    def pod(name: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "pod", name, "--config", str(config), *more]

    export, check = recipe.export_dir, Path(recipe.output_dir) / "export_check.json"
    windows = sum(recipe.model.windows().values())  # the prompt shall be longer than these
    tokens = str(min(2 * windows, recipe.data.context_length))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    deepspeed = [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(port)]
    train = [*deepspeed, "--module", "pod.commands.train", "--config", str(config)]
    reload = [sys.executable, "-m", "pod.commands.check_export", str(export), tokens, str(check)]
    return [
        DemoStep("prepare", "turn text into packed training rows", pod("data")),
        DemoStep("explore", "measure the heads and write a plan", pod("explore")),
        DemoStep("train", f"fine-tune the model under the plan, {ranks} processes", train),
        DemoStep("export", "write a Hugging Face model folder", pod("export")),
        DemoStep("reload", "load it with plain transformers and compare the logits", reload),
        DemoStep(
            "evaluate",
            "measure perplexity, passkey retrieval, bytes and speed; write the report",
            pod("eval"),
        ),
    ]


def main(recipe: Recipe, config: str = "demo") -> None:
    """Run the chain and print the summary.

    Args:
        config: the recipe as the command line names it, for the command that is printed at the end.

    Raises:
        RuntimeError: a command fails.
    """
    import torch

    from pod.training.predict.step_time import bfloat16_speed

    gpus = torch.cuda.device_count()
    folder = Path(recipe.output_dir)
    seconds = dict[str, float]()
    if gpus == 0 and recipe.train.dtype == "bfloat16" and bfloat16_speed() < 1:
        recipe = replace(recipe, train=replace(recipe.train, dtype="float32"))
        print("training in float32: bfloat16 is slower on this CPU")
    atomic_write_text(folder / RESOLVED, to_yaml(recipe))
    put_away_other_training(recipe)
    put_away_other_data(recipe)
    steps = steps_of(recipe, folder / RESOLVED, 1 if gpus == 1 else RANKS)
    for number, step in enumerate(steps, start=1):
        shown = [os.path.relpath(part) if os.path.isabs(part) else part for part in step.command]
        print(f"\n[{number}/{len(steps)}] {step.name}: {step.title}\n$ {shlex.join(shown)}", flush=True)
        started = time.perf_counter()
        code = run_command(step.command, gpus > 0)
        seconds[step.name] = round(time.perf_counter() - started, 1)
        if code != 0:
            raise RuntimeError(
                f"step {step.name} failed with exit code {code}; its message is above. "
                "To continue from this step, run the same command again"
            )
        print(f"{step.name}: done in {seconds[step.name]} s")
    write_json(folder / "demo.json", seconds)
    print(f"\n{summary(recipe)}  ({sum(seconds.values()):.0f} s)")
    print(how_to_serve(recipe, config))


def put_away_other_training(recipe: Recipe) -> None:
    """Rename the training folder when it was made with another recipe: this demo would otherwise continue it.

    Steps other than training notice a changed recipe themselves.
    """
    made_from = Path(recipe.output_dir) / "trained_by.yaml"
    wanted = to_yaml(recipe, {"seed", "model", "explore", "data", "train"})
    if made_from.is_file() and made_from.read_text(encoding="utf-8") == wanted:
        return
    if recipe.train_dir.exists():
        _put_away(recipe.train_dir)
    atomic_write_text(made_from, wanted)


def put_away_other_data(recipe: Recipe) -> None:
    """Rename the folder of rows when it was made with other settings: `pod data` would not replace it."""
    from pod.data.rows.manifest import read_manifest

    try:
        manifest = read_manifest(recipe.data_dir)
    except ValueError:  # the rows are missing or of unknown settings: `pod data` reports it
        return
    held_out = (manifest.get("held_out") or {}).get("asked", 0)
    if recipe.data.other_than(manifest, recipe.seed) or held_out < recipe.held_out_tokens:
        _put_away(recipe.data_dir)


def _put_away(folder: Path) -> None:
    """Rename a folder to the first of `<folder>-1`, `<folder>-2` and so on that is free."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    kept = folder.rename(next(name for name in names if not name.exists()))
    print(f"{folder} was made with other settings; it was renamed to {kept}")


def run_command(command: list[str], has_gpu: bool) -> int:
    """Run a command with this terminal's output; returns its exit code."""
    environment = QUIET | dict(os.environ) | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    if "--num_gpus" in command and not has_gpu:
        threads = max(1, (os.cpu_count() or 1) // RANKS)
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    output = subprocess.DEVNULL if is_quiet() else None
    with subprocess.Popen(command, env=environment, stdout=output) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sends Ctrl-C to the step as well
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CTRL_C_SECONDS)
            raise
        finally:
            if process.poll() is None:  # the demo was stopped from outside: let the step save what it can
                process.terminate()
                process.wait()


def summary(recipe: Recipe) -> str:
    """The first part of the report, how long the training was, and how far the export's logits differ.

    Losses are left out: steps read different texts, so the last loss may be the higher one.
    """
    metrics = (recipe.train_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    labels = [row["labels"] for row in map(json.loads, metrics) if "labels" in row]
    error = read_json(Path(recipe.output_dir) / "export_check.json")["relative_logit_error"]
    report = (recipe.eval_dir / "report.md").read_text(encoding="utf-8").split("\n* ")[0]
    return (
        f"{report}\ntraining: {len(labels)} steps on {sum(labels):,.0f} tokens\n"
        f"export: loads with plain transformers, logits equal to a relative difference of {error:.0e}\n"
        f"report: {recipe.eval_dir / 'report.html'}"
    )


FOR_VLLM = "explore.target=vllm", "model.sinks=constant", "model.num_sink_tokens=0"
"""The settings (`--set`) that give a demo a plan which vLLM can run."""


def how_to_serve(recipe: Recipe, config: str) -> str:
    """The commands that serve the demo's export with vLLM.

    Where vLLM cannot run the model, the result says why. If the plan is the reason (heads of one layer
    differ, or bits, or stored first tokens), it is the command of another demo, whose plan vLLM can run.

    Args:
        config: the recipe as the command line names it.
    """
    from pod.export import check_servable, serve_command
    from pod.modeling.model.config import PodConfig

    config_of_model = PodConfig.from_pretrained(recipe.export_dir)
    try:
        check_servable(config_of_model)
    except ValueError as error:
        try:
            check_servable(without_plan(config_of_model))
        except ValueError:
            return f"serving: vLLM cannot run this model: {error}"
        folder = recipe.output_dir.rstrip("/") + "-vllm"
        changes = " ".join(f"--set {change}" for change in (*FOR_VLLM, f"output_dir={folder}"))
        return (
            "serving: vLLM runs plans of whole layers in 16 bits, with constants for the first tokens. "
            "This plan is not of that kind. For one that it runs: "
            f"pod demo --config {config} {changes}"
        )
    resolved = Path(recipe.output_dir) / RESOLVED
    command = f"pod export --config {resolved} --format vllm"
    return f"serving: {command} && {serve_command(recipe.served_dir)}"


def without_plan(config: Any) -> Any:
    """The configuration of the same model in which every head keeps every token, in 16 bits.

    A model of layout `cla` or `window` keeps its layout: it was trained for it.
    """
    from pod.modeling.model.sharing import SharingPlan

    if config.layout != "pod":
        return config
    dense = SharingPlan.dense(config.num_hidden_layers, config.num_key_value_heads)
    own = config.to_dict() | {"lead": dense.lead, "kv_bits": None, "head_order": None, "sinks": "tokens"}
    return type(config).from_dict(own)


def estimate(recipe: Recipe) -> str:
    """Text for `--dry-run`: the steps, in order."""
    steps = steps_of(recipe, Path(recipe.output_dir) / RESOLVED)
    lines = (f"{step.name}: {step.title}\n" for step in steps)
    return (
        "".join(lines) + "What a step needs: the same command with --dry-run, "
        "for example `pod train --config demo --dry-run`"
    )


def start() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if not any(argument.split("=")[0] in ("--config", "-c") for argument in arguments):
        name = "demo_tiny.yaml" if os.environ.get("DEMO_TINY") == "1" else "demo.yaml"
        arguments = ["--config", name, *arguments]
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # both recipes need installed packages only
    # Without this, the step at work would go on alone after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sections = "model", "explore", "data", "train", "export", "eval"
    run(main, sections=sections, description=__doc__, estimate=estimate, argv=arguments)
