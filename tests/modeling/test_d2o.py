"""D2O: layer budgets, merging in blocks and one by one, threshold, bytes, bounds, refusals."""

import math
from fractions import Fraction

import pytest
import torch
from rule_bytes import rule_nbytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pod
from pod.modeling.methods import d2o
from pod.modeling.methods.d2o import attention_variance, layer_budgets, smallest_budget
from pod.modeling.model.kv_buffer import take_slots


def feed(model, cache, ids, prompt):
    """Logits of a prompt and of the tokens behind it, one by one."""
    outputs = [model(ids[:, :prompt], past_key_values=cache).logits]
    outputs += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(prompt, ids.shape[1])]
    return torch.cat(outputs, dim=1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(n, count, seed=0, heads=(2, 3)):
    """Random slots kept (ascending) and dropped, per row and head."""
    order = torch.rand(*heads, n, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[..., :count].sort(-1).values, order[..., count:]


# -- merging -------------------------------------------------------------------------------------------------


def naive_merge(keys, values, kept, dropped):
    """Equations 8 to 11 for one head, with loops.

    The threshold is the mean of the maxima. ``[n, d]`` each.
    """
    best = {}
    for i in dropped:
        cosines = [(keys[i] @ keys[j] / (keys[i].norm() * keys[j].norm())).item() for j in kept]
        top = max(range(len(kept)), key=lambda j: (cosines[j], -j))
        best[i] = (cosines[top], kept[top])
    threshold = sum(u for u, _ in best.values()) / len(best)
    merged_keys, merged_values, sums = [], [], []
    for j in kept:
        mine = [(math.exp(u), i) for i, (u, nearest) in best.items() if nearest == j and u >= threshold]
        total = math.e + sum(weight for weight, _ in mine)
        weights = [(math.e / total, j)] + [(weight / total, i) for weight, i in mine]
        sums.append(sum(weight for weight, _ in weights))
        merged_keys.append(sum(weight * keys[i] for weight, i in weights))
        merged_values.append(sum(weight * values[i] for weight, i in weights))
    return torch.stack(merged_keys), torch.stack(merged_values), threshold, sums


def merge_everything(keys, values, kept, dropped):
    similarity, nearest = d2o.nearest_kept(keys, kept, dropped)
    threshold = similarity.mean(-1)
    weights = d2o.merge_weights(similarity, nearest, similarity >= threshold[..., None], kept.shape[2])
    merged = [d2o.merge_tokens(x, kept, dropped, nearest, weights) for x in (keys, values)]
    return *merged, threshold, weights, nearest


@pytest.mark.parametrize("blocks", [(1 << 22, 32), (1, 1), (200, 3)])
@pytest.mark.parametrize("count", [5, 30, 39])
def test_merging_in_blocks_equals_loops(monkeypatch, blocks, count):
    monkeypatch.setattr(d2o, "_BLOCK_ELEMENTS", blocks[0])
    monkeypatch.setattr(d2o, "_LEAST_ROWS", blocks[1])
    keys, values = randn(2, 3, 40, 8), randn(2, 3, 40, 8, seed=1)
    kept, dropped = split(40, count)
    merged_keys, merged_values, threshold, weights, nearest = merge_everything(keys, values, kept, dropped)
    own, others = weights
    totals = own + torch.zeros_like(own).scatter_add(2, nearest, others)
    assert (totals - 1).abs().max() <= 1e-14
    for row in range(2):
        for head in range(3):
            slots = kept[row, head].tolist(), dropped[row, head].tolist()
            expected = naive_merge(keys[row, head], values[row, head], *slots)
            assert (merged_keys[row, head] - expected[0]).abs().max() <= 1e-13
            assert (merged_values[row, head] - expected[1]).abs().max() <= 1e-13
            assert abs(threshold[row, head].item() + 1 - expected[2]) <= 1e-13
            assert max(abs(total - 1) for total in expected[3]) <= 1e-13


def test_kept_tokens_that_take_in_nothing_stay_as_they_are():
    keys, values = randn(2, 3, 40, 8), randn(2, 3, 40, 8, seed=1)
    kept, dropped = split(40, 30)
    merged_keys, _, _, (own, others), _ = merge_everything(keys, values, kept, dropped)
    same = merged_keys == take_slots(keys, kept)
    assert torch.equal(own == 1, same.all(-1)) and 0 < (own == 1).float().mean() < 1
    assert (own >= math.e / (math.e + 10 * math.e)).all() and ((others == 0).any(-1)).all()


def merge_one(keys, values, kept, dropped, threshold):
    """As ``D2OLayer`` does behind a decoded token."""
    (key, value), (keys, values) = (
        [take(x, slots) for x in (keys, values)]
        for take, slots in ((d2o.one_slot, dropped), (take_slots, kept))
    )
    similarity, nearest = d2o.nearest_slot(keys, key)
    share = d2o.share_of_one(similarity, similarity >= threshold)
    parts = (d2o.merge_one(x, nearest, y, share) for x, y in ((keys, key), (values, value)))
    return similarity, nearest, *parts


@pytest.mark.parametrize("threshold", [-1.0, 0.5, 1.0])
def test_merging_one_equals_merging_many(threshold):
    keys, values = randn(2, 3, 40, 3), randn(2, 3, 40, 3, seed=1)
    kept, dropped = split(40, 39)
    similarity, nearest = d2o.nearest_kept(keys, kept, dropped)
    bound = torch.full_like(similarity, threshold - 1)
    one = merge_one(keys, values, kept, dropped, bound)
    assert (one[0] - similarity).abs().max() <= 1e-14 and torch.equal(one[1], nearest)
    weights = d2o.merge_weights(similarity, nearest, similarity >= bound, 39)
    for x, merged in zip((keys, values), one[2:], strict=True):
        expected = d2o.merge_tokens(x, kept, dropped, nearest, weights)
        assert (merged - take_slots(expected, nearest)).abs().max() <= 1e-14


def test_the_first_dropped_token_is_its_own_threshold_and_is_merged():
    similarity = torch.tensor([[[-0.3]], [[0.0]]], dtype=torch.float64)
    share = d2o.share_of_one(similarity, similarity >= similarity)
    expected = (similarity + 1).exp() / (math.e + (similarity + 1).exp())
    assert (share - expected).abs().max() <= 1e-15
    assert d2o.share_of_one(similarity, similarity >= similarity + 1e-15).max() == 0


def test_equally_similar_tokens_go_to_the_lower_slot():
    keys = torch.tensor([[1.0, 2], [2, -1], [1, 2], [1, 2], [2, -1]], dtype=torch.float64)[None, None]
    kept, dropped = torch.tensor([[[0, 1, 2]]]), torch.tensor([[[4, 3]]])
    assert d2o.nearest_kept(keys, kept, dropped)[1].tolist() == [[[1, 0]]]
    assert d2o.nearest_slot(keys[:, :, :3], keys[:, :, 3:4])[1].tolist() == [[[0]]]


def test_a_key_of_zeros_is_like_none():
    keys = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
    keys[0, 0, 1] = torch.tensor([1e-200, 0.0])
    similarity, nearest = d2o.nearest_slot(keys, torch.zeros(1, 1, 1, 2, dtype=torch.float64))
    assert (similarity.item(), nearest.item()) == (-1.0, 0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@torch.no_grad()
def test_no_tensor_grows_with_the_square_of_the_prompt(tools, monkeypatch):
    """Half of the prompt is kept: kept times dropped would be n² / 4 per head."""
    from pod.kernels import statistics

    for module, name, value in [
        (d2o, "_BLOCK_ELEMENTS", 1 << 12),
        (d2o, "_LEAST_ROWS", 8),
        (statistics, "_CPU_ELEMENTS", 1 << 12),
        (statistics, "_LEAST_ROWS", 8),
    ]:
        monkeypatch.setattr(module, name, value)
    model = tools.make_pod(
        "llama",
        dtype=torch.float32,
        plan=False,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    largest = []
    for n in (512, 1024, 2048):
        cache = pod.make_cache(model, "d2o", budget=n // 2)
        with Largest() as seen:
            model.model(tools.random_ids(1, n), past_key_values=cache)
        assert cache.groups[0].layers[0].held == n // 2
        largest.append(seen.elements)
    assert largest[2] <= 2.1 * largest[1] <= 4.3 * largest[0]


@torch.no_grad()
def test_what_is_held_is_what_loops_merge(tools):
    """What is held is what loops merge, in both heads at every step.

    One layer, a prompt of 30 and 12 decoded tokens: keys, values, scores and threshold are compared.
    """
    model = tools.make_pod("llama", plan=False, num_hidden_layers=1)
    ids, n, budget, found, decided = tools.random_ids(1, 42), 30, 12, {}, set()

    def attend(index, q, k, v, turn):
        found["q"], found["k"], found["v"] = turn(q, torch.arange(42)), turn(k, torch.arange(42)), v
        return q

    def attention(head, i, keys):
        queries = found["q"][3 * head : 3 * head + 3, i]
        return (queries @ keys.T / math.sqrt(keys.shape[1])).softmax(-1).mean(0)

    def split_by(scores, count):
        ranked = sorted(range(4, len(scores) - 2), key=lambda slot: -scores[slot])
        stay = sorted([0, 1, 2, 3, *ranked[: count - 6], len(scores) - 2, len(scores) - 1])
        return stay, [slot for slot in range(len(scores)) if slot not in stay]

    tools.naive_logits(model, ids[0], attend)
    cache = pod.make_cache(model, "d2o", budget=budget)
    model(ids[:, :n], past_key_values=cache)
    states = []
    for head in range(2):
        keys, values, scores = found["k"][head, :n], found["v"][head, :n], torch.zeros(n, dtype=torch.float64)
        for i in range(n):
            scores[: i + 1] += attention(head, i, keys[: i + 1])
        kept, dropped = split_by(scores.tolist(), budget)
        merged = naive_merge(keys, values, kept, dropped)
        states.append([merged[0], merged[1], scores[kept], merged[2]])
    for t in range(n, 43):
        (layer,) = cache.groups[0].layers
        for head, (keys, values, scores, threshold) in enumerate(states):
            assert (layer.lead_keys.read(budget)[0, head] - keys).abs().max() <= 1e-12
            assert (layer.all_values.read(budget)[0, head] - values).abs().max() <= 1e-12
            assert (layer.statistics["attention"][0, head] - scores).abs().max() <= 1e-12
            assert abs(layer.statistics["threshold"][0, head].item() + 1 - threshold) <= 1e-12
        if t == 42:
            break
        model(ids[:, t : t + 1], past_key_values=cache)
        for head, (keys, values, scores, threshold) in enumerate(states):
            keys, values = (
                torch.cat((x, found[name][head, t : t + 1])) for x, name in ((keys, "k"), (values, "v"))
            )
            scores = torch.cat((scores, torch.zeros(1))) + attention(head, t, keys)
            kept, dropped = split_by(scores.tolist(), budget)
            merged_keys, merged_values, similarity, _ = naive_merge(keys, values, kept, dropped)
            threshold = 0.5 * similarity + 0.5 * threshold
            decided.add(similarity >= threshold)
            if similarity < threshold:
                merged_keys, merged_values = keys[kept], values[kept]
            states[head] = [merged_keys, merged_values, scores[kept], threshold]
    assert decided == {True, False}


# -- layers --------------------------------------------------------------------------------------------------


def test_layer_budgets_by_hand():
    three, one = Fraction(3), Fraction(1)
    assert layer_budgets([three, one], 100, 10) == [15, 5]
    assert layer_budgets([three, one], 15, 10) == [15, 5]
    assert layer_budgets([three, one], 12, 10) == [12, 8]  # the dense layer needs no more than it has
    assert layer_budgets([three, one], 10, 10) == [10, 10]
    assert layer_budgets([three, one], 7, 10) == [7, 7]
    assert layer_budgets([one] * 3, 100, 10) == layer_budgets([three] * 3, 100, 10) == [10] * 3
    assert layer_budgets([Fraction(5, 2), one, one], 100, 10) == [16, 6, 6]  # S = 30 / 4.5
    assert layer_budgets([Fraction(5, 2), one, three], 100, 10, is_printed=True) == [25, 10, 30]
    assert layer_budgets([Fraction(5, 2), one], 12, 10, is_printed=True) == [12, 10]
    assert layer_budgets([Fraction(1.1), one], 10**9, 21) == [22, 19]  # 1.1 is a little more than 11/10


@pytest.mark.parametrize("alpha", [1, 2, 3.0, 3.7])
@pytest.mark.parametrize("generous", range(6))
def test_layer_budgets_are_large_but_never_too_large(alpha, generous):
    weights = [Fraction(alpha)] * generous + [Fraction(1)] * (5 - generous)
    for n in range(1, 80):
        budgets = layer_budgets(weights, n, 20)
        assert sum(budgets) <= 100 and max(budgets) <= n
        assert sum(budgets) > 95 or (n <= 20 and budgets == [n] * 5)
        assert budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize("num_layers", [1, 2, 5, 32])
@pytest.mark.parametrize("alpha", [Fraction(1), Fraction(3), Fraction(2.7)])
def test_smallest_budget_is_the_smallest(num_layers, alpha):
    smallest = smallest_budget(num_layers, 4, alpha)

    def least(budget):
        cases = ([alpha] * (num_layers - ones) + [Fraction(1)] * ones for ones in range(num_layers + 1))
        return min(min(layer_budgets(weights, 10**6, budget)) for weights in cases)

    assert least(smallest) >= 5 > least(smallest - 1)


@torch.no_grad()
def test_dense_layers_get_more(tools):
    """F is computed from the whole matrix; a gate between the third and the fourth of five."""
    model = tools.make_pod("llama", plan=False)
    ids, n, variances = tools.random_ids(1, 40), 40, []

    def attend(index, q, k, v, turn):
        q, k = turn(q, torch.arange(n)), turn(k, torch.arange(n)).repeat_interleave(3, 0)
        logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        weights = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        columns = weights.sum(1)
        variances.append(((columns - 1) ** 2).mean(1).mean().item())  # a column sums to 1 on average
        assert abs(attention_variance(columns[None]).item() - variances[-1]) <= 1e-12
        return weights @ v.repeat_interleave(3, 0)

    tools.naive_logits(model, ids[0], attend)
    assert 0 < max(variances) / n < 1
    gate = sum(sorted(variances)[2:4]) / 2
    for options in ({"gate": gate}, {"gate": gate / n, "normalize_gate": True}):
        cache = pod.make_cache(model, "d2o", budget=14, **options)
        cache.begin_prompt(40)
        model(ids[:, :25], past_key_values=cache)
        assert all("column_sums" in layer.statistics for layer in cache.groups[0].layers)
        model(ids[:, 25:], past_key_values=cache)
        expected = [6 if variance > gate else 19 for variance in variances]  # S = 70 / 11
        assert [layer.held for layer in cache.groups[0].layers] == expected
        names = {"attention", "threshold", "variance"}
        assert all(set(layer.statistics) == names for layer in cache.groups[0].layers)
        scale = n if "normalize_gate" in options else 1
        for layer, variance in zip(cache.groups[0].layers, variances, strict=True):
            assert abs(layer.decisions(0)["variance"] - variance / scale) <= 1e-12
            assert layer.decisions(0)["tokens"] == layer.held


@torch.no_grad()
def test_threshold_follows_what_is_dropped(tools, monkeypatch):
    """Mean of the maxima after a prompt, then a moving average; nothing dropped leaves it alone."""
    seen = []
    for name in ("nearest_kept", "nearest_slot"):
        original = getattr(d2o, name)

        def record(*arguments, original=original):
            out = original(*arguments)
            seen.append(out[0].mean(-1, keepdim=True))
            return out

        monkeypatch.setattr(d2o, name, record)
    model = tools.make_pod("llama", plan=False, num_hidden_layers=1)
    cache = pod.make_cache(model, "d2o", budget=12, beta=0.3)
    ids = tools.random_ids(1, 40)
    model(ids[:, :30], past_key_values=cache)
    (layer,) = cache.groups[0].layers
    expected = seen[-1]
    assert torch.equal(layer.statistics["threshold"], expected)
    for t in range(30, 36):
        model(ids[:, t : t + 1], past_key_values=cache)
        expected = 0.3 * seen[-1] + 0.7 * expected
        assert (layer.statistics["threshold"] - expected).abs().max() <= 1e-15
    assert len(seen) == 7
    model(ids[:, 36:], past_key_values=cache)  # a second prompt starts anew
    assert torch.equal(layer.statistics["threshold"], seen[-1]) and len(seen) == 8
    late = pod.make_cache(model, "d2o", budget=12, beta=0.3)
    feed(model, late, ids[:, :12], 11)
    assert "threshold" not in late.groups[0].layers[0].statistics
    model(ids[:, 12:13], past_key_values=late)
    assert torch.equal(late.groups[0].layers[0].statistics["threshold"], seen[-1])


# -- caches --------------------------------------------------------------------------------------------------


def method_bytes(cache):
    """Bytes without the token ids and lengths, which every cache keeps."""
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


def held(cache):
    return sum(layer.held for layer in cache.groups[0].layers)


@pytest.mark.parametrize(("spec", "steps"), [("d2o", 500), ("d2o+int4", 120)])
@torch.no_grad()
def test_five_hundred_tokens_stay_within_the_bound(tools, spec, steps):
    """Half of the layers may grow to three times the others'; all of them together stay within the budget."""
    model = tools.make_pod("llama", dtype=torch.float32, plan=False, num_hidden_layers=2, head_dim=32)
    options = {"residual": 8, "group_size": 8} if "int4" in spec else {}
    cache = pod.make_cache(model, spec, budget=24, gate=1.1, **options)
    ids = tools.random_ids(1, 40)
    model(ids[:, :20], past_key_values=cache)
    assert held(cache) == 40
    after_prompt, most = 0, 0
    for t in range(steps):
        out = model(ids[:, t % 40 : t % 40 + 1], past_key_values=cache)
        assert held(cache) == (2 * (t + 21) if t < 4 else 48)
        most = max(most, method_bytes(cache))
        after_prompt = most if t == 40 else after_prompt
    assert out.logits.isfinite().all() and most <= after_prompt * 1.05
    weights = sorted(layer.weight for layer in cache.groups[0].layers)
    assert weights == [1, 3] and sorted(layer.held for layer in cache.groups[0].layers) == [12, 36]


@pytest.mark.parametrize("spec", ["d2o", "d2o+int4", "d2o+int8"])
@torch.no_grad()
def test_bytes_are_those_predicted(tools, spec):
    model = tools.make_pod("llama", dtype=torch.float32, plan=False, num_hidden_layers=2, head_dim=32)
    cache = pod.make_cache(model, spec, budget=400, **({"residual": 32} if "int" in spec else {}))
    feed(model, cache, tools.random_ids(1, 705), 700)
    assert abs(method_bytes(cache) / rule_nbytes(cache) - 1) <= 0.01
    assert spec != "d2o" or method_bytes(cache) == rule_nbytes(cache)  # nothing grows between two evictions


@torch.no_grad()
def test_a_codec_that_packs_nothing_changes_nothing(tools):
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(1, 60)
    native = feed(model, pod.make_cache(model, "d2o", budget=20, gate=2.0), ids, 40)
    options = {"budget": 20, "gate": 2.0, "group_size": 8}
    packed = feed(model, pod.make_cache(model, "d2o+int8", residual=60, **options), ids, 40)
    rough = feed(model, pod.make_cache(model, "d2o+int8", residual=0, **options), ids, 40)
    assert torch.equal(native, packed)
    assert torch.equal(native[:, :40], rough[:, :40])
    assert 1e-6 < (native - rough)[:, 40].abs().max() < 0.5  # later, other tokens may be dropped


@torch.no_grad()
def test_rows_have_weights_of_their_own(tools):
    """Rows that differ in which layers are dense: each is as alone."""
    model = tools.make_pod("llama", plan=False)
    ids = torch.cat((tools.random_ids(2, 50), torch.full((1, 50), 7)))
    mask = torch.ones(3, 50, dtype=torch.long)
    mask[1, :12] = 0
    cache = pod.make_cache(model, "d2o", budget=14, gate=1.5)
    together = model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache).logits
    outputs = [together]
    for t in range(40, 50):
        outputs.append(
            model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
        )
    together = torch.cat(outputs, dim=1)
    layouts = {tuple(layer.held for layer in group.layers) for group in cache.groups}
    assert len(layouts) > 1
    for row in range(3):
        real = ids[row : row + 1, mask[row].bool()]
        alone = feed(model, pod.make_cache(model, "d2o", budget=14, gate=1.5), real, real.shape[1] - 10)
        assert (together[row, mask[row].bool()] - alone[0]).abs().max() <= 1e-9


def test_requests_that_cannot_work_are_refused(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for options, message in [
        ({"budget": 12}, "raise the budget to 13 or more"),
        ({"budget": 40, "alpha": 0.5}, "between 1 and 1000"),
        ({"budget": 40, "alpha": math.inf}, "between 1 and 1000"),
        ({"budget": 40, "beta": 2.0}, "between 0 and 1"),
        ({"budget": 40, "num_sink_tokens": -1}, "at least 0"),
        ({"budget": 40, "normalize_gate": True}, "gate such as 0.05"),
        ({"budget": 40, "similarity": "queries"}, "choose keys, values or both"),
        ({"budget": 4, "budget_rule": "printed"}, "raise the budget to 5 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(dense, "d2o", **options)
    pod.make_cache(dense, "d2o", budget=13)
    pod.make_cache(dense, "d2o", budget=5, budget_rule="printed")
    with pytest.raises(ValueError, match="merge"):
        pod.make_cache(shared, "pod+d2o", budget=40)
