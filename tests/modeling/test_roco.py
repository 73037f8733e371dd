"""RoCo: mean and variance of a token's attention, what they protect and drop, bytes, bounds, refusals."""

import math

import pytest
import torch
from rule_bytes import rule_nbytes

import pod
from pod.modeling.methods.roco import mean_and_variance, protect_largest


def feed(model, cache, ids, prompt):
    """Logits of a prompt and of the tokens behind it, one by one."""
    outputs = [model(ids[:, :prompt], past_key_values=cache).logits]
    outputs += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(prompt, ids.shape[1])]
    return torch.cat(outputs, dim=1)


def test_mean_and_variance():
    weights = torch.rand(2, 3, 40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.full((2, 3, 7), 40)
    mean, variance = mean_and_variance(weights.sum(2), weights.square().sum(2), counts)
    assert (mean - weights.mean(2)).abs().max() <= 1e-14
    assert (variance - weights.var(2, correction=0)).abs().max() <= 1e-14
    constant = torch.full((1, 1, 1), 0.1, dtype=torch.float32)
    assert mean_and_variance(constant * 3, constant.square() * 3, counts[:1, :1, :1] * 0 + 3)[1] >= 0


def test_protection():
    scores = torch.arange(5.0).repeat(1, 2, 1)
    variance = torch.tensor([[[1.0, 3, 3, 0, 3], [0, 0, 0, 0, 9]]])
    protect_largest(scores, variance, 2)
    assert scores[0].isinf().tolist() == [
        [False, True, True, False, False],
        [True, False, False, False, True],
    ]
    before = scores.clone()
    protect_largest(scores, variance, 0)
    assert torch.equal(scores, before)


@torch.no_grad()
def test_mean_attention_is_fair_to_new_tokens(tools):
    """Queries that could see a token: from its position, which survives evictions, chunks and turns."""
    model = tools.make_pod("qwen3-g3", plan=False)
    cache = pod.make_cache(model, "roco", budget=26, prefill="streaming", chunk_size=9)
    feed(model, cache, tools.random_ids(1, 60), 41)
    for layer in cache.groups[0].layers:
        positions = layer.statistics["positions"]
        assert positions.dtype == torch.int32 and (positions.diff(dim=-1) > 0).all()
        assert (positions[..., :4] == torch.arange(4)).all()
        assert (positions[..., -10:] == torch.arange(50, 60)).all()
        sums, squares = layer.statistics["attention"], layer.statistics["squares"]
        counts = 60 - positions
        assert ((sums / counts) <= 1 + 1e-12).all() and (squares <= sums + 1e-12).all()
        assert (squares * counts >= sums.square() - 1e-12).all()


@torch.no_grad()
def test_protected_tokens_stay_in_spite_of_their_mean(tools):
    """Protected tokens stay in spite of their mean.

    First layer: 16 of 20 tokens stay by their mean, some or all by their variance, from sums over the whole
    matrix.
    """
    model, n = tools.make_pod("llama", plan=False), 80
    ids, kept, ranked = tools.random_ids(1, n), [], []
    for share in (0.0, 0.5, 0.8):
        options = {"num_sink_tokens": 3, "num_recent_tokens": 1, "protect_decode": 0.0}
        cache = pod.make_cache(model, "roco", budget=20, protect_prefill=share, **options)
        model(ids, past_key_values=cache)
        kept.append(cache.groups[0].layers[0].statistics["positions"][0].tolist())

    def attend(index, q, k, v, turn):
        q, k = turn(q, torch.arange(n)), turn(k, torch.arange(n)).repeat_interleave(3, 0)
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        weights = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        if index == 0:
            counts = torch.arange(n, 0, -1)
            mean = weights.sum(1).view(2, 3, n).mean(1) / counts
            variance = weights.square().sum(1).view(2, 3, n).mean(1) / counts - mean.square()
            for x in (mean, variance):
                ranked.append((3 + x[:, 3 : n - 1].argsort(-1, descending=True)).tolist())
        return weights @ v.repeat_interleave(3, 0)

    tools.naive_logits(model, ids[0], attend)
    means, variances = ranked
    for head in range(2):
        for stay, count in zip(kept, (0, 10, 16), strict=True):
            protected = set(variances[head][:count])
            others = [slot for slot in means[head] if slot not in protected][: 16 - count]
            assert stay[head] == sorted([0, 1, 2, *protected, *others, n - 1])
    assert kept[0] != kept[2]


@pytest.mark.parametrize(("spec", "steps"), [("roco", 500), ("roco+int4", 120)])
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
    assert cache.nbytes_by_part()["statistics"] == 2 * 2 * 24 * 3 * 4  # rows, heads, tokens, kinds, bytes


def method_bytes(cache):
    """Bytes without the token ids and lengths, which every cache keeps."""
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


@pytest.mark.parametrize("spec", ["roco", "roco+int4"])
@torch.no_grad()
def test_bytes_are_those_predicted(tools, spec):
    model = tools.make_pod("llama", dtype=torch.float32, plan=False, num_hidden_layers=2, head_dim=32)
    cache = pod.make_cache(model, spec, budget=400, **({"residual": 32} if "int" in spec else {}))
    feed(model, cache, tools.random_ids(1, 705), 700)
    assert abs(method_bytes(cache) / rule_nbytes(cache) - 1) <= 0.01


def test_requests_that_cannot_work_are_refused(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for options, message in [
        ({"budget": 19}, "budget = 19 is less than 4 sinks, 10 recent and 6 protected"),
        ({"budget": 40, "num_recent_tokens": 0}, "at least 1"),
        ({"budget": 40, "num_sink_tokens": -1}, "at least 0"),
        ({"budget": 40, "protect_decode": 1.5}, "between 0 and 1"),
        ({"budget": 40, "protect_prefil": 0.5}, "did you mean 'protect_prefill'"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(dense, "roco", **options)
    pod.make_cache(dense, "roco", budget=20)
    with pytest.raises(ValueError, match="slot by slot"):
        pod.make_cache(shared, "pod+roco", budget=40)
