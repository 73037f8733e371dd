"""The estimate of memory, traffic and time.

It is held against real steps on a few configurations, and checked by what must follow from what. All
configurations, on an idle machine: `python benchmarks/estimate_memory.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import pod
from pod.files import read_json
from pod.models import KNOWN_SIZES
from pod.training.args import TrainArgs
from pod.training.predict import memory_estimate
from pod.training.predict.memory_estimate import (
    TrainingJob,
    World,
    checkpoint_disk_bytes,
    host_bytes,
    pinned_bytes,
    pinned_tensors,
    resting_bytes,
    training_bytes,
)
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import (
    communication,
    exchanged_bytes,
    get_device,
    gradient_bytes,
    known_device,
    rank_attention_flops,
    rank_flops,
    step_time,
    weight_bytes,
)

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
LLAMA3_8B = Shapes.from_config(SimpleNamespace(**KNOWN_SIZES["meta-llama/Meta-Llama-3-8B"]))
DENSE = tuple((layer,) * 8 for layer in range(32))
SHARED = tuple((layer - layer % 4,) * 8 for layer in range(32))
PAPER = {"sequence_parallel_size": 4, "gradient_accumulation_steps": 64, "max_steps": 1192}


def test_experts_count_as_weights_and_as_what_a_token_sees():
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = pod.PodConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        tie_word_embeddings=True, **sizes
    )  # fmt: skip
    real = sum(weight.numel() for weight in pod.PodForCausalLM(config).parameters())
    shapes = Shapes.from_config(config)
    routers = 3 * 5 * 32
    assert shapes.parameters == real - routers
    assert shapes.multiplied_weights(DENSE[:3]) == 3 * (4 * 32 * 32 + 2 * 3 * 32 * 24) + 50 * 32
    assert shapes.lora_parameters(TrainArgs(method="lora", lora_rank=2)) == 3 * 2 * 4 * 64


def job(args, lead=SHARED, shapes=LLAMA3_8B, context=32_768, ranks=8, local=None) -> TrainingJob:
    return TrainingJob(shapes, lead, args, context, World(ranks, local or ranks))


def total(args, **options) -> int:
    return sum(training_bytes(job(args, **options)).values())


def test_parameters_of_llama3_8b():
    assert LLAMA3_8B.parameters == 8_030_261_248


@pytest.mark.parametrize("layout", ["pod", "cla", "window"])
def test_parameters_are_those_of_the_model(layout):
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "layout": layout}
    model = pod.PodForCausalLM(pod.PodConfig(**sizes, **heads))
    assert Shapes.from_config(model.config).parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["roles_recompute_carry", "pod_lora_no_checkpoints", "pod_zero3_2ranks"])
def test_peak_of_real_steps_within_five_percent(estimate_results, name):
    """The goal is 10 %; these configurations are known to be within 2 %."""
    result = estimate_results[name]
    assert "failed" not in result, result.get("failed")
    assert result["ratio"] == pytest.approx(1, abs=0.05), result["parts"]


@pytest.mark.slow
def test_todays_estimates_are_within_seven_percent_of_what_was_measured(tmp_path):
    """Today's estimates are within seven percent of what was measured, on at least twelve configurations.

    They run in a process of its own, because the script makes DeepSpeed's buckets small.
    """
    file = shutil.copy(ROOT / "benchmarks" / "results" / "estimate_memory.json", tmp_path)
    command = [sys.executable, "benchmarks/estimate_memory.py", "--again", "--out", file]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    rows = [row for row in read_json(file)["rows"] if "ratio" in row]
    assert len(rows) >= 12
    assert max(abs(row["ratio"] - 1) for row in rows) <= 0.07
    assert {row["ranks"] for row in rows} >= {1, 2, 4}
    assert {row["layout"] for row in rows} >= {"dense", "pod", "roles", "cla", "window"}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "micro_batches"), [("sp2", 1), ("sp2_zero1", 2)])
def test_exchanged_bytes_are_those_counted(estimate_results, name, micro_batches):
    """Exchanged bytes are those counted, by direction.

    A forward, with activation checkpoints a second one, and a backward per micro-batch; slices of 21 and 20.
    """
    result = estimate_results[name]
    forwards = micro_batches * (2 if name == "sp2" else 1)
    assert result["sent"] == {
        key: value * (micro_batches if "backward" in key else forwards)
        for key, value in result["once"].items()
    }
    assert result["all"] == sum(result["sent"].values())


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["sp2", "sp2_zero1"])
def test_a_checkpoint_needs_the_disk_that_is_estimated(estimate_results, name):
    """The mebibyte of the rest is most of a tiny model's estimate: what is written must fit into it."""
    result = estimate_results[name]
    assert 0.1 * result["disk_estimate"] < result["disk"] <= result["disk_estimate"]


def test_sharing_sends_nothing_and_carries_what_the_plan_says():
    args = TrainArgs(**PAPER)
    assert communication(job(args, DENSE)) == communication(job(args))
    each = 5 * 128 * 8192 * 2  # 4 queries and a key per token and KV head
    parts = training_bytes(job(args))
    assert parts["shared_qk"] == 8 * 8 * each
    assert training_bytes(job(args, DENSE))["shared_qk"] == 0


@pytest.mark.parametrize(
    ("settings", "less", "context"),
    [
        ({"shared_qk": "offload"}, 0.98, 32_768),
        ({"offload_checkpoints": True}, 0.98, 32_768),
        ({"offload_optimizer": "cpu"}, 0.85, 32_768),
        ({"offload_parameters": "cpu"}, 0.99, 32_768),
        ({"method": "lora"}, 0.6, 32_768),
        ({"mlp_tile_tokens": 4096}, 0.95, 131_072),
    ],
)
def test_settings_that_save_memory_save_it(settings, less, context):
    args = {"sequence_parallel_size": 4, "mlp_tile_tokens": 0}
    assert total(TrainArgs(**args | settings), context=context) < less * total(
        TrainArgs(**args), context=context
    )


def test_rest_is_divided_as_the_stages_say():
    def rest(stage, world, **settings):
        return resting_bytes(job(TrainArgs(zero_stage=stage, **settings), ranks=world))

    count = LLAMA3_8B.parameters
    assert rest(1, 8)["parameters"] == count * 2 == 8 * (rest(3, 8)["parameters"] - _persistent())
    assert rest(1, 8)["optimizer"] == rest(3, 8)["optimizer"] == count // 8 * 8
    assert rest(1, 8)["gradients"] == 8 * rest(3, 8)["gradients"] == count * 4
    assert rest(3, 8, reduce_dtype="bfloat16")["gradients"] * 2 == rest(3, 8)["gradients"]


def test_the_output_projections_gradient_is_copied_in_the_type_it_is_summed_in():
    """The output projection's gradient is copied in the type it is summed in.

    Behind the loss it is 6 bytes a weight, or 2 without the copy, which only stage 3 makes and only of an
    other type.
    """

    def bytes_per_weight(**settings) -> float:
        one = job(TrainArgs(**settings))
        at_reduction = list(memory_estimate.moments(one))[1]
        more = at_reduction["gradients"] - resting_bytes(one)["gradients"]
        return more / LLAMA3_8B.embedding_parameters

    assert bytes_per_weight() == 6
    assert bytes_per_weight(reduce_dtype="bfloat16") == bytes_per_weight(zero_stage=1) == 2
    assert bytes_per_weight(dtype="float32") == 4
    assert bytes_per_weight(method="lora") == 0


def _persistent() -> int:
    return LLAMA3_8B.persistent_parameters(memory_estimate.PERSISTENT_ELEMENTS) * 2


def test_what_is_offloaded_lies_elsewhere():
    args = TrainArgs(offload_optimizer="cpu", offload_parameters="cpu", save_mode="async")
    count = LLAMA3_8B.parameters
    assert host_bytes(job(args, DENSE, context=8192)) == {
        "optimizer": 12 * (count // 8) + 4 * GIB + 16 * MIB + 4 * GIB,  # two groups of gradients, and sums
        "parameters": 2 * GIB,  # 1.87
        "checkpoint": checkpoint_disk_bytes(count) // 8,
    }
    assert host_bytes(job(TrainArgs(offload_checkpoints=True), DENSE, context=1000, ranks=1)) == {
        "checkpoints of activations": 32 * 8 * MIB  # 1000 x 4096 x 2 bytes, rounded up
    }


def test_frozen_weights_of_lora_are_pinned_one_by_one():
    """Frozen weights of LoRA are pinned one by one.

    In MiB: q, o 32, k, v 8, three of the feed-forward part 112, so 128; input and output 1,002; norms 0.5.
    """
    args = TrainArgs(method="lora", offload_parameters="cpu")
    layers = 32 * (2 * 32 + 2 * 8 + 3 * 128)
    assert host_bytes(job(args, DENSE, ranks=1)) == {"parameters": (layers + 2 * 1024 + 1) * MIB}
    assert host_bytes(job(args, DENSE, ranks=8)) == {"parameters": (layers + 2 * 1024 + 1) * MIB // 8}


def test_sizes_of_deepspeed_are_its_defaults():
    """Nothing of ours sets them, so that the estimate has to know them."""
    theirs = DeepSpeedZeroConfig(stage=3)
    assert theirs.sub_group_size == memory_estimate.GROUP_ELEMENTS
    assert theirs.param_persistence_threshold == memory_estimate.PERSISTENT_ELEMENTS
    assert theirs.max_reuse_distance == memory_estimate.REUSE_ELEMENTS


def test_pinned_tensors_take_powers_of_two():
    assert [pinned_bytes(size) for size in (0, 1, 1000, 1024, 1025)] == [0, 1, 1024, 1024, 2048]


def test_an_offloaded_optimizer_takes_twenty_bytes_per_weight_and_its_rounding():
    """An offloaded optimizer takes twenty bytes per weight and its rounding.

    8.03e9 weights on one rank, in GiB: weights 29.9, moments 59.8, groups of gradients 8 x 4 + 0.125, their
    sums 32.
    """
    args = TrainArgs(offload_optimizer="cpu")
    found = host_bytes(job(args, DENSE, ranks=1))["optimizer"] / GIB
    assert found == pytest.approx(153.9, abs=0.1)
    halved = host_bytes(job(TrainArgs(offload_optimizer="cpu", reduce_dtype="bfloat16"), DENSE, ranks=1))
    assert halved["optimizer"] / GIB == pytest.approx(153.9 - 16, abs=0.1)


def test_the_offloaded_shared_qk_is_pinned_head_by_head():
    args = TrainArgs(shared_qk="offload")
    lead = ((0,) * 8,) * 32
    found = host_bytes(job(args, lead, context=1500, ranks=1))
    # per KV head four query heads and one key of 128 numbers of 2 bytes: 1.5 and 0.375 MB
    assert pinned_tensors(job(args, lead, context=1500, ranks=1)) == {"shared_qk": {1_536_000: 8, 384_000: 8}}
    assert found == {"shared_qk": 8 * (2 * MIB + MIB // 2)}


def test_rings_and_exchanges_inside_and_between_machines():
    args = TrainArgs(**PAPER)
    one, four = (communication(job(args, DENSE, ranks=size, local=8)) for size in (8, 32))
    assert all(kind.between == 0 for kind in one)
    gather, scatter, heads = four
    assert gather.inside + gather.between == weight_bytes(job(args)) * 31 // 32
    assert gather.between == weight_bytes(job(args)) * 3 // 4 // 8
    assert scatter.inside + scatter.between == gradient_bytes(job(args)) * 31 // 32
    assert heads.between == 0, "groups of 4 contiguous ranks lie within machines of 8"
    wide = TrainArgs(sequence_parallel_size=16)
    (*_, heads) = communication(job(wide, DENSE, ranks=32, local=8))
    assert heads.between * 7 == pytest.approx(
        heads.inside * 8, rel=1e-6
    )  # 7 peers here, 8 on the other machine
    across = TrainArgs(sequence_parallel_size=6)  # the second group has 2 ranks here and 4 there
    (*_, heads) = communication(job(across, DENSE, ranks=24, local=8))
    assert heads.between == pytest.approx(heads.inside * 4, rel=1e-6)
    assert weight_bytes(job(TrainArgs(zero_stage=1))) == LLAMA3_8B.parameters * 2
    one, two = (job(TrainArgs(zero_stage=stage, gradient_accumulation_steps=5)) for stage in (1, 2))
    assert gradient_bytes(one) * 5 == gradient_bytes(two)


def test_cla_followers_send_their_queries_only():
    cla = Shapes(**vars(LLAMA3_8B) | {"layout": "cla"})
    pairs = tuple((layer - layer % 2,) * 8 for layer in range(32))
    args = TrainArgs(sequence_parallel_size=4)
    sent = [
        exchanged_bytes(job(args, lead, shapes, 8192)) for shapes, lead in ((LLAMA3_8B, DENSE), (cla, pairs))
    ]
    assert sent[0]["to_heads"] - sent[1]["to_heads"] == 16 * 2 * 8 * 128 * 2048 * 2
    assert sent[0]["to_sequence"] == sent[1]["to_sequence"]


@pytest.mark.parametrize("factor", [2, 3])
def test_cla_weights_are_those_of_the_model(factor):
    """Followers have no projections for keys and values, and no adapters on them."""
    import pod
    from pod.training.run.lora import add_lora, lora_settings

    plan = pod.SharingPlan.cla(5, 2, factor)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    model = pod.PodForCausalLM(
        pod.PodConfig(
            **sizes, vocab_size=37, intermediate_size=32, layout="cla", lead=[list(row) for row in plan.lead]
        )
    )
    shapes = Shapes.from_config(model.config)
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())
    args = TrainArgs(method="lora", lora_rank=3)
    adapted = add_lora(model, lora_settings(args))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert shapes.trained_parameters(args) == trained


def test_operations_are_six_per_weight_and_token_plus_attention():
    """Operations are six per weight and token, plus attention.

    Without recomputation: 2 forward and 4 backward per weight, but for the loss, which computes its logits
    twice.
    """
    args = TrainArgs(gradient_checkpointing="none", mlp_tile_tokens=0)
    tokens, head = 4096, LLAMA3_8B.embedding_parameters
    linear = 32 * (LLAMA3_8B.layer_parameters - 2 * 4096)
    expected = 6.0 * tokens * linear + 8.0 * tokens * head
    attention = rank_attention_flops(job(args, context=tokens))
    assert rank_flops(job(args, context=tokens)) == pytest.approx(expected + 3.5 * attention, rel=1e-12)
    assert attention == 32 * 4 * 128 * 32 * tokens * (tokens + 1) / 2


def test_a_window_multiplies_with_its_tokens_only():
    args, near = TrainArgs(), 1024 * 1025 / 2 + 3072 * 1024
    window = Shapes(**vars(LLAMA3_8B) | {"windows": (0, 1024)})
    windows, half = ((None,) * 8,) * 32, tuple((layer, None) * 4 for layer in range(32))
    assert rank_attention_flops(job(args, windows, window, 4096)) == 32 * 4 * 128 * 32 * near
    every = 4096 * 4097 / 2
    assert rank_attention_flops(job(args, half, window, 4096)) == 32 * 4 * 128 * 16 * (near + every)
    # four ranks compute two heads each, of which one sees everything; eight two halves of heads, sixteen two
    # query heads
    for size, waited in ((4, 4 * (near + every)), (8, 2 * (near + every)), (16, near + every)):
        ranks = TrainArgs(sequence_parallel_size=size)
        assert rank_attention_flops(job(ranks, half, window, 4096)) == 32 * 4 * 128 * waited


def test_time_follows_figures():
    args, device = TrainArgs(**PAPER), get_device("h100")
    one, fast = (step_time(job(args), get_device(name)) for name in ("h100", "h100,efficiency=1"))
    assert fast.parts["arithmetic"] * 2 == pytest.approx(one.parts["arithmetic"])
    assert one.parts["arithmetic"] < one.overlapped < one.sequential == pytest.approx(sum(one.parts.values()))
    assert one.overlapped < one.expected < one.sequential
    slow = step_time(job(args, ranks=32, local=1), device)
    assert slow.parts["all-gather of weights"] > one.parts["all-gather of weights"]
    offloaded = step_time(job(TrainArgs(**PAPER, offload_optimizer="cpu", offload_checkpoints=True)), device)
    assert offloaded.parts["update"] > one.parts["update"]
    hosted = step_time(job(TrainArgs(**PAPER, offload_optimizer="cpu")), device).parts
    sums = 127 * LLAMA3_8B.parameters / 8 * 4 / (55e9 * 0.7)  # out, and 63 times back and out again
    assert hosted["copies to and from the host"] == pytest.approx(sums)
    assert offloaded.parts["copies to and from the host"] > sums


def test_projecting_shared_qk_again_takes_its_products():
    kept, again = (rank_flops(job(TrainArgs(shared_qk=shared_qk))) for shared_qk in ("keep", "recompute"))
    assert again - kept == pytest.approx(
        2 * 32_768 * 4096 * 5 * 128 * 64, rel=1e-9
    )  # 64 leads have followers


def test_devices_are_found_by_the_names_that_cuda_gives():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 4090": "rtx4090",
    }
    found = {name: known_device(name) for name in names}
    assert {name: device and device.name for name, device in found.items()} == names
    assert known_device("Unknown") is None
    h100 = get_device("h100,memory_gib=64,network_gbps=12.5")
    assert (h100.memory_gib, h100.tflops("bfloat16"), h100.tflops("float32")) == (64, 989, 67)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h101", "device 'h101' is unknown, known are h200, h100"),
        ("h100,memory_gb=64", "memory_gb=64 is not allowed: give a number above 0 for one of bf16_tflops"),
        ("h100,memory_gib=0", "memory_gib=0 is not allowed: give a number above 0"),
    ],
)
def test_devices_that_are_not_known_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        get_device(text)
