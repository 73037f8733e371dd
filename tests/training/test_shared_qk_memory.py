"""Where `shared_qk` waits for its backward.

Loss and gradients are the same in every mode, and the memory of `shared_qk` is really freed.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import pod
from pod.modeling.model import decoder_layer
from pod.training.args import TrainArgs
from pod.training.predict.memory_estimate import TrainingJob, World, host_bytes, pinned_bytes, training_bytes
from pod.training.predict.shapes import (
    Shapes,
    continued_heads,
    fetched_heads,
    shared_qk_heads,
    shared_qk_heads_below,
    shared_qk_spans,
)
from pod.training.run import shared_qk as shared_qk_memory
from pod.training.run.shared_qk import (
    OffloadedSharedQK,
    RecomputedSharedQK,
    leads_that_end,
    set_shared_qk_memory,
)

LEAD = ((0, 0, 0), (0, 0, 1), (0, 2, 1), (3, 2, 1), (3, 4, 4))
ROLES = ((0, 0, None), (None, 0, 1), (0, None, None), (None, None, None), (0, 4, 1))
"""Windows before the first follower, between two followers, and where no `shared_qk` passes."""
PLANS = pytest.mark.parametrize("lead", [LEAD, ROLES], ids=["sharing", "roles"])
N, GROUPS, HEAD_DIM = 44, 2, 8
MODES = ("offload", "recompute")
STORES = [("offload", False), ("recompute", False), ("keep", True), ("offload", True), ("recompute", True)]
"""`train.shared_qk` and `train.offload_checkpoints` where they move something."""


def open_heads(lead):
    """Most leads that are on the device at a time in a backward that fetches or recomputes."""
    return max(fetched_heads(lead, layer) for layer in range(len(lead)))


def make_model(dtype=torch.float64, layout="pod", **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 5,
        "num_attention_heads": 3 * GROUPS,
        "num_key_value_heads": 3,
        "head_dim": HEAD_DIM,
        "initializer_range": 0.3,
        "num_sink_tokens": 2,
        "num_recent_tokens": 5,
        "layout": layout,
        "qk_norm": True,
    }
    if layout == "pod":
        sizes["lead"] = LEAD
    return pod.PodForCausalLM(pod.PodConfig(**sizes | changes)).to(dtype).train()


def checkpointed(mode, reentrant=False, offload_checkpoints=False, **options):
    model = make_model(**options)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    set_shared_qk_memory(model, mode, offload_checkpoints)
    return model


def some_ids(rows=1, seed=0):
    return torch.randint(0, 61, (rows, N), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids, docs=None):
    return model(ids, labels=ids, doc_ids=docs).loss


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(model, expected):
    got = gradients(model)
    assert all(torch.equal(got[name], gradient) for name, gradient in gradients(expected).items())


@pytest.mark.parametrize(("mode", "offload"), STORES)
@pytest.mark.parametrize(("layout", "lead"), [("pod", LEAD), ("pod", ROLES), ("cla", None)])
@pytest.mark.parametrize(
    ("reentrant", "dtype", "packed"),
    [(False, torch.float64, True), (False, torch.float32, False), (True, torch.float64, False)],
)
def test_loss_and_gradients_are_those_of_keep_bit_for_bit(
    mode, offload, layout, lead, reentrant, dtype, packed
):
    docs = torch.tensor([0] * 25 + [1] * 17 + [-1] * 2).expand(2, -1) if packed else None
    stores = (("keep", False), (mode, offload))
    models = [checkpointed(*(m, reentrant, o), dtype=dtype, layout=layout, lead=lead) for m, o in stores]
    losses = [loss_of(model, some_ids(2), docs) for model in models]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert_same(models[1], models[0])


@pytest.mark.parametrize("mode", MODES)
def test_autocast_of_the_forward_holds_for_the_recomputation(mode):
    options = {"dtype": torch.float32, "qk_norm": False, "attention_backend": "reference"}
    models = [checkpointed(m, **options) for m in ("keep", mode)]
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, some_ids())
        loss.backward()
    assert_same(models[1], models[0])


class Watch:
    """Storages of tensors that passed by: which still live."""

    def __init__(self):
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.count = 0

    def add(self, tensor):
        if tensor is not None:
            storage = tensor.untyped_storage()
            self.count += 1
            if storage._cdata not in self.seen or self.seen[storage._cdata][0].expired():
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def live_bytes(self):
        return sum(size for reference, size in self.seen.values() if not reference.expired())


@pytest.fixture
def handed_on(monkeypatch):
    """Storages of every tensor that a layer hands on."""
    watch, original = Watch(), decoder_layer.next_shared_qk

    def recording(*arguments):
        result = original(*arguments)
        for tensor in result:
            watch.add(tensor)
        return result

    for module in (decoder_layer, shared_qk_memory):
        monkeypatch.setattr(module, "next_shared_qk", recording)
    return watch


EACH = (GROUPS + 1) * HEAD_DIM * N * 8
"""Bytes of one head of `shared_qk`."""


@PLANS
@pytest.mark.parametrize(("mode", "held"), [("keep", 1), ("offload", 0), ("recompute", 0)])
def test_between_forward_and_backward_the_shared_qk_is_gone(handed_on, mode, held, lead):
    model = checkpointed(mode, lead=lead)
    loss = loss_of(model, some_ids())
    assert handed_on.live_bytes() == held * shared_qk_heads(lead) * EACH
    loss.backward()
    assert handed_on.live_bytes() == 0


def saved_bytes(model):
    """Bytes of all storages, weights left out, that autograd holds when a forward pass has ended."""
    watch, weights = Watch(), {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(x):
        if x.untyped_storage()._cdata not in weights:
            watch.add(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.model(some_ids()).last_hidden_state.sum()
    held = watch.live_bytes()
    loss.backward()
    return held


@PLANS
def test_sharing_keeps_the_shared_qk_of_leads_with_followers_and_nothing_else(lead):
    """Sharing keeps `shared_qk` of leads with followers and nothing else.

    Against a model without sharing it is at most (leads with followers) x (G + 1) x d x n, the bound of the
    design.
    """
    rows = [[layer] * 3 for layer in range(5)]
    dense, shared = (saved_bytes(checkpointed("keep", lead=x)) for x in (rows, lead))
    assert dense > 5 * 48 * N * 8  # a hidden state per layer
    assert (shared - dense) / (shared_qk_heads(lead) * EACH) == pytest.approx(1, abs=0.05)


@PLANS
def test_offload_copies_each_tensor_once_each_way_and_holds_open_blocks_only(lead):
    host, device, most = Watch(), Watch(), [0]

    def to_host(x):
        copy = shared_qk_memory.host_copy(x)
        host.add(copy)
        return copy

    def to_device(x, where):
        copy = shared_qk_memory.device_copy(x, where)
        device.add(copy)
        most[0] = max(most[0], device.live_bytes())
        return copy

    model = checkpointed("keep", lead=lead)
    memory = model.model.shared_qk_memory = OffloadedSharedQK()
    memory.to_host, memory.to_device = to_host, to_device
    loss = loss_of(model, some_ids())
    tensors, handed_on = 2 * shared_qk_heads(lead), shared_qk_heads(lead) * EACH
    assert (host.count, host.live_bytes()) == (tensors, handed_on)
    assert device.count == 0
    loss.backward(retain_graph=True)
    assert (device.count, device.live_bytes(), host.live_bytes()) == (tensors, 0, handed_on)
    loss.backward()
    assert device.count == 2 * tensors
    assert host.live_bytes() == device.live_bytes() == 0
    assert most[0] == open_heads(lead) * EACH


@PLANS
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_hands_shared_qk_on_holds_none_of_it(mode, lead):
    """A layer that hands `shared_qk` on holds none of it.

    When it has been recomputed, what lower layers follow as well is on the device, and nothing else.
    """
    model, live, watch = checkpointed(mode, lead=lead), {}, Watch()
    memory = model.model.shared_qk_memory
    take = shared_qk_memory._Entry.take

    def taken(entry):
        value = take(entry)
        watch.add(value)
        return value

    def note(layer):
        return lambda *_: live.update({layer: watch.live_bytes()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_qk_memory._Entry, "take", taken)
        for layer, module in enumerate(model.model.layers):
            module.mlp.register_full_backward_hook(note(layer))
        loss_of(model, some_ids()).backward()
    assert not memory._entries
    spans = shared_qk_spans(lead).values()
    assert live == {layer: EACH * sum(first < layer <= last for first, last in spans) for layer in range(5)}


@pytest.mark.parametrize("mode", ["keep", *MODES])
def test_hidden_states_of_checkpoints_wait_in_host_memory(mode):
    """Hidden states of checkpoints wait in host memory; none is left on the device.

    There is one copy each way per layer, and one more for each lead that is projected again.
    """
    state_bytes, layers, inputs, host, device = 48 * N * 8, 5, Watch(), Watch(), Watch()

    def to_host(x):
        copy = shared_qk_memory.host_copy(x)
        if x.shape[-1] == 48:
            host.add(copy)
        return copy

    def to_device(x, where):
        copy = shared_qk_memory.device_copy(x, where)
        if x.shape[-1] == 48:
            device.add(copy)
            assert device.live_bytes() <= 2 * state_bytes
        return copy

    model = checkpointed(mode, offload_checkpoints=True)
    memory = model.model.shared_qk_memory
    memory.to_host, memory.to_device = to_host, to_device
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, arguments: inputs.add(arguments[0]))
    loss = loss_of(model, some_ids())
    assert inputs.live_bytes() == 0
    assert (host.count, host.live_bytes()) == (layers, layers * state_bytes)
    loss.backward()
    assert device.count == layers + (5 if mode == "recompute" else 0)
    assert host.live_bytes() == device.live_bytes() == 0


@pytest.mark.parametrize(
    ("lead", "ends"),
    [(LEAD, [[], [0], [0], [2, 1], [3]]), (ROLES, [[], [0], [], [], [1, 0]])],
    ids=["sharing", "roles"],
)
def test_recompute_projects_a_lead_once_for_each_layer_in_which_blocks_of_it_end(monkeypatch, lead, ends):
    assert [leads_that_end(lead, layer) for layer in range(5)] == ends
    calls, original = [], shared_qk_memory.lead_shared_qk

    def counting(layer, *rest):
        calls.append(layer.self_attn.layer_idx)
        return original(layer, *rest)

    monkeypatch.setattr(shared_qk_memory, "lead_shared_qk", counting)
    model = checkpointed("recompute", lead=lead)
    loss = loss_of(model, some_ids())
    memory = model.model.shared_qk_memory
    assert not memory._lead_inputs, "hidden states must belong to the graph alone, which frees them"
    loss.backward()
    assert calls == [owner for owners in reversed(ends) for owner in owners]
    assert not memory._entries


@pytest.mark.parametrize("mode", MODES)
def test_graph_can_be_used_twice(mode):
    models = [checkpointed(m) for m in ("keep", mode)]
    for model in models:
        loss = loss_of(model, some_ids())
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(models[1], models[0])


@pytest.mark.parametrize("mode", MODES)
def test_two_forward_passes_before_their_backwards_do_not_mix(mode):
    models = [checkpointed(m) for m in ("keep", mode)]
    for model in models:
        losses = [loss_of(model, some_ids(seed=seed)) for seed in (1, 2)]
        losses[0].backward()
        losses[1].backward()
    assert_same(models[1], models[0])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_held_without_gradients(handed_on, mode):
    model = checkpointed(mode)
    with torch.no_grad():
        loss_of(model, some_ids())
    assert handed_on.live_bytes() == 0


def test_recompute_refuses_a_backward_that_starts_within_a_block():
    model = checkpointed("recompute")
    memory = model.model.shared_qk_memory
    assert isinstance(memory, RecomputedSharedQK)
    caught = []
    model.model.layers[1].register_forward_hook(lambda module, inputs, outputs: caught.append(outputs[0]))
    loss_of(model, some_ids())
    with pytest.raises(RuntimeError, match=r"set train\.shared_qk=offload"):
        caught[0].sum().backward()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shared_qk": "offload", "gradient_checkpointing": "none"}, "set gradient_checkpointing=full"),
        (
            {"shared_qk": "recompute", "method": "lora", "lora_dropout": 0.1},
            "set shared_qk=offload, or lora_dropout=0",
        ),
        ({"mlp_tile_tokens": -1}, "mlp_tile_tokens is -1"),
    ],
)
def test_recipes_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        TrainArgs(**settings)


def test_spans_of_a_plan_with_windows():
    """Leads (0, 0), (0, 1) and (1, 2) are followed."""
    assert shared_qk_spans(ROLES) == {(0, 1): (1, 1), (0, 0): (2, 4), (1, 2): (4, 4)}
    assert [shared_qk_heads_below(ROLES, layer) for layer in range(5)] == [0, 2, 3, 3, 3]
    assert [fetched_heads(ROLES, layer) for layer in range(5)] == [0, 1, 1, 1, 2]
    assert [continued_heads(ROLES, layer) for layer in range(5)] == [2, 2, 2, 2, 0]


def test_estimate_knows_where_shared_qk_is_and_how_large_a_tile():
    shapes = Shapes(
        hidden=48, layers=5, query_heads=6, kv_heads=3, head_dim=8, intermediate=400, vocab=61, tied=True
    )

    def job(args, ranks=1):
        return TrainingJob(shapes, LEAD, args, 1000, World(ranks, ranks))

    each = (GROUPS + 1) * HEAD_DIM * 1000 * 2
    parts = {
        mode: training_bytes(job(TrainArgs(shared_qk=mode))) for mode in ("keep", "offload", "recompute")
    }
    assert (shared_qk_heads(LEAD), open_heads(LEAD)) == (5, 2)
    assert parts["keep"]["shared_qk"] == shared_qk_heads(LEAD) * each
    assert parts["offload"]["shared_qk"] == parts["recompute"]["shared_qk"] <= open_heads(LEAD) * each
    offloaded = TrainArgs(shared_qk="offload", offload_optimizer="cpu")
    # pinned tensors take powers of two: of a head 32,000 bytes of queries and 16,000 of keys
    weights = shapes.parameters // 2
    held = {"shared_qk": shared_qk_heads(LEAD) * (32_768 + 16_384)}
    held["optimizer"] = 12 * weights + 2 * pinned_bytes(4 * weights)
    assert host_bytes(job(offloaded, 2)) == held
    assert training_bytes(job(offloaded, 2))["optimizer"] == 0
    assert host_bytes(job(TrainArgs())) == {}
    tiled = training_bytes(job(TrainArgs(mlp_tile_tokens=300)))
    # the backward of a feed-forward layer holds six [tokens, intermediate_size]
    assert (
        parts["keep"]["activations"]
        > tiled["activations"]
        >= parts["keep"]["activations"] - (1000 - 250) * 2 * 6 * 400
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", ["sp2_offload_tiled", "sp4_recompute_tiled"])
def test_ranks_with_other_heads_and_uneven_slices_equal_one_process(shared_qk_results, case):
    """Ranks with other heads and uneven slices equal one process.

    ZeRO-3 gathers every weight at every use. All ranks recompute, also those whose heads need nothing.
    """
    result = shared_qk_results[case]
    assert result["names_equal"]
    assert result["loss"] <= 1e-6
    assert result["gradient"] <= 1e-6, f"worst parameter: {result['worst']}"


@pytest.mark.multiprocess
def test_steps_under_zero3_have_the_losses_of_keep(shared_qk_results):
    keep, offload, recompute = (shared_qk_results[f"dp2_{mode}"] for mode in ("keep", "offload", "recompute"))
    assert [run["kind"] for run in (keep, offload, recompute)] == [
        "NoneType",
        "OffloadedSharedQK",
        "RecomputedSharedQK",
    ]
    assert [run["tiles"] for run in (keep, offload, recompute)] == [
        1,
        9,
        9,
    ]  # 2 rows of 41 tokens, tiles of 10
    for run in (keep, offload, recompute):
        assert run["losses"] == pytest.approx(keep["losses"], rel=1e-6)
        assert run["held"] == 0  # every weight was given back
    host = shared_qk_results["dp2_host_optimizer"]
    assert host["losses"] == pytest.approx(keep["losses"], rel=1e-6)
    assert (host["offloads"], keep["offloads"]) == (True, False)
    assert keep["losses"][-1] < keep["losses"][0]


@pytest.mark.multiprocess
def test_adapters_recompute_bit_for_bit(shared_qk_results):
    keep, recompute = shared_qk_results["lora_keep"], shared_qk_results["lora_recompute"]
    assert recompute["kind"] == "RecomputedSharedQK"
    assert recompute["losses"] == keep["losses"]
