"""Constant sinks of plans.

What they are measured to be, what windows with them cost, and plans that have them.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plan_models import gradients_of_attention, make_model

import pod
from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sinks import Sink
from pod.models import resolve_model
from pod.plan import calibration
from pod.plan.calibration import (
    find_sinks,
    first_keys,
    first_tokens,
    fitted_sink,
    window_queries,
    with_constants,
)
from pod.plan.choose import in_all_layers
from pod.plan.costs import TextWithGradients, measure_costs
from pod.plan.exploration import Exploration
from pod.plan.layer_constants import LayerConstants
from pod.plan.recording import record_attention_inputs, sample_queries
from pod.recipe import load_recipe

TOKENS, RECENT = 41, 7
HEADS = [(6, 2), (3, 3), (4, 1), (9, 3)]  # query heads, KV heads


def ids_of(n=TOKENS, seed=5):
    return torch.randint(0, 61, (1, n), generator=torch.Generator().manual_seed(seed))


def random_sinks(model, seed=0):
    """Constants about as heavy as a window."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    shapes = (config.num_attention_heads,), (config.num_key_value_heads, config.head_dim)
    shapes = *shapes, shapes[1]
    rows = [[torch.randn(shape, generator=generator).double() for shape in shapes] for _ in range(4)]
    return [LayerConstants(1 + logits, values, keys) for logits, values, keys in rows]


class Naive:
    """The definitions on n x n matrices, one query head after the other."""

    def __init__(self, model, input_ids):
        self.model, self.n = model, input_ids.shape[1]
        self.inputs = list(record_attention_inputs(model, input_ids))
        self.groups = model.config.num_key_value_groups

    def turned(self, key):
        """A vector ``[d]`` at every position ``[n, d]``: channels c and c + d / 2 as a complex number."""
        half = len(key) // 2
        frequencies = 1 / 10000.0 ** (torch.arange(half) / half)  # fp32, as models have them
        angles = torch.arange(self.n)[:, None] * frequencies.double()
        pairs = torch.complex(key[:half], key[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=1)

    def logits(self, layer, query_head, key=None):
        """``[n, n]``; ``key`` ``[d]`` is subtracted from the keys before rotation."""
        inputs = self.inputs[layer]
        keys = inputs.k[query_head // self.groups]
        if key is not None:
            keys = keys - self.turned(key)
        raw = inputs.q[query_head] @ keys.T / keys.shape[-1] ** 0.5
        return raw.masked_fill(torch.ones(self.n, self.n).triu(1).bool(), float("-inf"))

    def window(self, layer, query_head, sink):
        """Output ``[n, d]`` of the window and one more column, at every position."""
        position = torch.arange(self.n)
        outside = position[:, None] - position >= self.model.config.num_recent_tokens
        head = query_head // self.groups
        seen = self.logits(layer, query_head, sink.keys[head]).masked_fill(outside, float("-inf"))
        table = torch.cat([seen, sink.logits[query_head].expand(self.n, 1)], dim=1)
        return table.softmax(-1) @ torch.cat([self.inputs[layer].v[head], sink.values[head][None]])

    def change(self, layer, head, sink):
        """Of every query ``[n, hidden]``: the change of the output of the layer's attention."""
        projection, own = self.model.model.layers[layer].self_attn.o_proj, self.inputs[layer]
        d = own.v.shape[-1]
        change = torch.zeros(self.n, projection.weight.shape[0]).double()
        for query_head in range(head * self.groups, (head + 1) * self.groups):
            full = self.logits(layer, query_head).softmax(-1) @ own.v[head]
            columns = projection.weight[:, query_head * d : (query_head + 1) * d]
            change += (self.window(layer, query_head, sink) - full) @ columns.T
        return change

    def misfits(self, layer, head, sink):
        """Of every query ``[n]``: the change of what the residual stream gets, relative to it."""
        decoder, own = self.model.model.layers[layer], self.inputs[layer]
        change = self.change(layer, head, sink)
        if decoder.norms[1] is not None:
            outs = [
                self.logits(layer, one).softmax(-1) @ own.v[one // self.groups]
                for one in range(self.groups * len(own.v))
            ]
            added = decoder.self_attn.o_proj(torch.cat(outs, -1))
            norm = decoder.post_attention_layernorm
            change *= (norm.weight + norm.offset) / (added.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return (change * decoder.residual_multiplier).square().sum(-1) / own.hidden_states.square().sum(-1)


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@torch.no_grad()
def test_the_start_is_what_distant_queries_read_from_the_first_four_tokens(heads, with_keys):
    model, ids = make_model(*heads, sinks=0, recent=RECENT), ids_of()
    naive = Naive(model, ids)
    positions = sample_queries(TOKENS, 9, 0, RECENT).positions
    assert positions.min() >= RECENT
    groups = heads[0] // heads[1]
    keys = [sink.keys if with_keys else None for sink in random_sinks(model)]
    for layer, (_, sink) in enumerate(window_queries(model, ids, 9, keys)):
        own = [None] * heads[1] if keys[layer] is None else keys[layer]
        first = [naive.logits(layer, head, own[head // groups])[positions, :4] for head in range(heads[0])]
        for head, logits in enumerate(first):
            assert sink.logits[head].item() == pytest.approx(logits.logsumexp(-1).mean().item(), rel=1e-9)
        for head in range(heads[1]):
            values = naive.inputs[layer].v[head, :4]
            read = [logits.softmax(-1) @ values for logits in first[head * groups : (head + 1) * groups]]
            torch.testing.assert_close(sink.values[head], torch.stack(read).mean((0, 1)))


@pytest.mark.parametrize(
    ("heads", "recent", "queries", "changes"),
    [
        *((heads, RECENT, 9, {}) for heads in HEADS),
        ((6, 2), 1, 5, {}),
        ((6, 2), 30, 11, {}),
        ((6, 2), RECENT, TOKENS - RECENT, {}),
        ((6, 2), RECENT, 9, {"norm_placement": "behind", "qk_norm": True}),
        ((6, 2), RECENT, 9, {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    ],
)
@torch.no_grad()
def test_misfits_equal_their_definition_at_distant_and_at_early_queries(heads, recent, queries, changes):
    """The sink counts at every position: first tokens whole, other early ones by their share of the text."""
    model, ids = make_model(*heads, sinks=0, recent=recent, **changes), ids_of()
    sinks = random_sinks(model)
    found = [
        own.misfits(sink).sum(1)
        for (own, _), sink in zip(
            window_queries(model, ids, queries, [sink.keys for sink in sinks]), sinks, strict=True
        )
    ]
    naive = Naive(model, ids)
    alone = [Naive(model, ids[:, index * TOKENS // 32][None]) for index in range(32)]
    distant = sample_queries(TOKENS, queries, 0, recent).positions
    early = [1 + index * (recent - 1) // queries for index in range(queries)]
    if queries >= recent - 1:
        early = list(range(1, recent))
    for layer, head in itertools.product(range(4), range(heads[1])):
        misfits = naive.misfits(layer, head, sinks[layer])
        first = [one.misfits(layer, head, sinks[layer]) for one in alone]
        expected = torch.cat(first).mean() + misfits[distant].mean()
        if early:
            expected = expected + (recent - 1) / TOKENS * misfits[early].mean()
        assert expected > 1e-6
        assert found[layer][head].item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("heads", HEADS)
@torch.no_grad()
def test_costs_count_the_sink_at_every_position(heads):
    model, ids = make_model(*heads, sinks=0, recent=RECENT), ids_of()
    sinks = random_sinks(model)
    found = (
        measure_costs(model, TextWithGradients.of(model, ids, 9, sinks), None)["windows"]
        .flatten(2)
        .flatten(0, 1)
    )
    naive, gradients = Naive(model, ids), gradients_of_attention(model, ids)
    changes = [
        (naive.change(layer, head, sinks[layer]) * gradients[layer]).sum(-1)
        for layer, head in itertools.product(range(4), range(heads[1]))
    ]
    together = torch.stack(changes)
    torch.testing.assert_close(found, together @ together.T / (2 * TOKENS), rtol=1e-9, atol=1e-15)


@torch.no_grad()
def test_a_sink_of_no_weight_costs_what_a_window_without_one_costs():
    model, ids = make_model(6, 2, sinks=0, recent=RECENT), ids_of()
    nothing = [LayerConstants(torch.full((6,), -1e4).double(), sink.values) for sink in random_sinks(model)]
    found = measure_costs(model, TextWithGradients.of(model, ids, 9, nothing), None)
    torch.testing.assert_close(
        found["windows"], measure_costs(model, TextWithGradients.of(model, ids, 9), None)["windows"]
    )


def test_fitting_finds_constants_that_explain_everything():
    """Outputs made by a sink are explained by it, from a start that is far off."""
    model, ids = make_model(6, 2, sinks=0, recent=RECENT), ids_of(80)
    true = random_sinks(model, seed=3)[1]
    queries, start = list(window_queries(model, ids, 30))[1]
    share = torch.sigmoid(true.logits.view(2, 3, 1) - queries.lse)[..., None]
    made = replace(queries, out=(1 - share) * queries.near + share * true.values[:, None, None])
    found = fitted_sink(made, start)
    assert made.misfits(found).sum() < 1e-4 * made.misfits(start).sum()
    torch.testing.assert_close(found.logits, true.logits, rtol=0, atol=0.1)


def test_fitted_constants_fit_better_than_measured_ones():
    model = make_model(6, 2, sinks=0, recent=RECENT)
    texts = [ids_of(80, seed)[0] for seed in range(3)]
    fitted = find_sinks(model, texts, 20)
    keys = [sink.keys for sink in fitted]
    measured = []
    for layer in zip(*(window_queries(model, ids[None], 20, keys) for ids in texts), strict=True):
        parts = zip(*(sink for _, sink in layer), strict=True)
        measured.append(Sink(*(torch.stack(part).mean(0) for part in parts)))
    sums = []
    for sinks in (fitted, measured):
        costs = [
            torch.stack([own.misfits(sink).sum() for (own, _), sink in zip(layers, sinks, strict=True)])
            for layers in (window_queries(model, ids[None], 20, keys) for ids in texts)
        ]
        sums.append(sum(costs))
    assert (sums[0] < 0.9 * sums[1]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_qkv_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 64}},
        {"no_rope_layers": [1, 0, 1, 1]},
        {"qk_norm": True},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
@torch.no_grad()
def test_keys_are_those_of_first_tokens_in_channels_that_hardly_turn(changes):
    model = make_model(6, 2, sinks=0, recent=RECENT, **changes)
    for layer in model.model.layers:
        if layer.self_attn.k_proj.bias is not None:
            torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=3.0)
    texts = [ids_of(64, seed)[0] for seed in range(3)]
    seen = [[] for _ in model.model.layers]
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _, given, out, own=own: own.append(out[:, 0]))
        for layer, own in zip(model.model.layers, seen, strict=True)
    ]
    model(torch.cat([text[::2] for text in texts])[:, None], use_cache=False)  # 32 of each, one token each
    for hook in hooks:
        hook.remove()
    found = first_keys(model, texts)
    if model.config.qk_norm:
        assert found == [None] * 4
        return
    ropes = model.model.context(torch.zeros(1, 1, 1).double(), torch.zeros(1, 1, dtype=torch.long)).ropes
    for key, (own,), rope in zip(found, seen, ropes, strict=True):
        little = [float(one) * (RECENT - 1) <= 0.3 for one in rope.frequencies]
        expected = own.mean(0).view(2, 8) * torch.tensor(little * 2)
        assert sum(little) > 0 and (sum(little) < 4) == bool(rope.frequencies.any())
        torch.testing.assert_close(key, expected, rtol=1e-9, atol=1e-12)


def test_a_key_that_fits_worse_is_not_taken(monkeypatch):
    model, texts = make_model(6, 2, sinks=0, recent=RECENT), [ids_of(80)[0]]
    keys = first_keys(model, texts)
    wild = [*keys[:2], keys[2] + 30 * torch.randn(keys[2].shape).double(), keys[3]]
    monkeypatch.setattr(calibration, "first_keys", lambda *_: wild)
    found = find_sinks(model, texts, 20)
    assert not found[2].keys.any()
    monkeypatch.setattr(calibration, "first_keys", lambda *_: [None] * 4)
    plain = find_sinks(model, texts, 20)
    assert torch.equal(found[2].logits, plain[2].logits) and plain[2].keys is None


def test_first_tokens_are_those_of_texts():
    ids = torch.arange(100, 200)
    assert first_tokens(ids, None).tolist() == [100 + index * 100 // 32 for index in range(32)]
    assert first_tokens(ids, 7).tolist()[0] == 100
    assert first_tokens(ids[:5], 7).tolist() == [100, 101, 102, 103, 104]
    assert first_tokens(ids, 100).tolist() == [100]  # all texts begin with it


def test_a_sink_that_hurts_first_tokens_costs_more():
    """A sink that is light beside 48 tokens is heavy beside one. Distant queries hardly see it."""
    torch.manual_seed(1)
    model, ids = make_model(6, 2, sinks=0, recent=48), ids_of(160)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data *= 0.3 if number == 1 else 1.0
    values = torch.full((2, 8), 4.0)
    light = LayerConstants(torch.full((6,), -30.0), values)
    heavy = LayerConstants(torch.full((6,), 1.0), values)
    sinks = [heavy if layer == 1 else light for layer in range(4)]
    own, none = (
        measure_costs(model, TextWithGradients.of(model, ids, 32, one), None)["windows"]
        for one in (sinks, [light] * 4)
    )
    alone, without = (torch.einsum("ijij->i", one) for one in (own, none))
    assert alone[1] > 1.2 * without[1]
    torch.testing.assert_close(alone[[0, 2, 3]], without[[0, 2, 3]])


@torch.no_grad()
def test_constants_stand_in_the_plans_order_of_heads():
    """The same model with its heads in another order computes the same."""
    model, ids = make_model(6, 2, sinks=0, recent=RECENT), ids_of()
    sinks = random_sinks(model)
    lead = ((0, None), (None, None), (2, 2), (None, 3))
    plain = SharingPlan(lead, num_sink_tokens=0, num_recent_tokens=RECENT)
    swap, turned = (3, 5, 4, 2, 0, 1), (0, 2, 1, 4, 3, 5)
    order = (swap, turned, (0, 1, 2, 3, 4, 5), swap)
    moved = replace(plain, lead=((None, 0), (None, None), (2, 2), (3, None)), head_order=order)
    logits = [pod.load_model(model, plan=with_constants(plan, sinks))(ids).logits for plan in (plain, moved)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-10)
    without = pod.load_model(model, plan=plain)(ids).logits
    assert (without - logits[0]).abs().max() > 1e-3
    constants = with_constants(moved, sinks).sink_constants
    assert constants.logits[2] is constants.values[2] is constants.keys[2] is None
    assert constants.logits[0] == tuple(sinks[0].logits[list(swap)].tolist())
    assert constants.values[0] == tuple(map(tuple, sinks[0].values[[1, 0]].tolist()))


def test_calibrate_sinks_gives_a_plan_that_loads():
    stock, ids = make_model(6, 2, sinks=0, recent=RECENT), ids_of(64)[0]
    plan = SharingPlan(((0, None), (None, None), (2, 2), (3, 3)), num_sink_tokens=4, num_recent_tokens=RECENT)
    made = pod.calibrate_sinks(stock, plan, [ids, ids.flip(0).tolist()], num_queries=9)
    assert (made.sinks, made.num_sink_tokens, made.lead) == ("constant", 0, plan.lead)
    expected = find_sinks(stock, [ids, ids.flip(0)], 9)
    assert made.sink_constants.logits[1] == pytest.approx(expected[1].logits.tolist(), abs=1e-4)
    assert made.sink_constants.logits[2:] == (None, None)
    assert pod.load_model(stock, plan=made).config.sinks == "constant"
    # a model that runs a plan already is read as a dense one
    again = pod.calibrate_sinks(pod.load_model(stock, plan=made), plan, [ids, ids.flip(0)], num_queries=9)
    assert again.sink_constants == made.sink_constants


def test_calibrate_sinks_leaves_layers_alone_that_were_trained_with_windows():
    stock = make_model(6, 2, sinks=0, recent=RECENT, layer_windows=[None, 6, None, None])
    plan = SharingPlan(
        ((None, 0), (None, None), (2, 2), (3, None)), num_recent_tokens=RECENT, num_sink_tokens=0
    )
    made = pod.calibrate_sinks(stock, plan, [ids_of(64)[0]], num_queries=9)
    assert [row is None for row in made.sink_constants.logits] == [False, True, True, False]
    assert pod.load_model(stock, plan=made)(ids_of()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("texts", "plan", "words"),
    [
        ([[1, 2, 3]], {}, r"texts\[0\] has 3 tokens, but windows of 7 and 64 queries behind them need 71"),
        ("one text", {}, "texts must be a list of strings or token ids"),
        ([], {}, "texts must be a list"),
        (
            [[1] * 90],
            {"num_recent_tokens": None, "num_sink_tokens": None},
            "does not say how long its windows",
        ),
        (None, {}, "texts must be a list"),
        ([[10**6] * 90], {}, r"texts\[0\] has token ids from 1000000 to 1000000, allowed are 0 to "),
        ([[-1] * 90], {}, r"texts\[0\] has token ids from -1 to -1"),
        ([[0.5] * 90], {}, r"texts\[0\] has numbers of torch.float32"),
        (
            [[1] * 90],
            {"lead": ((None,),) * 4},
            "sharing plan is for 4 layers x 1 KV heads, the model has 4 x 2",
        ),
    ],
)
def test_calibrate_sinks_says_what_is_missing(texts, plan, words):
    fields = {"lead": ((None, None),) * 4, "num_sink_tokens": 0, "num_recent_tokens": RECENT} | plan
    with pytest.raises(ValueError, match=words) as found:
        pod.calibrate_sinks(make_model(6, 2), SharingPlan(**fields), texts)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_queries": 0}, "num_queries must be an integer >= 1, got 0"),
        ({"num_queries": 1.5}, "num_queries must be an integer >= 1, got 1.5"),
        ({"plan": None}, "plan must be a SharingPlan or the file of one, got None"),
    ],
)
def test_calibrate_sinks_names_a_wrong_argument(wrong, words):
    plan = SharingPlan(((None, None),) * 4, num_sink_tokens=0, num_recent_tokens=RECENT)
    with pytest.raises(ValueError, match=words):
        pod.calibrate_sinks(make_model(6, 2), **{"plan": plan, "texts": [[1] * 90]} | wrong)


def test_calibrate_sinks_takes_every_id_of_the_vocabulary_and_no_other():
    model = make_model(6, 2)
    plan = SharingPlan(((None, None),) * 4, num_sink_tokens=0, num_recent_tokens=RECENT)
    last = model.config.vocab_size - 1
    ids = [0, last] * 45
    assert pod.calibrate_sinks(model, plan, [ids]).sinks == "constant"
    with pytest.raises(ValueError, match=f"ids from 0 to {last + 1}, allowed are 0 to {last}:"):
        pod.calibrate_sinks(model, plan, [[*ids, last + 1]])


def test_constants_of_measured_layers_become_those_of_the_whole_model():
    sinks = [LayerConstants(torch.ones(4), torch.ones(2, 8), torch.ones(2, 8))] * 2
    plan = SharingPlan(
        ((None, 0), (1, 1)), {"layers": [1, 3], "num_layers": 4}, num_sink_tokens=0, num_recent_tokens=RECENT
    )
    whole = in_all_layers(with_constants(plan, sinks))
    assert [row is None for row in whole.sink_constants.logits] == [True, False, True, True]
    assert [row is None for row in whole.sink_constants.keys] == [True, False, True, True]
    assert whole.sinks == "constant"


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_explore_writes_constants_into_the_plan(explore_overrides, tmp_path, capsys, granularity):
    settings = [
        *explore_overrides,
        "model.num_recent_tokens=7",
        f"explore.granularity={granularity}",
        "explore.target_saving=0.4",
    ]
    explore.main(load_recipe(None, [*settings, "model.sinks=constant"]))
    plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert (plan.sinks, plan.num_sink_tokens) == ("constant", 0)
    assert [row is None for row in plan.sink_constants.logits] == [None not in row for row in plan.lead]
    assert plan.num_windows and plan.sink_constants.logits != (None,) * 4
    # the loss that is reported is that of the model that runs the plan
    model = pod.load_model(resolve_model("package:tiny"), plan=plan, dtype=torch.float32)
    assert model.config.sinks == "constant"
    written = plan.provenance["losses"]["plan"]["text"]
    recipe = load_recipe(None, [*settings, "model.sinks=constant"])
    losses = [model(ids[None], labels=ids[None]).loss.item() for ids in Exploration.of(recipe).read()]
    assert written == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    printed = capsys.readouterr().out
    assert "constant sinks, target 40.0%" in printed
    assert "with a constant sink (numbers that stand for the first tokens) and 7 recent tokens" in printed
    # other sinks are measured anew
    explore.main(load_recipe(None, [*settings, "model.sinks=none"]))
    printed = capsys.readouterr().out
    assert "differs in sinks from the recipe" in printed and "with no sink and 7 recent tokens" in printed
    plain = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert plain.sinks == "none" and plain.sink_constants is None


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_bar_counts_every_text_and_layer(qk_norm, monkeypatch):
    steps, totals = [], []

    def counter(what, total):
        totals.append(total)
        return nullcontext(SimpleNamespace(update=lambda: steps.append(what)))

    monkeypatch.setattr(calibration, "counter", counter)
    model = make_model(4, 2, sinks=0, recent=RECENT, qk_norm=qk_norm)
    find_sinks(model, [ids_of()[0], ids_of(seed=6)[0]], 9)
    assert totals == [len(steps)] == [(1 if qk_norm else 2) * (2 + model.config.num_hidden_layers)]
