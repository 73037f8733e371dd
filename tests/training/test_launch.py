"""The command lines as a user types them.

The real `deepspeed` launcher, SIGTERM, resume, export, and one-line errors.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from pod.files import read_json

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    outer = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), outer["PATH"]])
    cache = str(tmp_path_factory.mktemp("cache"))
    return {
        **outer, "PATH": path, "POD_CACHE": cache, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory, environment) -> Path:
    """A recipe on the tiny random model with rows of 64 tokens and a plan that shares half of the pairs."""
    import pod
    from pod.data import write_packed_rows
    from pod.data.tokens.tokenizers import tokenizer_sha256
    from pod.models import byte_tokenizer

    folder = tmp_path_factory.mktemp("run")
    tokenizer, generator = byte_tokenizer(), np.random.default_rng(0)
    rows = [[generator.integers(0, 256, size).astype(np.int32) for size in (23, 41)] for _ in range(8)]
    write_packed_rows(
        folder / "data", rows, context_length=64, vocab_size=256, tokenizer_sha256=tokenizer_sha256(tokenizer)
    )
    (folder / "plan").mkdir()
    pod.SharingPlan(lead=[[0, 0], [0, 0], [2, 2], [2, 2]]).save(folder / "plan" / "plan.json")
    recipe = f"""
output_dir: {folder}
model: {{path: "package:tiny", num_sink_tokens: 2, num_recent_tokens: 8}}
data: {{context_length: 64, shortest_interval: 32}}
train: {{max_steps: 1000000, allow_repeats: true, sequence_parallel_size: 2, dtype: float32,
  save_every_steps: 0, gradient_checkpointing: none}}
"""
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder / "recipe.yaml"


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Process ids of the training ranks below the launcher, oldest first."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [
        child.pid
        for child in children
        if "--local_rank=0" in child.cmdline() or "--local_rank=1" in child.cmdline()
    ]


def wait_for_steps(metrics: Path, launcher: subprocess.Popen, steps: int) -> None:
    while not metrics.is_file() or len(metrics.read_text(encoding="utf-8").splitlines()) < steps:
        assert launcher.poll() is None, launcher.communicate()[0][-4000:]
        time.sleep(0.2)


@contextmanager
def training(config: Path, environment: dict[str, str], steps: int):
    """The `deepspeed` launcher with two ranks, after so many steps.

    It is in a process group of its own; nothing is left of it.
    """
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["deepspeed", "--num_gpus", "2", "--master_port", port, "launch/train_pod.py", "--config"]
    launcher = subprocess.Popen(
        [*command, str(config)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_steps(config.parent / "train" / "metrics.jsonl", launcher, steps)
        yield launcher
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def check_last_step(train: Path) -> int:
    """The last step of metrics.jsonl, whose checkpoint must be whole."""
    last = json.loads((train / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["step"]
    assert (train / "latest").read_text(encoding="utf-8").strip() == f"step-{last:08d}"
    state = read_json(train / f"step-{last:08d}" / "checkpoint.json")
    assert (state["step"], state["cursor"]["position"], state["world_size"]) == (last, last, 2)
    return last


def test_sigterm_to_a_rank_saves_and_every_process_exits_with_0(config, environment, tmp_path):
    """An export works afterwards, and a second run beside is refused."""
    train = config.parent / "train"
    with training(config, environment, 2) as launcher:
        os.kill(ranks_of(launcher)[-1], signal.SIGTERM)
        output = launcher.communicate(timeout=3600)[0]
    assert launcher.returncode == 0, output[-4000:]
    last = check_last_step(train)

    with training(config, environment, last + 1) as launcher:  # and Ctrl-C, which reaches launcher and ranks
        second = [sys.executable, "launch/train_pod.py", "--config", str(config)]
        second += ["--set", "train.sequence_parallel_size=1"]
        done = subprocess.run(second, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
        assert (done.returncode, f"another process trains in {train}" in done.stderr) == (2, True), (
            done.stderr
        )
        ranks = [psutil.Process(rank) for rank in ranks_of(launcher)]
        os.killpg(launcher.pid, signal.SIGINT)
        psutil.wait_procs(ranks)
    assert check_last_step(train) > last

    elsewhere = tmp_path / "cwd"  # launchers must not depend on the working directory
    elsewhere.mkdir()
    command = [sys.executable, str(ROOT / "launch" / "export_hf.py"), "--config", str(config)]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (config.parent / "export").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "llama.py", "plan.json"} <= files


REFUSED = {  # name: settings beside one rank per group, and what the one line says
    "ranks": (["train.sequence_parallel_size=2"], "1 ranks cannot form groups of sequence_parallel_size 2"),
    "plan": (["model.plan=nowhere.json"], "nowhere.json"),
    "data": (["output_dir=nothing_here"], "run `pod data` first"),
    "name": (["train.max_step=3"], "max_steps"),
    "held_out": (
        ["train.eval_every_steps=2"],
        "train.eval_every_steps needs held-out text, but the data has none",
    ),
    "length": (["data.context_length=32"], "data.context_length is 32"),
}


@pytest.fixture(scope="module")
def ended(config, environment, tmp_path_factory):
    """Name to (exit code, output, errors) of commands that end before they train, in an empty folder."""
    folder = tmp_path_factory.mktemp("commands")
    commands = {}
    for name, (settings, _) in REFUSED.items():
        settings = ["train.sequence_parallel_size=1", *settings]
        commands[name] = ["--config", str(config), *[word for each in settings for word in ("--set", each)]]
    commands["dry"] = ["--config", str(config), "--dry-run", "--ranks", "2", "--set", "output_dir=new"]
    commands["no_model"] = ["--dry-run", "--set", "model.path=nobody/nothing"]
    file = folder / "commands.json"
    file.write_text(json.dumps(commands), encoding="utf-8")
    worker = [sys.executable, str(Path(__file__).with_name("worker_commands.py")), str(file)]
    done = subprocess.run(
        worker, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(file.with_suffix(".codes").read_text(encoding="utf-8"))
    assert not (folder / "new").exists(), "a dry run writes nothing"
    return {
        name: (code, *[(folder / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("out", "err")])
        for name, code in codes.items()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_one_line_and_exit_code_2(ended, name):
    code, _, errors = ended[name]
    assert code == 2, errors
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert REFUSED[name][1] in lines[0]
    assert "Traceback" not in errors
    assert "Loading weights" not in errors, "refused before the model is loaded"


def test_rows_of_another_length_are_refused_with_both_lengths(ended):
    line = ended["length"][2].strip().splitlines()[-1]
    assert "have 64 tokens" in line
    assert "data.context_length=64" in line


def test_dry_run_prints_bytes_by_part_and_starts_nothing(ended):
    code, output, errors = ended["dry"]
    assert code == 0, errors
    for words in (
        "2 ranks = 1 data parallel x 2 sequence parallel",
        "sequence_parallel_size 2*",
        "optimizer",
        "shared_qk",
        "logits",
        "GiB per checkpoint",
    ):
        assert words in output


def test_dry_run_without_the_model_says_so(ended):
    code, output, errors = ended["no_model"]
    assert code == 2, output
    assert "error: the configuration of model.path = nobody/nothing cannot be read here" in errors
