"""Whole runs.

Resumed equals uninterrupted, signals, NaN policy, LoRA, refusals, a full disk, export equals trained.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tiny
from packaging.requirements import Requirement

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("whole", "stopped", "resumed", "steps"),
    [
        ("whole", "stopped", "resumed", 2),
        ("lora", "lora_stopped", "lora_resumed", 3),
        ("parts", "parts_stopped", "parts_resumed", 2),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(runs_results, whole, stopped, resumed, steps):
    expected, part, rest = (runs_results[name] for name in (whole, stopped, resumed))
    # SIGTERM to one rank stops all ranks after the step in which it came, or before it when more
    # micro-batches are to come
    assert part["step"] == steps
    assert part["hash"] != expected["hash"]
    assert rest["hash"] == expected["hash"]  # master weights and both moments
    assert rest["steps"] == [1, 2, 3, 4, 5]  # each step once in metrics.jsonl
    assert rest["losses"] == expected["losses"]
    assert len(rest["waits"]) == 5 and all(wait > 0 for wait in rest["waits"])  # seconds for rows, per step


def test_training_lowers_the_loss_and_moves_every_weight(runs_results):
    result = runs_results["whole"]
    assert min(result["losses"]) < 0.92 * result["losses"][0]
    assert len(result["moved"]) == 4 * 9 + 2  # 9 weights a layer, the tied embedding and the last norm


def test_lora_moves_adapters_only(runs_results):
    moved = runs_results["lora"]["moved"]
    assert len(moved) == 4 * 4 * 2
    assert all("lora_" in name for name in moved)


def test_only_what_is_trained_has_optimizer_state(runs_results):
    """Two moments, and padding."""
    for name in ("lora", "whole"):
        trained = runs_results[name]["trained"]
        assert 2 * trained <= runs_results[name]["moments"] <= 2 * trained + 64
    assert runs_results["lora"]["trained"] < runs_results["whole"]["trained"] / 10


def test_an_exported_adapter_loads_with_peft_and_with_ours(runs_results):
    result = runs_results["adapter"]
    assert result["peft"] == result["ours"] == 0
    assert result["none"] > 0.01, "the adapter does nothing"
    assert result["lead"] == tiny.plan_rows()
    names = {"adapter_config.json", "adapter_model.safetensors", "plan.json", "pod_config.json", "README.md"}
    assert set(result["files"]) == names
    assert result["files"]["adapter_model.safetensors"] < 4 * runs_results["lora"]["trained"] + 8192


def test_latest_names_the_last_step_and_old_checkpoints_go(runs_results):
    assert runs_results["whole"]["latest"] == "step-00000005"
    assert runs_results["whole"]["kept"] == ["step-00000004", "step-00000005"]


def test_a_step_with_nan_on_one_rank_is_skipped_on_all(runs_results):
    result = runs_results["nan"]
    assert result["skips"] == [0, 1, 0, 0]
    assert result["changed"] == [False, True, True]


def test_run_stops_after_three_skipped_steps(runs_results):
    result = runs_results["nan"]
    assert result["stopped_at"] == 7
    assert result["error"].startswith("3 bad steps in a row (at step 7 ")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("plan", "belongs to another sharing plan: use"),
        ("rope", "belongs to another RoPE: use"),
        ("positions", "belongs to another RoPE: use"),
        ("windows", "belongs to other windows: use"),
        ("model", "belongs to another model: use"),
        ("data", "belongs to other data: use"),
        ("method", "belongs to another train.method"),
        ("dtype", "belongs to another train.dtype"),
        ("rows", "belongs to another seed or train.tokens_per_step"),
        ("never", "already has checkpoints: set train.resume=auto"),
    ],
)
def test_checkpoint_that_belongs_elsewhere_is_refused(runs_results, case, says):
    message = runs_results["refusals"][case]
    assert says in message
    assert "\n" not in message


def test_model_loaded_in_bfloat16_trains_the_same_bits(runs_results):
    wide, narrow = runs_results["half"], runs_results["half_loaded"]
    assert narrow["hash"] == wide["hash"]
    assert narrow["losses"] == wide["losses"]


def test_failed_write_is_one_line_on_every_rank_and_leaves_nothing(runs_results):
    for rank in (0, 1):
        result = runs_results[f"disk_rank{rank}"]
        assert result["write"].startswith("cannot write checkpoint")
        assert "disk full while writing" in result["space"]
        assert "free at least 2 MB" in result["space"]
        assert "\n" not in result["write"] + result["space"]
        assert result["left"] == result["left_after"] == []


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("whole", "torch.float32", 0), ("half", "torch.bfloat16", 0), ("lora", "torch.float32", 2e-6)],
)
def test_export_reloads_with_the_trained_logits_and_generates(runs_results, name, dtype, tolerance):
    result = runs_results[f"export_{name}"]
    assert result["module"].startswith("transformers_modules"), "the export must bring its own code"
    assert result["dtype"] == dtype
    assert len(result["eos"]) == 2, "the generation configuration must survive the export"
    assert result["error"] <= tolerance  # merging adapters rounds; full fine-tuning is exact
    assert len(result["generated"]) == 4, result["generated"]
    assert result["generated"][0] == result["next_token"]
    assert {"config.json", "generation_config.json", "model.safetensors", "plan.json"} <= set(result["files"])


def distributions_for(*names: str) -> set[str]:
    """The named distributions and everything that they require without extras, by their names."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name.lower() in found:
            continue
        found.add(name.lower())
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link_packages(folder: Path, *names: str) -> Path:
    """A site folder of links that holds only the named distributions and what they require."""
    folder.mkdir()
    for name in distributions_for(*names):
        distribution = metadata.distribution(name)
        for top in {
            file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
        }:
            target = Path(str(distribution.locate_file(top)))
            if not (folder / top).exists():
                (folder / top).symlink_to(target)
    return folder


ALONE = """
import sys
sys.path[:0] = [sys.argv[1]]
import importlib.util, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
present = [name for name in ("pod", "deepspeed", "peft", "datasets") if importlib.util.find_spec(name)]
assert not present, present
expected = load_file(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(input_ids=expected["input_ids"]).logits
assert torch.equal(logits, expected["logits"]), (logits - expected["logits"]).abs().max()
print(model.generate(expected["input_ids"], max_new_tokens=4, do_sample=False).shape[1])
"""


@pytest.mark.slow
def test_export_needs_only_torch_and_transformers(runs_results, runs_folder, tmp_path):
    site = link_packages(tmp_path / "site", "torch", "transformers")
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(site)]
    command += [str(runs_folder / "whole_export"), str(runs_folder / "whole_logits.safetensors")]
    environment = {
        "PATH": "",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "44"
