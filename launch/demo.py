"""The whole chain on one machine: model → explore → prepare → train on 2 ranks → export → reload → evaluate → summary.

Each step is the command that the README shows, in a process of its own. A step whose inputs did not change and whose output is
still there is skipped; an interrupted training continues from its checkpoint. Without --config it runs configs/demo.yaml
(SmolLM2-135M), with DEMO_TINY=1 configs/demo_tiny.yaml (a random model, seconds instead of minutes).
"""

import argparse
import contextlib
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pod.files import atomic_write_bytes, atomic_write_text, read_json, write_json
from pod.models import resolve_model
from pod.recipe import Recipe, run
from pod.schema import to_yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "PYTHONUNBUFFERED": "1",
}
RANKS = 2  # the least that shows ZeRO-3 and Ulysses at work
_VERSIONED = ("torch", "transformers", "deepspeed", "tokenizers")


@dataclass(frozen=True)
class Step:
    """One command of the chain.

    sections: sections of the recipe that it reads; code: files and folders of this repository that decide its output.
    outputs: files that exist when it is complete; folder: removed before a run with other inputs, None where the step itself
    sorts out old content. complete: a further check, for steps that may end early without an error.
    """

    name: str
    title: str
    command: list[str]
    sections: tuple[str, ...]
    code: tuple[str, ...]
    outputs: tuple[Path, ...]
    folder: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    complete: Callable[[], bool] = lambda: True


MODEL_CODE = ("pod/models.py", "pod/modeling", "pod/kernels")


def steps_of(recipe: Recipe, config: Path) -> list[Step]:
    """The chain, in order. config: file that holds the resolved recipe."""
    given = ["--config", str(config)]
    return [*_preparation(recipe, given), _training(recipe, given), *_results(recipe, given)]


def _preparation(recipe: Recipe, given: list[str]) -> list[Step]:
    steps = [
        Step(
            name="explore",
            title="costs of roles → plan",
            command=_script("explore.py", given),
            sections=("model", "explore", "data"),
            code=(*MODEL_CODE, "pod/data", "pod/training/plans", "launch/explore.py"),
            outputs=(recipe.plan_dir / "plan.json",),
            folder=recipe.plan_dir,
        ),
        Step(
            name="prepare",
            title="texts → tokens → length-balanced, packed rows",
            command=_script("prepare_data.py", given),
            sections=("data", "model"),
            code=("pod/models.py", "pod/data", "launch/prepare_data.py"),
            outputs=(recipe.data_dir / "manifest.json",),
        ),
    ]
    if any("razor" in name for name in recipe.eval.methods):
        steps.insert(1, _head_search(recipe, given))
    return steps


def _head_search(recipe: Recipe, given: list[str]) -> Step:
    return Step(
        name="heads",
        title="retrieval heads, for razor",
        command=_script("explore.py", [*given, "--heads"]),
        sections=("model", "explore"),
        code=(*MODEL_CODE, "pod/training/plans/heads.py", "launch/explore.py"),
        outputs=(recipe.plan_dir / "retrieval_heads.json",),
    )


def _training(recipe: Recipe, given: list[str]) -> Step:
    parallel = f"{_ranks(recipe)} ranks, ZeRO-3, sequence parallel {recipe.train.sequence_parallel_size}"
    return Step(
        name="train",
        title=f"adaptation to the plan, {parallel}",
        command=_training_command(recipe, given),
        sections=("model", "data", "train"),
        code=(*MODEL_CODE, "pod/data", "pod/training", "launch/train_pod.py"),
        outputs=(recipe.train_dir / "latest", recipe.train_dir / "metrics.jsonl"),
        folder=recipe.train_dir,
        environment=_training_environment(recipe),
        complete=lambda: _trained_steps(recipe) >= recipe.train.max_steps,
    )


def _results(recipe: Recipe, given: list[str]) -> list[Step]:
    return [
        Step(
            name="export",
            title="Hugging Face checkpoint with its own modeling code",
            command=_script("export_hf.py", given),
            sections=("model", "export"),
            code=(*MODEL_CODE, "pod/training", "launch/export_hf.py"),
            outputs=(export_dir(recipe) / "config.json",),
        ),
        Step(
            name="reload",
            title="the export in plain transformers, against the trained model",
            command=_script("demo.py", [*given, "--check-export"]),
            sections=("model", "export"),
            code=(*MODEL_CODE, "launch/demo.py"),
            outputs=(_check_file(recipe),),
        ),
        Step(
            name="evaluate",
            title="perplexity, passkey, bytes, decode speed → report",
            command=_script("run_eval.py", given),
            sections=("model", "data", "eval"),
            code=(*MODEL_CODE, "pod/data", "pod/eval", "launch/run_eval.py"),
            outputs=(recipe.eval_dir / "report.html",),
        ),
    ]


def _script(name: str, arguments: list[str]) -> list[str]:
    return [sys.executable, str(ROOT / "launch" / name), *arguments]


def main(recipe: Recipe) -> None:
    """Run the chain and print the summary."""
    began = time.perf_counter()
    recipe = fitted(recipe)
    folder = Path(recipe.output_dir)
    config = folder / "recipe.yaml"
    atomic_write_text(config, to_yaml(recipe))
    resolve_model(recipe.model.path)
    steps = steps_of(recipe, config)
    state = _read_state(folder)
    previous = ""
    for number, step in enumerate(steps, start=1):
        previous = fingerprint(step, recipe, previous)
        print(f"\n[{number}/{len(steps)}] {step.name}: {step.title}", flush=True)
        if is_done(step, state, previous):
            print(f"[{number}/{len(steps)}] {step.name}: kept, nothing changed", flush=True)
            continue
        run_step(step, state, previous, folder)
        done = state[step.name]
        print(
            f"[{number}/{len(steps)}] {step.name}: {done['seconds']:.0f} s, peak memory {done['peak_bytes'] / 1e9:.1f} GB",
            flush=True,
        )
    print("\n" + "\n".join(summary(recipe, state, time.perf_counter() - began)))


def fitted(recipe: Recipe) -> Recipe:
    """The recipe for this machine: one GPU holds one rank, so that a row cannot be shared."""
    if _gpus() != 1:
        return recipe
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, sequence_parallel_size=1))


def fingerprint(step: Step, recipe: Recipe, previous: str) -> str:
    """SHA-256 over all that decides a step's output: recipe, code, versions, and the fingerprint of the step before."""
    inputs = {
        "sections": {name: dataclasses.asdict(getattr(recipe, name)) for name in step.sections},
        "seed": recipe.seed,
        "outputs": [str(path) for path in step.outputs],
        "code": [_code_digest(ROOT / name) for name in step.code],
        "versions": [importlib.metadata.version(name) for name in _VERSIONED],
        "environment": step.environment,
        "previous": previous,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_done(step: Step, state: dict[str, Any], wanted: str) -> bool:
    """Whether the step ended with these inputs and its outputs are as it left them."""
    known = state.get(step.name, {})
    finished = known.get("status") == "finished" and known.get("fingerprint") == wanted
    return finished and known.get("outputs") == _describe(step.outputs)


def run_step(step: Step, state: dict[str, Any], wanted: str, folder: Path) -> None:
    """Run one step and record it in `<output_dir>/demo.json`. Raises: RuntimeError when the command fails."""
    if step.folder is not None and state.get(step.name, {}).get("fingerprint") != wanted:
        shutil.rmtree(step.folder, ignore_errors=True)  # made from other inputs
    state[step.name] = {"status": "started", "fingerprint": wanted}
    write_json(_state_file(folder), state)
    print("$ " + shlex.join(_shown(part) for part in step.command), flush=True)
    began = time.perf_counter()
    code, peak = run_command(step.command, dict(step.environment))
    if code != 0:
        raise RuntimeError(
            f"step {step.name} ended with code {code}; finished steps are kept, run the same command again"
        )
    missing = [path for path in step.outputs if not path.exists()]
    if missing or not step.complete():
        what = f"{missing[0]} is missing" if missing else "it was stopped before its end"
        raise RuntimeError(
            f"step {step.name} is not complete: {what}; run the same command again to continue"
        )
    state[step.name] |= {
        "status": "finished",
        "seconds": round(time.perf_counter() - began, 1),
        "peak_bytes": peak,
        "outputs": _describe(step.outputs),
    }
    write_json(_state_file(folder), state)


def run_command(command: list[str], environment: dict[str, str]) -> tuple[int, int]:
    """Run a command with this terminal's output; returns exit code and peak memory in bytes (summed over its processes)."""
    full = {
        **QUIET,
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        **environment,
    }
    with subprocess.Popen(command, env=full) as process, _peak_memory(process.pid) as peak:
        try:
            code = process.wait()
        finally:
            if process.poll() is None:  # this process was interrupted: let the step save what it can
                process.terminate()
    return code, peak[0]


@contextlib.contextmanager
def _peak_memory(pid: int, interval: float = 1.0) -> Iterator[list[int]]:
    """A one-element list that holds the largest sum of resident bytes of a process and its descendants, sampled every `interval` s."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(interval):
            peak[0] = max(peak[0], _resident_bytes(pid))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _resident_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
    return total


def _training_command(recipe: Recipe, given: list[str]) -> list[str]:
    """The real launcher on its own free port."""
    where = ["--num_gpus", str(_ranks(recipe)), "--master_port", str(_free_port())]
    return [str(BIN / "deepspeed"), *where, str(ROOT / "launch" / "train_pod.py"), *given]


def _training_environment(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    if _gpus():
        return ()
    threads = max(1, (os.cpu_count() or 1) // _ranks(recipe))
    return (("DS_ACCELERATOR", "cpu"), ("OMP_NUM_THREADS", str(threads)))


def _ranks(recipe: Recipe) -> int:
    return 1 if _gpus() == 1 else max(RANKS, recipe.train.sequence_parallel_size)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _trained_steps(recipe: Recipe) -> int:
    from pod.training.checkpoint.files import latest_checkpoint, read_state

    newest = latest_checkpoint(recipe.train_dir)
    return read_state(newest).step if newest else 0


def export_dir(recipe: Recipe) -> Path:
    """Where the export goes."""
    return Path(recipe.export.path or recipe.export_dir)


def _check_file(recipe: Recipe) -> Path:
    return Path(recipe.output_dir) / "export_check.json"


def _state_file(folder: Path) -> Path:
    return folder / "demo.json"


def _read_state(folder: Path) -> dict[str, Any]:
    return read_json(_state_file(folder)) if _state_file(folder).is_file() else {}


def _describe(paths: tuple[Path, ...]) -> list[list[Any]]:
    """Name, size and time of each output; a missing one has neither."""
    found = [(path, path.stat() if path.exists() else None) for path in paths]
    return [[str(path), status and status.st_size, status and status.st_mtime_ns] for path, status in found]


def _code_digest(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _shown(part: str) -> str:
    """A path below the current folder or of this interpreter, as a reader would type it."""
    if Path(part).parent == BIN:
        return Path(part).name
    return (
        os.path.relpath(part) if Path(part).is_absolute() and Path(part).is_relative_to(Path.cwd()) else part
    )


def check_export(recipe: Recipe) -> None:
    """Load the export with plain transformers and its own remote code; compare logits and text with `pod.load_model`.

    The prompt is longer than the windows, so that the shared part is at work. Writes export_check.json and, for examples/load_export.py, the last logits.
    Raises: RuntimeError when the logits differ by more than 2e-5 of their scale, or the generated tokens differ.
    """
    import safetensors.torch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import pod

    folder = export_dir(recipe)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = " ".join(Path(__file__).read_text(encoding="utf-8").split())
    length = min(
        2 * (recipe.model.num_sink_tokens + recipe.model.num_recent_tokens), recipe.data.context_length
    )
    prompt = torch.tensor([tokenizer(text)["input_ids"][:length]])
    outputs = {}
    with torch.no_grad():
        for name in ("transformers", "pod"):
            if name == "pod":
                model: Any = pod.load_model(str(folder), dtype=torch.float32)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    folder, trust_remote_code=True, dtype=torch.float32
                ).eval()
            generated = model.generate(prompt, max_new_tokens=16, do_sample=False)
            outputs[name] = (model(prompt).logits, generated[0, prompt.shape[1] :].tolist())
    (theirs, their_tokens), (ours, our_tokens) = outputs["transformers"], outputs["pod"]
    error = float((theirs - ours).abs().max() / ours.abs().max())
    if error > 2e-5 or their_tokens != our_tokens:
        raise RuntimeError(
            f"{folder} reloads wrongly: logits differ by {error:.1e} of their scale (allowed 2e-5)"
        )
    result = {
        "relative_logit_error": error,
        "tokens": prompt.shape[1],
        "generated": tokenizer.decode(their_tokens),
    }
    print(
        f"logits equal to {error:.1e} of their scale over {prompt.shape[1]} tokens; generated {result['generated']!r}"
    )
    write_json(_check_file(recipe), result)
    saved = {"input_ids": prompt, "logits": ours[0, -1].contiguous()}
    atomic_write_bytes(_check_file(recipe).with_suffix(".safetensors"), safetensors.torch.save(saved))


def summary(recipe: Recipe, state: dict[str, Any], seconds: float) -> list[str]:
    """What was made and measured, in a line each, and where the report is."""
    peak = max(step["peak_bytes"] for step in state.values())
    spent = sum(step["seconds"] for step in state.values())
    return [
        f"model       {recipe.model.path}, windows {recipe.model.num_sink_tokens} + {recipe.model.num_recent_tokens} tokens",
        _plan_line(recipe),
        _data_line(recipe),
        _training_line(recipe),
        _export_line(recipe),
        *_evaluated(recipe),
        f"report      {recipe.eval_dir / 'report.html'}  ({seconds:.0f} s now, {spent:.0f} s without caches, peak {peak / 1e9:.1f} GB)",
    ]


def _evaluated(recipe: Recipe) -> list[str]:
    """The report's first table, a line per column."""
    from pod.eval.report.merge import merge
    from pod.eval.report.tables import overview

    table = overview(merge([recipe.eval_dir]))
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    columns = enumerate(table.columns[1:])
    return [f"{head:<11} {', '.join(f'{m} {row[n]}' for m, row in rows.items())}" for n, head in columns]


def _plan_line(recipe: Recipe) -> str:
    from pod.modeling.shipped.sharing import SharingPlan

    plan = SharingPlan.load(recipe.plan_path() or recipe.plan_dir / "plan.json")
    now = plan.saving(
        recipe.data.context_length, recipe.model.num_sink_tokens, recipe.model.num_recent_tokens
    )
    return (
        f"plan        {plan.num_leads} of {plan.num_layers} x {plan.num_key_value_heads} (layer, KV head) pairs lead, "
        f"{plan.num_followers} follow, {plan.num_windows} keep their window; KV saving {plan.asymptotic_saving:.1%} in the limit, {now:.1%} at "
        f"{recipe.data.context_length} tokens"
    )


def _data_line(recipe: Recipe) -> str:
    from pod.data import PackedDataset

    rows = PackedDataset(recipe.data_dir)
    return f"data        {len(rows)} packed rows of {rows.context_length} tokens from {', '.join(recipe.data.sources)}"


def _training_line(recipe: Recipe) -> str:
    lines = (recipe.train_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in metrics if "loss" in row]
    few = max(1, len(losses) // 5)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    rate = sorted(row["tokens_per_second"] for row in metrics)[len(metrics) // 2]
    return (
        f"training    {metrics[-1]['step']} steps on {_ranks(recipe)} ranks (SP={recipe.train.sequence_parallel_size}), loss "
        f"{first:.3f} → {last:.3f} (means of the first and last {few} steps), {rate:,.0f} tokens/s"
    )


def _export_line(recipe: Recipe) -> str:
    check = read_json(_check_file(recipe))
    return (
        f"export      {export_dir(recipe)}, reloads in plain transformers with logits equal to "
        f"{check['relative_logit_error']:.0e} of their scale"
    )


def estimate(recipe: Recipe) -> str:
    """The commands, in order."""
    recipe = fitted(recipe)
    steps = steps_of(recipe, Path(recipe.output_dir) / "recipe.yaml")
    lines = [f"{number}. {step.name}: {step.title}" for number, step in enumerate(steps, start=1)]
    return "\n".join([*lines, "Each launcher's own --dry-run tells what its step needs."])


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check-export", action="store_true", help="only compare the export with the trained model"
    )


def _start() -> None:
    arguments = sys.argv[1:]
    checking = "--check-export" in arguments
    if not any(argument.split("=")[0] == "--config" for argument in arguments):
        name = "demo_tiny.yaml" if os.environ.get("DEMO_TINY") == "1" else "demo.yaml"
        arguments = ["--config", str(ROOT / "configs" / name), *arguments]
        os.environ.setdefault(
            "HF_HUB_OFFLINE", "1"
        )  # both use what is installed: no step may wait for the network
    run(
        check_export if checking else main,
        sections=("model", "explore", "data", "train", "export", "eval"),
        description=__doc__,
        estimate=estimate,
        extra_arguments=_add_arguments,
        argv=arguments,
    )


if __name__ == "__main__":
    _start()
