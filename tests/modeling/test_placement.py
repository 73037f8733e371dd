"""Where the parts of a model lie: arithmetic on shapes, no weights and no second device."""

import pytest
import torch
from large_configs import LLAMA_70B
from transformers import Qwen2Config

import pod
from pod.modeling.loading import target_config
from pod.modeling.placement import (
    ModelParts,
    Unplaced,
    capacities,
    heads_that_cross,
    lay_out,
    missing_device,
    parts_of,
    place,
)

GIB = 2**30
GPUS = [torch.device("cuda", number) for number in range(8)]


def blocks_of(size: int, layers: int, heads: int) -> pod.SharingPlan:
    """Every head follows the first layer of its block."""
    return pod.SharingPlan([[layer - layer % size] * heads for layer in range(layers)])


def complaint(call, *arguments, **options) -> str:
    with pytest.raises(ValueError) as refused:
        call(*arguments, **options)
    said = str(refused.value)
    assert "\n" not in said
    return said


def layers_on(places: dict[str, torch.device]) -> list[int]:
    """How many layers each device has, in order."""
    found = [places[f"model.layers.{layer}"] for layer in range(sum("layers" in name for name in places))]
    assert sorted(found, key=lambda device: device.index) == found, "a device has neighbouring layers"
    return [found.count(device) for device in dict.fromkeys(found)]


@pytest.mark.parametrize(("count", "size"), [(2, 80), (8, 24)])
def test_70b_lies_on_two_large_and_on_eight_small_devices(count, size):
    config = target_config(LLAMA_70B, plan=blocks_of(4, 80, 8))
    parts = parts_of(config, bytes_per_number=2)
    assert sum(parts.sizes) == 141_107_412_992  # Llama-3-70B has 70,553,706,496 parameters
    limit = dict.fromkeys(GPUS[:count], size * 10**9)
    places = place(config, 2, "balanced", limit)
    held = dict.fromkeys(limit, 0)
    for device, bytes_of_part in zip(list(places.values())[:-1], parts.sizes, strict=True):
        held[device] += bytes_of_part
    assert sum(layers_on(places)) == 80 and len(layers_on(places)) == count
    assert all(held[device] <= limit[device] for device in limit)
    assert (
        places["lm_head"] == places["model.norm"] == GPUS[count - 1]
        and places["model.embed_tokens"] == GPUS[0]
    )
    if count == 2:  # as even as can be, and at a border of blocks
        assert layers_on(places) == [40, 40]
    else:  # ten layers each would cut every second block
        assert layers_on(places) == [8, 8, 8, 12, 12, 12, 12, 8]


def test_a_border_goes_to_the_end_of_a_block_where_memory_allows():
    crossing = [0, 0, 3, 3, 3, 3, 0, 0, 0, 0]  # a block of layers 0-4, then dense ones, behind an embedding
    parts = ModelParts([0, *[8] * 8, 0], crossing)
    assert (
        lay_out(parts, [100, 100]).index(1) == 6
    )  # even would be 5, inside a block: one layer more is 1.25 times
    assert lay_out(parts, [36, 36]).index(1) == 5  # no device takes five layers
    assert lay_out(parts._replace(crossing=[0] * 10), [100, 100]).index(1) == 5


def test_devices_of_unlike_size_are_filled_by_the_same_share():
    parts = ModelParts([0, *[1] * 30, 0], [0] * 32)
    found = lay_out(parts, [10, 30, 20])
    assert [found.count(device) for device in range(3)] == [5 + 1, 15, 10 + 1]


def test_sequential_fills_one_device_after_the_other():
    parts = ModelParts([2, *[1] * 10, 2], [0] * 12)
    assert lay_out(parts, [5, 9, 100], "sequential") == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    with pytest.raises(Unplaced, match="do not fit"):
        lay_out(parts, [5, 5, 2], "sequential")


def test_heads_cross_between_a_lead_and_its_followers():
    lead = [[0, None], [0, 1], [None, 1], [0, 1], [4, None]]
    config = pod.PodConfig(num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, lead=lead)
    assert heads_that_cross(config) == [0, 1, 2, 2, 0]


def test_auto_takes_as_few_devices_as_hold_the_weights():
    config = target_config(LLAMA_70B)
    for each, used in ((160, 1), (90, 2), (40, 4)):
        places = place(config, 2, "auto", dict.fromkeys(GPUS, each * 10**9))
        assert len(set(places.values())) == used
    assert len(set(place(config, 2, "balanced", dict.fromkeys(GPUS, 160 * 10**9)).values())) == 8


def test_auto_leaves_room_for_the_cache_where_memory_is_what_is_free(monkeypatch):
    config = target_config(LLAMA_70B)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    for free, used in ((80, 3), (210, 1), (45, 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 10**9, 90 * 10**9))
        assert len(set(place(config, 2, "auto", None).values())) == used
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * 10**9, 90 * 10**9))
    said = complaint(place, config, 2, "auto", None)
    assert said.startswith("device_map = 'auto': 141.1 GB in parts of up to ") and "use more devices" in said


def test_one_device_that_is_too_small_is_refused_before_weights_are_read(monkeypatch):
    """All of its free memory may be taken, since there is no other device."""
    config = target_config(LLAMA_70B)
    weights = sum(parts_of(config, 2).sizes)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights, weights))
    assert set(place(config, 2, "auto", None).values()) == {GPUS[0]}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights - 1, weights))
    assert "use more devices" in complaint(place, config, 2, "auto", None)


def test_sizes_may_be_texts_and_devices_numbers():
    assert capacities({"cuda:1": "2GiB", 0: 7}) == {GPUS[0]: 7, GPUS[1]: 2 * GIB}
    assert "max_memory[0] = 'much' is no size" in complaint(capacities, {0: "much"})
    for size in (None, -5, 0, float("nan"), True, [1]):
        assert f"max_memory[0] = {size!r} is no size" in complaint(capacities, {0: size})
    for mapping in ({}, "70GiB", 70, [1]):
        assert f"max_memory = {mapping!r} must be a mapping" in complaint(capacities, mapping)
    assert "max_memory names disk" in complaint(capacities, {"disk": 1})
    assert "max_memory names cpu beside other devices" in complaint(capacities, {0: "2GiB", "cpu": "9GiB"})
    assert [(device.type, size) for device, size in capacities({"cpu": 7}).items()] == [("cpu", 7)]


def test_a_device_is_missing_from_the_number_of_devices_on(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    there = [torch.device(name) for name in ("cpu", "meta", "cuda", "cuda:0", "cuda:1")]
    assert missing_device(there) is None
    missing = [*there, torch.device("cuda:2"), torch.device("mps")]
    assert missing_device(missing) == "cuda:2, but this machine has 2 devices cuda"
    assert missing_device(missing[-1:]) == "mps, but this machine has 2 devices cuda"


def test_a_map_by_modules_is_taken_or_refused_in_one_line():
    def config(tied):
        return target_config(Qwen2Config(num_hidden_layers=3, tie_word_embeddings=tied))

    halves = {"model.embed_tokens": 0, "model.layers": 0, "model.layers.2": 1, "model.norm": 1, "lm_head": 1}
    places = place(config(False), 2, halves, None)
    assert [places[f"model.layers.{layer}"].index for layer in range(3)] == [0, 0, 1]
    for changes, says in (
        ({"model.layers.1.mlp": 1},
         "device_map names model.layers.1.mlp: a layer lies on one device; name model.layers.1"),
        ({"model.layer.1": 1},
         "device_map names model.layer.1, which the model does not have: did you mean model.layers.1?"),
        ({"model.layers.2": "cpu"}, "device_map names cpu beside other devices: nothing is offloaded"),
        ({"model.layers.2": "disk"}, "device_map names disk: nothing is offloaded to host memory or disk"),
        ({"model.layers.2": "gpu"}, "device_map names 'gpu', which is no device"),
        ({"model.layers.2": -1}, "device_map names -1, which is no device"),
        ({0: 1}, "device_map names 0: its keys are names of modules, as 'model.layers.0'"),
    ):  # fmt: skip
        assert says in complaint(place, config(False), 2, halves | changes, None)
    without = {name: device for name, device in halves.items() if name != "model.norm"}
    assert "says nothing of model.norm" in complaint(place, config(False), 2, without, None)
    assert "they are one weight (tie_word_embeddings)" in complaint(place, config(True), 2, halves, None)
    stock = halves | {"lm_head": 0, "model.rotary_emb": 0}
    assert place(config(True), 2, stock, None)["lm_head"] == GPUS[0]


def test_transformers_lays_an_export_out_by_whole_layers():
    from accelerate import infer_auto_device_map

    from pod.modeling.loading import empty_model

    config = pod.PodConfig(
        num_hidden_layers=6, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=8
    )
    model = empty_model(config)
    each = sum(weight.numel() for weight in model.model.layers[0].parameters()) * 4
    limits = {0: int(3.5 * each), 1: int(3.5 * each), "cpu": 20 * each}
    found = infer_auto_device_map(model, limits, no_split_module_classes=model._no_split_modules)
    cut = [name for name in found if name.startswith("model.layers.") and name.count(".") > 2]
    assert cut == [] and {found[f"model.layers.{layer}"] for layer in range(6)} >= {0, 1}
    assert "past_key_values" in model._skip_keys_device_placement


def test_explore_takes_the_gpus_of_its_rank(monkeypatch):
    from pod.plan.exploration import placement_arguments

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert placement_arguments() == {"device": "cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 20))
    for count, ranks, rank, expected in (
        (1, 1, 0, {"device": "cuda:0"}),
        (4, 1, 0, {"device_map": "auto"}),
        (4, 4, 3, {"device": "cuda:3"}),
        (4, 2, 1, {"device_map": "auto", "max_memory": {GPUS[2]: 9.0, GPUS[3]: 9.0}}),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert placement_arguments() == expected
