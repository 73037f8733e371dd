"""The whole chain on one machine: model → explore → prepare → train on 2 ranks → export → reload → evaluate → summary.

Each step is the command that the README shows, in a process of its own. A step is kept when its recipe, the code and what it left
are as they were; an interrupted training continues from its checkpoint. Without --config it runs configs/demo.yaml
(SmolLM2-135M), with DEMO_TINY=1 configs/demo_tiny.yaml (a random model, seconds instead of minutes).
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pod.files import atomic_write_text, read_json, write_json
from pod.recipe import Recipe, run
from pod.schema import to_yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RANKS = 2  # the least that shows ZeRO and Ulysses at work
STATE = "demo.json"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore::FutureWarning"}


@dataclass(frozen=True)
class Step:
    """One command of the chain.

    sections: of the recipe, those that it reads; output: what it writes last; folder: removed before a run with other inputs,
    None where the step itself sorts out old content.
    """

    name: str
    title: str
    command: list[str]
    sections: tuple[str, ...]
    output: Path
    folder: Path | None = None


def steps_of(recipe: Recipe, config: Path, ranks: int = RANKS) -> list[Step]:
    """The chain, in order; config: file that holds the resolved recipe."""

    def launch(name: str, *more: str) -> list[str]:
        return [sys.executable, str(ROOT / "launch" / name), "--config", str(config), *more]

    export, check = recipe.export_dir, Path(recipe.output_dir) / "export_check.json"
    windows = recipe.model.num_sink_tokens + recipe.model.num_recent_tokens  # a prompt is to exceed them
    tokens = str(min(2 * windows, recipe.data.context_length))
    last = f"step-{recipe.train.steps(recipe.data.context_length):08d}"  # of which there is none where training was stopped before
    deepspeed = [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(_free_port())]
    reload = [sys.executable, str(ROOT / "examples" / "check_export.py"), str(export), tokens, str(check)]
    steps = [
        Step("explore", "costs of roles → plan", launch("explore.py"),
             ("model", "explore", "data"), recipe.plan_dir / "plan.json", recipe.plan_dir),
        Step("heads", "retrieval heads, for razor", launch("explore.py", "--heads"),
             ("model", "explore"), recipe.plan_dir / "retrieval_heads.json"),
        Step("prepare", "texts → tokens → length-balanced, packed rows", launch("prepare_data.py"),
             ("data", "model"), recipe.data_dir / "manifest.json"),
        Step("train", f"adaptation to the plan, {ranks} ranks", [*deepspeed, *launch("train_pod.py")[1:]],
             ("model", "data", "train"), recipe.train_dir / last / "checkpoint.json", recipe.train_dir),
        Step("export", "Hugging Face checkpoint with its own modeling code", launch("export_hf.py"),
             ("model", "export"), export / "config.json"),
        Step("reload", "the export in plain transformers, against the trained model", reload,
             ("model", "export"), check),
        Step("evaluate", "perplexity, passkey, bytes, decode speed → report", launch("run_eval.py"),
             ("model", "data", "eval"), recipe.eval_dir / "report.html"),
    ]  # fmt: skip
    return [step for step in steps if step.name != "heads" or "razor" in str(recipe.eval.methods)]


def main(recipe: Recipe) -> None:
    """Run the chain and print the summary."""
    began, ranks = time.perf_counter(), 1 if _gpus() == 1 else RANKS
    folder = Path(recipe.output_dir)
    atomic_write_text(folder / "recipe.yaml", to_yaml(recipe))
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    steps, previous = steps_of(recipe, folder / "recipe.yaml", ranks), code_digest()
    for number, step in enumerate(steps, start=1):
        previous, label = fingerprint(step, recipe, previous), f"[{number}/{len(steps)}] {step.name}"
        print(f"\n{label}: {step.title}", flush=True)
        kept = is_done(step, state, previous)
        if not kept:
            run_step(step, state, previous, folder)
        print(f"{label}: {'kept, nothing changed' if kept else str(state[step.name]['seconds']) + ' s'}")
    print("\n" + summary(recipe, state, time.perf_counter() - began))


def code_digest() -> str:
    """Of the package, the launchers and the versions of what they stand on."""
    files = sorted(file for part in ("pod", "launch") for file in (ROOT / part).rglob("*.py"))
    stands_on = "torch", "transformers", "deepspeed", "tokenizers"
    content = [importlib.metadata.version(name).encode() for name in stands_on]
    return hashlib.sha256(b"".join([*content, *(file.read_bytes() for file in files)])).hexdigest()


def fingerprint(step: Step, recipe: Recipe, previous: str) -> str:
    """SHA-256 over all that decides a step's output: its part of the recipe, and the fingerprint of the step before; of the
    first, the code's."""
    sections = {name: dataclasses.asdict(getattr(recipe, name)) for name in step.sections}
    inputs = [sections, recipe.seed, str(step.output), previous]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_done(step: Step, state: dict[str, Any], wanted: str) -> bool:
    """Whether the step ended with these inputs and its output is as it left it."""
    known = state.get(step.name, {})
    return known.get("fingerprint") == wanted and known.get("output", "") == _written(step.output)


def _written(path: Path) -> list[int] | None:
    """Size and time of a file; None when it is missing."""
    return [path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else None


def run_step(step: Step, state: dict[str, Any], wanted: str, folder: Path) -> None:
    """Run one step and record it in `<output_dir>/demo.json`. Raises: RuntimeError when the command fails."""
    if step.folder is not None and state.get(step.name, {}).get("fingerprint") != wanted:
        shutil.rmtree(step.folder, ignore_errors=True)  # made from other inputs
    state[step.name] = {"fingerprint": wanted}
    write_json(folder / STATE, state)
    shown = [os.path.relpath(part) if os.path.isabs(part) else part for part in step.command]
    print("$ " + shlex.join(shown), flush=True)
    began, code = time.perf_counter(), run_command(step.command)
    if code != 0 or not step.output.exists():
        why = f"ended with code {code}" if code else f"is not complete: {step.output} is missing"
        raise RuntimeError(f"step {step.name} {why}; finished steps are kept, run the same command again")
    state[step.name] |= {"seconds": round(time.perf_counter() - began, 1), "output": _written(step.output)}
    write_json(folder / STATE, state)


def run_command(command: list[str]) -> int:
    """Run a command with this terminal's output; returns its exit code."""
    environment = QUIET | dict(os.environ) | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    if "--num_gpus" in command and not _gpus():
        threads = max(1, (os.cpu_count() or 1) // RANKS)
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # this process was interrupted: let the step save what it can
                process.terminate()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def summary(recipe: Recipe, state: dict[str, Any], seconds: float) -> str:
    """What was made and measured: the loss, whether the export reloads, and the head of the report."""
    metrics = (recipe.train_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    error = read_json(Path(recipe.output_dir) / "export_check.json")["relative_logit_error"]
    report = (recipe.eval_dir / "report.md").read_text(encoding="utf-8").split("\n* ")[0]
    spent = sum(step["seconds"] for step in state.values())
    return (
        f"{report}\ntraining: {len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}\n"
        f"export: reloads in plain transformers with logits equal to {error:.0e} of their scale\n"
        f"report: {recipe.eval_dir / 'report.html'}  ({seconds:.0f} s now, {spent:.0f} s without caches)"
    )


def estimate(recipe: Recipe) -> str:
    """The commands, in order."""
    steps = steps_of(recipe, Path(recipe.output_dir) / "recipe.yaml")
    lines = (f"{step.name}: {step.title}\n" for step in steps)
    return "".join(lines) + "Each launcher's own --dry-run tells what its step needs."


def _start() -> None:
    arguments = sys.argv[1:]
    if not any(argument.split("=")[0] == "--config" for argument in arguments):
        name = "demo_tiny.yaml" if os.environ.get("DEMO_TINY") == "1" else "demo.yaml"
        arguments = ["--config", str(ROOT / "configs" / name), *arguments]
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # both use what is installed
    sections = "model", "explore", "data", "train", "export", "eval"
    run(main, sections=sections, description=__doc__, estimate=estimate, argv=arguments)


if __name__ == "__main__":
    _start()
