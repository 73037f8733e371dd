"""H2O, and what the methods that add up attention share: which tokens stay, bytes, bounds, refusals."""

import math
from fractions import Fraction

import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.base import round_half_up
from pod.modeling.methods.h2o import choose_slots
from pod.modeling.model.kv_buffer import take_slots


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dropped", [1, 2, 7])
def test_choice_of_slots(seed, dropped):
    """Few different scores, so that most comparisons are ties: the lower slot stays."""
    generator = torch.Generator().manual_seed(seed)
    first, last, n = 2, 3, 20
    scores = torch.randint(0, 4, (2, 3, n), generator=generator).double()
    kept, gone = choose_slots(scores, n - dropped, first, last)
    if kept is None:
        assert dropped == 1
        kept = torch.arange(n).expand(2, 3, n).scatter(2, gone, n).sort(-1).values[..., :-1]
    assert kept.shape == (2, 3, n - dropped) and gone.shape == (2, 3, dropped)
    for row in range(2):
        for head in range(3):
            ranked = sorted(range(first, n - last), key=lambda slot: (-scores[row, head, slot].item(), slot))
            worst = set(ranked[len(ranked) - dropped :])
            assert kept[row, head].tolist() == [slot for slot in range(n) if slot not in worst]
            assert set(gone[row, head].tolist()) == worst


@pytest.mark.parametrize("view", ["whole", "slots", "heads", "expanded", "transposed"])
def test_slots_of_any_view(view):
    x = torch.randn(2, 5, 9, 4, generator=torch.Generator().manual_seed(0))
    x = {
        "whole": x,
        "slots": x[:, :, 1:7],
        "heads": x[1:, 2:4],
        "expanded": x[:1].expand(3, -1, -1, -1),
        "transposed": x.transpose(1, 2),
    }[view]
    slots = torch.randint(0, x.shape[2], (*x.shape[:2], 3), generator=torch.Generator().manual_seed(1))
    assert torch.equal(take_slots(x, slots), x.gather(2, slots[..., None].expand(-1, -1, -1, 4)))


def test_rounding_is_exact():
    def share(of, n):
        return round_half_up(Fraction(str(of)) * n)

    assert [share(0.5, n) for n in (1, 2, 3, 5)] == [1, 1, 2, 3]
    assert share(0.3, 14) == 4 and share(0.0, 9) == 0 and share(1.0, 9) == 9


def feed(model, cache, ids, prompt):
    """Logits of a prompt and of the tokens behind it, one by one."""
    outputs = [model(ids[:, :prompt], past_key_values=cache).logits]
    outputs += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(prompt, ids.shape[1])]
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def test_kept_tokens_are_those_with_the_most_attention(tools):
    """First layer, two rows: sums over the whole matrix, tokens recognised by their values."""
    model = tools.make_pod("llama", plan=False)
    ids, n, budget, recent = tools.random_ids(2, 30), 30, 11, 4
    cache = pod.make_cache(model, "h2o", budget=budget, num_recent_tokens=recent)
    model(ids, past_key_values=cache)
    layer = cache.groups[0].layers[0]
    frequencies = {}

    def attend(index, q, k, v, turn):
        q, k = turn(q, torch.arange(n)), turn(k, torch.arange(n))
        if index == 0:
            frequencies["q"], frequencies["k"], frequencies["v"] = q, k, v
        keys, values = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        logits = q @ keys.transpose(1, 2) / math.sqrt(q.shape[2])
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        if index == 0:
            frequencies["sums"] = weights.sum(1).view(2, 3, n).mean(1)
        return weights @ values

    for row in range(2):
        tools.naive_logits(model, ids[row], attend)
        for head in range(2):
            sums = frequencies["sums"][head]
            ranked = sorted(range(n - recent), key=lambda slot: (-sums[slot].item(), slot))
            stay = sorted(ranked[: budget - recent]) + list(range(n - recent, n))
            assert (
                layer.all_values.read(budget)[row, head] - frequencies["v"][head, stay]
            ).abs().max() <= 1e-12
            assert (
                layer.lead_keys.read(budget)[row, head] - frequencies["k"][head, stay]
            ).abs().max() <= 1e-12
            assert (layer.statistics["attention"][row, head] - sums[stay]).abs().max() <= 1e-12


@torch.no_grad()
def test_first_tokens_have_no_privilege(tools):
    model = tools.make_pod("llama", plan=False)
    cache = pod.make_cache(model, "h2o", budget=12)
    ids = tools.random_ids(1, 21)
    model(ids[:, :20], past_key_values=cache)
    layers = cache.groups[0].layers
    second = [layer.all_values.read(12)[:, :, 1].clone() for layer in layers]
    for layer in layers:
        layer.statistics["attention"][..., 0] = -9.0
    model(ids[:, 20:], past_key_values=cache)
    for layer, value in zip(layers, second, strict=True):
        assert layer.held == 12 and torch.equal(layer.all_values.read(12)[:, :, 0], value)


@torch.no_grad()
def test_sums_add_up_to_the_number_of_queries_while_nothing_is_dropped(tools):
    model = tools.make_pod("qwen3-g3", plan=False)
    cache = pod.make_cache(model, "h2o", budget=64)
    feed(model, cache, tools.random_ids(2, 30), 20)
    for layer in cache.groups[0].layers:
        assert (layer.statistics["attention"].sum(-1) - 30).abs().max() <= 1e-12


@pytest.mark.parametrize(("spec", "steps"), [("h2o", 500), ("h2o+int4", 120)])
@torch.no_grad()
def test_five_hundred_tokens_stay_within_the_bound(tools, spec, steps):
    model = tools.make_pod("llama", dtype=torch.float32, plan=False, num_hidden_layers=1, head_dim=32)
    options = {"residual": 8, "group_size": 8} if "int4" in spec else {}
    cache = pod.make_cache(model, spec, budget=24, **options)
    ids = tools.random_ids(2, 40)
    model(ids, past_key_values=cache)
    after_prompt, most = method_bytes(cache), 0
    for t in range(steps):
        model(ids[:, t % 40 : t % 40 + 1], past_key_values=cache)
        most = max(most, method_bytes(cache))
        assert all(layer.held == 24 for layer in cache.groups[0].layers)
    assert most <= after_prompt * 1.05
    statistics = 2 * 2 * 24 * 4  # rows, heads, tokens, bytes
    assert cache.nbytes_by_part()["statistics"] == statistics
    if spec == "h2o":
        assert most <= (2 * 2 * 24 * 2 * 32 * 4 + statistics) * 1.05


def method_bytes(cache):
    """Bytes without the token ids and lengths, which every cache keeps."""
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


@pytest.mark.parametrize("spec", ["h2o", "h2o+int4", "h2o+int8"])
@pytest.mark.parametrize("tokens", [100, 700])
@torch.no_grad()
def test_bytes_are_those_predicted(tools, spec, tokens):
    model = tools.make_pod("llama", dtype=torch.float32, plan=False, num_hidden_layers=2, head_dim=32)
    cache = pod.make_cache(model, spec, budget=400, **({"residual": 32} if "int" in spec else {}))
    feed(model, cache, tools.random_ids(1, tokens + 5), tokens)
    assert abs(method_bytes(cache) / rule_nbytes(cache) - 1) <= 0.01


@torch.no_grad()
def test_a_codec_that_packs_nothing_changes_nothing(tools):
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(1, 60)
    native = feed(model, pod.make_cache(model, "h2o", budget=20), ids, 40)
    packed = feed(model, pod.make_cache(model, "h2o+int8", budget=20, group_size=8, residual=60), ids, 40)
    rough = feed(model, pod.make_cache(model, "h2o+int8", budget=20, group_size=8, residual=0), ids, 40)
    assert torch.equal(native, packed)
    assert torch.equal(native[:, :40], rough[:, :40])  # nothing is packed before the prompt ends
    assert 1e-6 < (native - rough)[:, 40].abs().max() < 0.5  # later, other tokens may be dropped


@torch.no_grad()
def test_rows_of_a_batch_do_not_mix(tools):
    """The same row beside two different neighbours, and alone."""
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(3, 50)
    alone = feed(model, pod.make_cache(model, "h2o", budget=14), ids[:1], 30)
    for neighbour in (1, 2):
        pair = ids[[0, neighbour]]
        together = feed(model, pod.make_cache(model, "h2o", budget=14), pair, 30)
        assert (together[:1] - alone).abs().max() <= 1e-9


def test_requests_that_cannot_work_are_refused(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for model, options, message in [
        (dense, {"budget": 1}, "at least 2"),
        (
            dense,
            {"budget": 8, "num_recent_tokens": 8},
            "budget = 8 must be at least 2 and more than num_recent_tokens = 8",
        ),
        (dense, {"budget": 8, "num_recent_tokens": 0}, "num_recent_tokens = 0"),
        (dense, {"budget": 8, "num_recent_tokens": 2.5}, "whole number"),
        (dense, {"budget": 8, "prefill": "lazy"}, "choose exact or streaming"),
        (dense, {}, "needs a budget"),
        (shared, {"budget": 8}, "without a sharing plan"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, "h2o", **options)
    with pytest.raises(ValueError, match="slot by slot"):
        pod.make_cache(shared, "pod+h2o", budget=8)
