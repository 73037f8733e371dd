"""RazorAttention: what its heads hold, and what the compensation token is made of.

Also bytes, packing and refusals.
"""

import math

import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.razor import CompensationToken
from pod.modeling.methods.sliding import SlidingTokens, Tokens
from pod.modeling.model.group_quantizer import GroupQuantizer
from pod.modeling.model.kv_quantizer import NATIVE
from pod.modeling.retrieval_heads import RetrievalHeads, plan_of_heads

HEADS = [[0], [], [1], [0, 1], []]
OPTIONS = {"heads": HEADS, "num_sink_tokens": 2, "num_recent_tokens": 5, "compression": 4.0}


def feed(model, cache, ids, *widths):
    """Logits of consecutive passes of these widths."""
    outputs, start = [], cache.get_seq_length()
    for width in widths:
        outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
        start += width
    return torch.cat(outputs, 1)


def children(cache):
    (group,) = cache.groups
    return group.layers


def measured(cache):
    return sum(size for name, size in cache.nbytes_by_part().items() if name != "bookkeeping")


@torch.no_grad()
def test_what_each_head_holds(tools):
    """Each head holds what the rule says.

    30 tokens: max(5, 30 // 4) = 7 recent ones. A prompt that ends at 63 lets them grow to 15, from below.
    """
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(2, 80)
    cache = pod.make_cache(model, "razor", **OPTIONS)
    seen = 0
    for widths, recent in (([30], 7), ([1] * 6, 7), ([27], 15), ([1] * 8, 15)):
        feed(model, cache, ids, *widths)
        seen += sum(widths)
        for layer, full in zip(children(cache), HEADS, strict=True):
            held = layer.everything.beside.keys.read(seen).shape[1:3] if full else (0, seen)
            assert held == (len(full), seen) and layer.everything.beside.keys.is_empty == (not full)
            if len(full) == 2:
                assert layer.near.held == 0 and layer.compensation.count == 0
                continue
            assert layer.near.num_recent == recent and layer.near.held == 2 + recent
            assert layer.compensation.count == seen - 2 - recent and layer.near.num_beside == 0


@torch.no_grad()
def test_window_that_grows_is_not_filled_back(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 60)
    cache = pod.make_cache(model, "razor", **OPTIONS)
    held = []
    for width in [40, *[1] * 4, 3, *[1] * 3]:  # 10 recent, then 47 // 4 = 11
        feed(model, cache, ids, width)
        held.append(children(cache)[1].near.held - 2)
    assert held == [10] * 5 + [11] * 4
    cache = pod.make_cache(model, "razor", **OPTIONS | {"compression": 2.0})
    held = []
    for width in [20, *[1] * 8, 2, *[1] * 5]:  # 10 recent, which slide; at 30 there are 12 of the 15 wanted
        feed(model, cache, ids, width)
        held.append(children(cache)[1].near.held - 2)
    assert held == [10] * 9 + [12, 13, 14, 15, 15, 15]


@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
@torch.no_grad()
def test_compensation_is_the_mean_of_all_that_left(tools, family):
    """Layer 0 computes the same keys and values as a full cache."""
    model, ids = tools.make_pod(family, plan=False), tools.random_ids(2, 60)
    cache, full = pod.make_cache(model, "razor", **OPTIONS), pod.make_cache(model, "full")
    for widths in ([30], [1] * 5, [9], [1] * 7):
        feed(model, cache, ids, *widths)
        feed(model, full, ids, *widths)
        layer = children(cache)[0]
        (seen,) = set(cache.lengths.tolist())
        left = slice(2, seen - layer.near.held + 2)
        assert layer.compensation.count == left.stop - left.start > 0
        buffers = full.layers[0].lead_keys, full.layers[0].all_values
        for mean, buffer in zip(layer.compensation.mean, buffers, strict=True):
            expected = buffer.read(seen)[:, 1:, left].mean(2, keepdim=True)
            assert (mean - expected).abs().max() <= 1e-12


def test_mean_of_many_tokens_does_not_freeze_in_half_precision():
    """Steps of size 1/N fall below what bf16 can add to the mean."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 1, 6000, 4).cumsum(2).div(40).bfloat16()
    compensation = CompensationToken()
    compensation.add(Tokens(tokens[:, :, :1000], tokens[:, :, :1000]))
    for at in range(1000, 6000):
        compensation.add(Tokens(tokens[:, :, at : at + 1], tokens[:, :, at : at + 1]))
    exact = tokens.double().mean(2, keepdim=True)
    assert (compensation.mean[0].double() - exact).abs().max() < 1e-4 * exact.abs().max()
    ((tokens, bias),) = compensation.seen(torch.bfloat16)
    assert bias == math.log(6000) and tokens.keys.dtype == torch.bfloat16


@pytest.mark.parametrize("quantizer", [NATIVE, GroupQuantizer(8, 4, 2)], ids=["native", "int8"])
@pytest.mark.parametrize("seed", range(6))
def test_sliding_tokens_against_lists(quantizer, seed):
    """Random prompts, decoded tokens and growing windows; every token carries its number."""
    generator = torch.Generator().manual_seed(seed)

    def dice(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    class Dropped:
        def add(self, tokens):
            assert torch.equal(tokens.keys.round(), -tokens.values.round())  # a group of keys is rounded
            dropped.extend(tokens.keys[1, 2, :, 0].round().int().tolist())

        def seen(self, dtype):
            return []

    sinks, recent = dice(0, 3), dice(1, 12)
    sliding, near, seen, dropped, expected = SlidingTokens(quantizer, sinks, Dropped()), [], 0, [], []
    for _ in range(25):
        for is_decode in [False] * dice(0, 2) + [True] * dice(0, 6):
            count = 1 if is_decode else dice(1, 14)
            numbers = torch.arange(seen, seen + count).double()
            tokens = Tokens(
                numbers[None, None, :, None].expand(2, 3, -1, 4),
                -numbers[None, None, :, None].expand(2, 3, -1, 4),
            )
            near, seen = near + numbers.tolist(), seen + count
            if is_decode and sliding.window is not None:
                sliding.attend_decode(torch.zeros(2, 6, 1, 4).double(), tokens, 1.0)
            else:
                recent += dice(0, 2) if dice(0, 3) == 0 else 0
                sliding.append(tokens)
                sliding.trim(recent)
            sliding.flush()
            while len(near) > max(sinks, min(len(near), sinks + recent)):
                expected.append(near.pop(sinks))
            held = sliding.window.read(sliding.entered)
            assert sorted(held.keys[0, 1, :, 2].round().tolist()) == near
            assert sorted((-held.values[0, 0, :, 0]).round().tolist()) == near and sliding.held == len(near)
    assert dropped == expected


@pytest.mark.parametrize("compensation", [True, False])
@pytest.mark.parametrize("spec", ["razor", "razor+int4", "razor+int8"])
@torch.no_grad()
def test_bytes_are_those_of_the_rule(tools, spec, compensation):
    model, ids = (
        tools.make_pod("llama", plan=False, dtype=torch.float32, head_dim=32),
        tools.random_ids(2, 400),
    )
    options = OPTIONS | {"num_recent_tokens": 48, "compensation": compensation}
    if spec != "razor":
        options |= {"group_size": 16, "residual": 16}
    cache, full = pod.make_cache(model, spec, **options), pod.make_cache(model, "full")
    sizes = {}
    for widths in ([300], [1] * 60):
        feed(model, cache, ids, *widths)
        feed(model, full, ids, *widths)
        sizes[cache.get_seq_length()] = measured(cache)
        assert abs(measured(cache) / rule_nbytes(cache) - 1) < 0.01
    if spec == "razor":
        token, pairs = 2 * 32 * 4, 10  # bytes of a key and a value; (layer, KV head)
        for n, window in ((300, 75), (360, 75)):
            exact = 2 * token * (4 * n + (pairs - 4) * (2 + window + compensation))
            assert abs(sizes[n] / exact - 1) < 0.01
        assert ("compensation" in cache.nbytes_by_part()) == compensation
    share = 0.4 + 0.6 * 77 / 360
    assert (
        measured(cache)
        < measured(full) * share * {"razor": 1.01, "razor+int4": 0.4, "razor+int8": 0.55}[spec]
    )


@torch.no_grad()
def test_what_no_token_was_written_to_is_never_read(tools):
    """Room for growth and the slots of dropped tokens filled with NaN."""
    model, ids = tools.make_pod("qwen3-g3", plan=False), tools.random_ids(1, 60)
    outputs = []
    for poison in (False, True):
        cache, logits = pod.make_cache(model, "razor", **OPTIONS), []
        for widths in ([17], [13], [1] * 9, [11], [1] * 6):
            logits.append(feed(model, cache, ids, *widths))
            for layer in children(cache) if poison else []:
                near, seen = layer.near, cache.get_seq_length()
                for pair, length in (
                    (layer.everything.beside, seen),
                    (near.window, near.entered),
                    (near.beside, near.num_beside),
                ):
                    for buffer in pair or ():
                        if not buffer.is_empty:
                            buffer.data[:, :, buffer.used_slots(length) :] = math.nan
        outputs.append(torch.cat(logits, 1))
    assert outputs[1].isfinite().all() and torch.equal(*outputs)


@torch.no_grad()
def test_rows_in_a_padded_batch_and_reordered_rows(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(3, 60)
    lengths, mask = [40, 33, 12], torch.ones(3, 48, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : 40 - length] = 0
    cache = pod.make_cache(model, "razor", **OPTIONS)
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    for t in range(40, 48):
        mask_now = mask[order, : t + 1]
        together = model(ids[:, t : t + 1], attention_mask=mask_now, past_key_values=cache).logits
    for row, source in enumerate(order.tolist()):
        alone = pod.make_cache(model, "razor", **OPTIONS)
        model(ids[source : source + 1, 40 - lengths[source] : 40], past_key_values=alone)
        for t in range(40, 48):
            logits = model(ids[row : row + 1, t : t + 1], past_key_values=alone).logits
        assert (together[row] - logits[0]).abs().max() <= 1e-9


@torch.no_grad()
def test_packed_window_stays_near_the_native_one(tools):
    """8 bits: small differences; a wrong slot or a forgotten token would be large."""
    model, ids = tools.make_pod("llama", plan=False, head_dim=16), tools.random_ids(1, 90)
    options = OPTIONS | {"num_recent_tokens": 20}
    native, packed = (
        feed(model, pod.make_cache(model, spec, **options, **extra), ids, 50, *[1] * 15, 8, *[1] * 12)
        for spec, extra in (("razor", {}), ("razor+int8", {"group_size": 8, "residual": 4}))
    )
    scale = native.std()
    assert 1e-6 < (native - packed).abs().max() / scale < 0.3
    assert (native - feed(model, pod.make_cache(model, "full"), ids, 85)).abs().max() / scale > 0.5


@torch.no_grad()
def test_without_compensation_only_what_is_held_counts(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 40)
    caches = [pod.make_cache(model, "razor", **OPTIONS, compensation=flag) for flag in (True, False)]
    outputs = [feed(model, cache, ids, 30, *[1] * 8) for cache in caches]
    assert torch.equal(outputs[0][:, :30], outputs[1][:, :30])
    assert (outputs[0] - outputs[1])[:, 30:].abs().max() > 1e-3
    assert all(layer.compensation.count == 0 for layer in children(caches[1]))


def test_heads_from_the_search_and_refusals(tools, tmp_path):
    model, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    scores = [[0.0] * 6 for _ in range(5)]
    scores[3][4] = 0.5
    path = tmp_path / "heads.json"
    rows = tuple(map(tuple, scores))
    RetrievalHeads(echo=rows, induction=rows, num_key_value_heads=2, induction_share=0.01).save(path)
    cache = pod.make_cache(model, "razor", heads=str(path))
    with torch.no_grad():
        feed(model, cache, tools.random_ids(1, 5), 5)
    assert [layer.roles.leads for layer in children(cache)] == [(), (), (), (1,), ()]
    for target, options, message in [
        (model, {}, "`pod explore --heads`"),
        (model, {"heads": [[0]]}, "for each of 5 layers"),
        (model, {"heads": [[2]] * 5}, "whole numbers from 0 to 1"),
        (model, {"heads": [[0.7]] * 5}, "a list of whole numbers"),
        (model, {"heads": [["1"]] * 5}, "a list of whole numbers"),
        (model, {"heads": str(tmp_path / "no.json")}, "no such file"),
        (
            tools.make_pod("llama-linear-mha", plan=False),
            {"heads": str(path)},
            "2 KV heads, this one has 5, 6 and 6",
        ),
        (model, {"heads": HEADS, "compression": 0.5}, "at least 1"),
        (model, {"heads": HEADS, "compression": "5"}, "must be a number"),
        (model, {"heads": HEADS, "num_recent_tokens": 0}, "num_recent_tokens = 0 must be at least 1"),
        (model, {"heads": HEADS, "num_sink_tokens": -1}, "num_sink_tokens = -1 must be at least 0"),
        (model, {"heads": HEADS, "budget": 50}, "takes no budget"),
        (shared, {"heads": HEADS}, "without a sharing plan"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            pod.make_cache(target, "razor", **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="keys of their own"):
        pod.make_cache(shared, "pod+razor", heads=HEADS)


def test_gates_of_duo_attention_choose_heads(tools, tmp_path):
    """Gates of DuoAttention choose heads.

    The file has a line per layer and a gate per KV head. The share with the largest gates leads, the lower
    pair in a tie.
    """
    model, path = tools.make_pod("llama", plan=False), tmp_path / "full_attention_heads.tsv"
    path.write_text("0.1\t1.0\n0.0\t0.7\n0.7\t2e-1\n0.0\t0.0\n9.5e-01\t0.7\n")
    for share, leads in ((0.26, [[1], [1], [], [], [0]]), (0.0, [[]] * 5), (1.0, [[0, 1]] * 5)):
        assert plan_of_heads(path, model.config, share) == pod.SharingPlan.of_leads(leads, 2)
    duo = {"num_sink_tokens": 2, "num_recent_tokens": 5, "compression": 1e9, "compensation": False}
    cache = pod.make_cache(model, "razor", heads=str(path), share=0.3, **duo)
    with torch.no_grad():
        feed(model, cache, tools.random_ids(1, 40), 30, *[1] * 10)
    assert [layer.roles.leads for layer in children(cache)] == [(1,), (1,), (), (), (0,)]
    assert [layer.near.held for layer in children(cache)] == [7] * 5
    for text, share, message in [
        ("0.1\t1.0\n" * 5, None, "give share, as 0.5"),
        ("0.1\t1.0\n" * 4, 0.5, "must have 5 lines of 2 gates from 0 to 1"),
        ("0.1\n" * 5, 0.5, "must have 5 lines of 2 gates"),
        ("0.1\tnan\n" * 5, 0.5, "must have 5 lines of 2 gates"),
        ("0.1\tx\n" * 5, 0.5, "cannot read gates from .*tsv: could not convert"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            plan_of_heads(path, model.config, share)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cannot read gates from"):
        plan_of_heads(tmp_path / "none.tsv", model.config, 0.5)


@torch.no_grad()
def test_the_plan_of_its_heads_is_the_dense_and_streaming_model(tools):
    """Leads see everything, and windows see sinks and recent tokens, in the prompt too.

    The plan may be named in place of the heads.
    """
    from test_generation import pod_oracle

    dense, ids = tools.make_pod("qwen3-g3", plan=False), tools.random_ids(1, 40)
    plan = plan_of_heads([[0], [], [1], [0, 1], [0]], dense.config)
    streaming = pod.load_model(
        tools.make_stock("qwen3-g3"), plan=plan, num_sink_tokens=2, num_recent_tokens=5
    )
    expected = tools.naive_logits(streaming, ids[0], pod_oracle(streaming, (2, 5)))
    assert (streaming(ids).logits[0] - expected).abs().max() <= 1e-9
    listed, planned = (
        feed(dense, pod.make_cache(dense, "razor", **OPTIONS | {"heads": heads}), ids, 30, *[1] * 10)
        for heads in ([[0], [], [1], [0, 1], [0]], plan)
    )
    assert torch.equal(listed, planned)
    with pytest.raises(ValueError, match="a plan with 2 followers"):
        pod.make_cache(dense, "razor", heads=pod.SharingPlan([[0, 0], [0, 0], [2, 2], [3, 3], [4, 4]]))


def test_random_heads_are_as_many_and_others_by_seed(tools):
    """RazorAttention Table 1: 15 % of the heads, drawn."""
    config = tools.make_pod("llama", plan=False).config
    drawn = [plan_of_heads("random", config, share, seed) for share in (None, 0.5) for seed in range(20)]
    assert {plan.num_leads for plan in drawn[:20]} == {2} and {plan.num_leads for plan in drawn[20:]} == {5}
    assert drawn[0] == plan_of_heads("random", config) and len({plan.lead for plan in drawn[20:]}) > 15
    counts = [
        sum(plan.lead[layer][head] is not None for plan in drawn[20:])
        for layer in range(5)
        for head in range(2)
    ]
    assert min(counts) >= 3 and max(counts) <= 17, "no pair is preferred"
    assert plan_of_heads("random", config, 0.0).num_leads == 0
