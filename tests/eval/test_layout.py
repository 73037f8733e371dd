"""On which GPUs the models of an evaluation lie: on paper, from configurations alone."""

import json

import pytest
import torch
from large_configs import LLAMA_70B
from transformers import LlamaConfig

import pod
from pod.commands import evaluate
from pod.eval.answer.devices import Gpus, Load, cache_bytes, check_available, layout_lines, rank_devices
from pod.modeling.loading import target_config
from pod.modeling.placement import share_of_rank
from pod.recipe import load_recipe

QWEN_72B = {
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "max_position_embeddings": 32768,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 64,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
BLOCKS = pod.SharingPlan([[layer - layer % 4] * 8 for layer in range(80)])


def lines_of(gpus: str, tokens: int = 8192, rows: int = 1, plan=None, asked: str = "auto") -> list[str]:
    config = target_config(LLAMA_70B, plan, num_sink_tokens=16, num_recent_tokens=4080)
    return layout_lines("dense", config, 2, Gpus.of(gpus), Load(rows, tokens), asked)


def test_70b_on_two_gpus_of_80_gib():
    first, *devices = lines_of("2x80")
    assert first == "dense: 131.4 GiB of weights on 2 of 2 GPUs; 1 row of 8,192 tokens fits beside them"
    assert devices == [
        "  cuda:0  layers 0-39      65.7 GiB of weights     1.2 GiB of cache",
        "  cuda:1  layers 40-79     65.7 GiB of weights     1.2 GiB of cache",
    ]


def test_70b_on_eight_gpus_of_24_gib_with_borders_between_blocks():
    for asked, used in (("auto", 7), ("balanced", 8)):
        first, *devices = lines_of("8x24", plan=BLOCKS, asked=asked)
        assert first.startswith(
            f"dense: 131.4 GiB of weights on {used} of 8 GPUs; 1 row of 8,192 tokens fits"
        )
        layers = [line.split()[2].split("-") for line in devices]
        assert len(layers) == used and all(int(start) % 4 == 0 for start, _ in layers)
        assert not any("follow" in line for line in devices)


def test_what_does_not_fit_says_what_would():
    first, *devices = lines_of("2x80", tokens=131072, rows=4)
    assert first.endswith(
        "4 rows of 131,072 tokens do not fit beside them, 0 would: lower eval.batch_size, or use more GPUs"
    )
    assert sum(float(line.split()[-4]) for line in devices) == pytest.approx(4 * 40.0)  # 320 KiB a token
    assert lines_of("2x80", tokens=16384, rows=4)[0].endswith(
        "do not fit beside them, 2 would: lower eval.batch_size, or use more GPUs"
    )
    assert lines_of("2x40") == [
        "dense: 131.4 GiB of weights do not fit 2 x 40 GiB with 10% of each left free: use more GPUs"
    ]


def test_a_cache_takes_more_gpus_where_there_are():
    small, large = (lines_of("8x80", tokens=tokens, rows=4)[0] for tokens in (8192, 131072))
    assert "on 2 of 8 GPUs" in small and "on 5 of 8 GPUs" in large


@pytest.mark.parametrize("layout", ["dense", "pod", "cla", "window"])
def test_bytes_of_each_layer_are_those_that_a_cache_holds(layout):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    stock = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, num_hidden_layers=5, **sizes))
    plan = pod.SharingPlan([[0, None], [0, 1], [None, 1], [0, 1], [4, None]]) if layout == "pod" else None
    windows = {"num_sink_tokens": 0 if layout == "window" else 4, "num_recent_tokens": 11}
    if layout in ("dense", "cla"):
        windows = {}
    model = pod.load_model(stock, plan, layout=layout, **windows)
    cache = pod.make_cache(model)
    with torch.no_grad():
        model(torch.arange(40)[None], past_key_values=cache)
    buffers = [
        [buffer for buffer in layer.kv_buffers().values() if not buffer.is_empty] for layer in cache.layers
    ]
    held = [sum(buffer.read(40).nbytes for buffer in own) for own in buffers]
    assert cache_bytes(model.config, 40, 4) == held


def test_ranks_share_the_gpus_of_their_machine(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert share_of_rank(8) == range(8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert share_of_rank(8) == range(4, 8) and share_of_rank(2) == range(1, 2)
    assert share_of_rank(1) == range(1)  # two ranks share the only one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert rank_devices("auto") == [torch.device("cuda", number) for number in range(4, 8)]
    assert rank_devices("cuda:3") == [torch.device("cuda:3")]
    with pytest.raises(
        ValueError, match="eval.device is 'balancd': use auto, balanced, sequential or a device"
    ):
        rank_devices("balancd")


@pytest.mark.parametrize("device", ["cuda:1", "xpu"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    check_available([torch.device("cpu"), torch.device("meta")])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(ValueError, match=f"bench.device is {device}, .* no GPU: use auto or cpu"):
        check_available([torch.device(device)], "bench.device")
    kind = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    check_available([torch.device("cuda"), torch.device("cuda:0")])
    with pytest.raises(ValueError, match=f"eval.device is {device}, .* 1 devices cuda"):
        check_available([torch.device(device)])


def test_the_recipe_of_a_72b_model_is_laid_out_by_its_dry_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    recipe = load_recipe("paper/razor_qwen15_72b", [f"model.path={tmp_path}"])
    found = {}
    for gpus in ("2x80", "8x80"):
        found[gpus] = evaluate.estimate(recipe, Gpus.of(gpus)).partition("Layout on ")[2].splitlines()
    assert found["2x80"][0] == "2 GPUs of 80 GiB (eval.device: auto; 10% of each left for activations):"
    # 64 KV heads: 2.5 MiB a token
    assert found["2x80"][1].startswith(
        "  dense: 134.6 GiB of weights on 2 of 2 GPUs; 4 rows of 32,768 tokens do not fit"
    )
    assert (
        found["8x80"][1]
        == "  dense: 134.6 GiB of weights on 7 of 8 GPUs; 4 rows of 32,768 tokens fit beside them"
    )
    assert len(found["8x80"]) == 2 + 7


def test_a_rank_has_its_share_of_the_gpus(tmp_path, monkeypatch):
    """8 GPUs and 4 ranks: each rank lays the model out on two."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    recipe = load_recipe("paper/razor_qwen15_72b", [f"model.path={tmp_path}"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    lines = evaluate.estimate(recipe, Gpus.of("8x80")).partition("Layout on ")[2].splitlines()
    assert lines[0] == "2 of 8 GPUs of 80 GiB (eval.device: auto; 10% of each left for activations):"
    assert "on 2 of 2 GPUs" in lines[1]


def test_models_with_the_weights_of_dense_are_not_laid_out_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_72B))
    pod.SharingPlan([[layer - layer % 4] * 64 for layer in range(80)]).save(tmp_path / "plan.json")
    changes = [f"model.path={tmp_path}", f"model.plan={tmp_path / 'plan.json'}"]
    recipe = load_recipe("paper/razor_qwen15_72b", [*changes, "eval.methods=[full, pod-unadapted]"])
    lines = evaluate.estimate(recipe, Gpus.of("8x80")).splitlines()
    assert "  unadapted: on the weights of dense" in lines
    assert lines[-1] == "  Models that do not fit beside each other are loaded in turns."


@pytest.mark.parametrize("text", ["80", "0x80", "2x", "2x0", "two x 80"])
def test_gpus_are_number_x_gib(text):
    with pytest.raises(ValueError, match="give number x GiB, as 8x24"):
        Gpus.of(text)
    assert Gpus.of("8x23.5") == Gpus(8, 23.5)


def test_gpus_to_assume_are_for_estimates():
    options = type("Options", (), {"gpus": Gpus(2, 80), "dry_run": False})
    with pytest.raises(ValueError, match="--gpus is for estimates only: add --dry-run"):
        evaluate.check_arguments(options)  # type: ignore[arg-type]
