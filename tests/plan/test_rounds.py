"""Rounds: what windows do under the plan, and which are exchanged."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from plan_models import log_probabilities, make_model, sinks_at_random

import pod
from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.plan import divergence, rounds
from pod.plan.choose import choose, find_plan
from pod.plan.costs import TextWithGradients
from pod.plan.divergence import measure_under
from pod.plan.exploration import Exploration
from pod.plan.measured_costs import COSTS_NAME, MeasuredCosts, find_costs
from pod.plan.rounds import corrected
from pod.plan.together import has_windows
from pod.recipe import load_recipe

TOKENS = 29


@pytest.fixture
def overrides(explore_overrides):
    windows = ["model.num_sink_tokens=2", "model.num_recent_tokens=5"]
    few = ["explore.loss_sequences=0", "explore.retrieval_sequences=2"]
    return [*explore_overrides, *windows, "explore.target_saving=0.4", *few]


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("constant", [False, True])
@torch.no_grad()
def test_slopes_are_derivatives_of_the_divergence_under_the_plan(heads, constant):
    model = make_model(*heads, **({"sinks": 0, "recent": 7} if constant else {}))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (1, TOKENS), generator=generator)
    at = torch.tensor([12, 13, 20, 27])
    sinks = sinks_at_random(*heads, generator) if constant else None
    share = torch.randint(0, 2, (4, heads[1]), generator=generator).double()
    value, slopes = measure_under(model, ids[0], at, share, sinks)
    alone, nothing = measure_under(model, ids[0], at, share, sinks, with_slopes=False)
    dense = model(ids, use_cache=False).logits[0].log_softmax(-1)[at]

    def divergence(shares):
        own = log_probabilities(model, ids, shares, sinks)[at]
        return (dense.exp() * (dense - own)).sum(-1).mean()

    assert nothing is None and alone == pytest.approx(value, rel=1e-12)
    assert value == pytest.approx(divergence(share).item(), rel=1e-9)
    for layer, head in itertools.product(range(4), range(heads[1])):
        step = torch.zeros(4, heads[1]).double()
        step[layer, head] = 1e-5
        expected = (divergence(share + step) - divergence(share - step)) / 2e-5
        assert slopes[layer, head].item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-9)
    assert (slopes < 0).any() and slopes.abs().max() > 1e-4


def test_corrected_costs_have_the_measured_slopes_and_the_pairs_of_before():
    generator = np.random.default_rng(0)
    changes = generator.standard_normal((6, 4))
    windows = (changes @ changes.T).reshape(3, 2, 3, 2)
    chosen, slopes = generator.random((3, 2)) < 0.5, generator.standard_normal((3, 2))
    found = corrected(windows, chosen, slopes).reshape(6, 6)
    flat = windows.reshape(6, 6)
    assert np.array_equal(found - np.diag(found.diagonal()), flat - np.diag(flat.diagonal()))
    linear = (found - flat).diagonal()

    def cost(share):
        return share @ flat @ share + linear @ share

    start = chosen.ravel().astype(float)
    for head in range(6):
        step = 1e-6 * np.eye(6)[head]
        slope = (cost(start + step) - cost(start - step)) / 2e-6
        assert slope == pytest.approx(slopes.ravel()[head], abs=1e-6)
    assert cost(start) == pytest.approx(found[chosen.ravel()][:, chosen.ravel()].sum())


def measured_by_models(exploration, plan):
    """The divergence on text and on answers, from the logits of two models."""
    dense = exploration.load_model()
    planned = pod.load_model(dense, plan=plan)
    texts = exploration.read()
    prompts = rounds.needle_prompts_of(exploration, dense.config, texts)
    found = []
    for kind in ([(text, torch.arange(len(text))) for text in texts], prompts):
        values = []
        for ids, at in kind:
            wanted, own = (
                m(ids[None], use_cache=False).logits[0, at].log_softmax(-1) for m in (dense, planned)
            )
            values.append((wanted.exp() * (wanted - own)).sum(-1).mean().item())
        found.append(sum(values) / len(values))
    return found


SETTINGS = {
    "heads": [],
    "layers": ["explore.granularity=layer"],
    "constants": ["model.num_sink_tokens=0", "model.sinks=constant", "model.num_recent_tokens=7"],
    "bits": ["explore.bits=[16,4]", "explore.budget_length=100000", "explore.target_saving=0.9"],
}


def in_reverse(costs):
    """The costs of windows in the wrong order, so that the first plan is a bad one."""
    tensors = dict(costs.tensors)
    for name in ("windows", "windows_retrieval"):
        tensors[name] = tensors[name].flip(0, 1, 2, 3).contiguous()
    return MeasuredCosts(tensors, costs.provenance)


@pytest.mark.parametrize("kind", SETTINGS)
@torch.no_grad()
def test_rounds_lower_what_models_with_the_plan_measure(overrides, monkeypatch, kind, capsys):
    monkeypatch.setattr(rounds, "LIGHTER", ())  # what is measured here is what rounds alone bring
    settings = [*overrides, "explore.roles=[window]", *SETTINGS[kind], "explore.rounds=3"]
    recipe = load_recipe(None, settings)
    exploration = Exploration.of(recipe)
    costs = in_reverse(find_costs(exploration))
    costs.save(exploration.folder / COSTS_NAME)
    explore.main(recipe)
    first = choose(costs, recipe.explore, exploration.windows).plan
    plan = SharingPlan.load(exploration.folder / "plan.json")
    measured = plan.provenance["rounds"]

    def cost(one):
        return one["text"] + recipe.explore.retrieval_weight * one["retrieval"]

    best = measured[-1]
    assert sorted(measured, key=cost, reverse=True) == measured
    if kind != "bits":  # there the first plan cannot be made better
        assert 2 <= len(measured) <= 4 and cost(best) < 0.9 * cost(measured[0])
    assert (4 in (plan.bits or ())) == (kind == "bits")
    assert measured[0]["exchanged"] == 0 and all(one["exchanged"] for one in measured[1:])
    assert (plan.num_windows, plan.num_leads, plan.bits) == (first.num_windows, first.num_leads, first.bits)
    for one, made in ((measured[0], first), (best, plan)):
        alone = replace(made, bits=None)  # rounds measure windows alone
        found = measured_by_models(exploration, alone)
        assert [one["text"], one["retrieval"]] == pytest.approx(found, rel=1e-3, abs=1e-6)
    if kind == "constants":
        windows = [None in row for row in plan.lead]
        assert [logits is not None for logits in plan.sink_constants.logits] == windows
    said = capsys.readouterr().out
    assert f"by {best['text']:.4g} nats per token of text, {best['retrieval']:.4g} of answers" in said
    if len(measured) > 1:
        assert f"({measured[0]['text']:.4g}, {measured[0]['retrieval']:.4g} before windows" in said
        assert "cost of the plan before windows were exchanged: " in said
    json.dumps(plan.provenance)

    monkeypatch.setattr(rounds, "measure_under", None)  # the same command measures nothing again
    explore.main(recipe)
    assert SharingPlan.load(exploration.folder / "plan.json") == plan
    assert [file.suffix for file in (exploration.folder / "rounds").iterdir()].count(".safetensors") >= 1
    assert not list((exploration.folder / "rounds").glob("*.partial"))


def test_windows_and_slopes_change_between_the_orders_of_plan_and_model(overrides):
    exploration = Exploration.of(load_recipe(None, overrides))
    costs = MeasuredCosts({"lead4": torch.zeros(2, 3)}, {})
    bench = rounds._Bench(exploration, costs, [[1, 2, 0], [0, 1, 2]])
    windows = np.array([[True, False, False], [False, True, False]])
    in_model = bench._of_model(windows)
    assert in_model.tolist() == [[False, True, False], [False, True, False]]
    plan = SharingPlan(lead=[[None, 0, 0], [1, None, 1]])
    slopes = bench._of_plan(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), plan)
    assert slopes.tolist() == [[2.0, 3.0, 1.0], [4.0, 5.0, 6.0]]
    whole = rounds._Bench(exploration, costs)
    assert whole._of_model(np.array([[True], [False]])).tolist() == [[True] * 3, [False] * 3]
    of_layers = whole._of_plan(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), SharingPlan(lead=[[None], [1]]))
    assert of_layers.tolist() == [[6.0], [15.0]]


@torch.no_grad()
def test_a_prompt_on_which_a_window_helps_does_not_pay_for_another(overrides, monkeypatch):
    exploration = Exploration.of(load_recipe(None, overrides))
    costs = find_costs(exploration)
    found = torch.full(costs.tensors["lead4"].shape, -1.0, dtype=torch.float64)
    monkeypatch.setattr(rounds, "measure_under", lambda *_: (0.5, found))
    windows = torch.zeros(found.shape)
    windows[0, 0] = 1
    bench = rounds._Bench(exploration, costs)
    text, prompt = (bench.texts[kind][0] for kind in ("text", "retrieval"))
    assert bench._measure_one(windows, True, text).tolist() == [0.5, *[-1.0] * found.numel()]
    assert bench._measure_one(windows, True, prompt).tolist() == [0.5, -1.0, *[0.0] * (found.numel() - 1)]


def test_other_texts_weights_and_sinks_are_measured_again(overrides):
    exploration = Exploration.of(load_recipe(None, overrides))
    windows = np.ones((2, 2), dtype=bool)
    tensors = {"sink_logits": torch.zeros(2, 4), "sink_values": torch.zeros(2, 2, 8)}

    def path(tensors, **provenance):
        return rounds._Bench(exploration, MeasuredCosts(tensors, provenance), None)._path(windows, True)

    one = path(tensors, weights="a", tokens_sha256="b")
    assert one == path(tensors, weights="a", tokens_sha256="b")
    others = [path(tensors, weights="c", tokens_sha256="b"), path(tensors, weights="a", tokens_sha256="c")]
    others.append(path(tensors | {"sink_logits": torch.ones(2, 4)}, weights="a", tokens_sha256="b"))
    assert len({one, *others}) == 4


@torch.no_grad()
def test_leads_in_layers_of_4_bits_count_beside_what_is_measured(overrides):
    exploration = Exploration.of(load_recipe(None, overrides))
    costs = find_costs(exploration)
    layers, heads = costs.tensors["lead4"].shape
    lead = [[None, *[layer] * (heads - 1)] for layer in range(layers)]
    plan = SharingPlan(lead=lead, bits=[4] * layers)
    lead4 = np.arange(1.0, 1 + layers * heads).reshape(layers, heads)
    alone = rounds._Bench(exploration, costs).measure(plan, with_slopes=True)
    beside = rounds._Bench(exploration, costs, None, lead4).measure(plan, with_slopes=True)
    assert beside.cost == pytest.approx(alone.cost + lead4[:, 1:].sum(), rel=1e-12)
    assert np.array_equal(alone.slopes, beside.slopes)


def chosen_by_costs(overrides):
    """What is measured, its costs, and the plan that they choose."""
    recipe = load_recipe(None, overrides)
    exploration = Exploration.of(recipe)
    costs = find_costs(exploration)
    return exploration, costs, choose(costs, recipe.explore, exploration.windows).plan


@torch.no_grad()
def test_an_interrupted_round_goes_on(overrides, monkeypatch):
    exploration, costs, plan = chosen_by_costs(overrides)
    whole = rounds._Bench(exploration, costs).measure(plan, with_slopes=True)
    (file,) = (exploration.folder / "rounds").glob("*.safetensors")
    file.unlink()
    calls, measure = [], rounds.measure_under

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(rounds, "measure_under", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rounds._Bench(exploration, costs).measure(plan, with_slopes=True)
    assert not file.exists()
    again = rounds._Bench(exploration, costs).measure(plan, with_slopes=True)
    assert again.cost == whole.cost and np.array_equal(again.slopes, whole.slopes)
    assert len(calls) == 3 + 1 + 2, "three texts and two prompts, of which three were kept"


def test_every_text_is_read_once_without_windows(overrides, monkeypatch):
    """Costs, the match of query heads, and rounds share what the dense model gives for a text."""
    exploration = Exploration.of(load_recipe(None, [*overrides, "explore.rounds=1"]))
    read, dense = [], []
    of, states = TextWithGradients.of, divergence.dense_states

    def count_reading(model, input_ids, *others):
        read.append(tuple(input_ids[0].tolist()))
        return of(model, input_ids, *others)

    def count_dense(model, input_ids, at):
        dense.append(tuple(input_ids.tolist()))
        return states(model, input_ids, at)

    monkeypatch.setattr(TextWithGradients, "of", count_reading)
    monkeypatch.setattr(divergence, "dense_states", count_dense)
    choice = find_plan(exploration)
    assert choice.plan.provenance["rounds"], "windows were measured under the plan"
    texts = [tuple(text.tolist()) for text in exploration.read()]
    assert len(read) == len(set(read)) == len(texts) + 2, "two sequences of repeated tokens"
    assert len(dense) == len(set(dense)) == exploration.explore.retrieval_sequences
    assert not set(dense) & set(texts)
    ids = exploration.read()[0]
    at = torch.arange(len(ids))
    model = exploration.load_model()
    assert torch.equal(exploration.dense.of(model, ids, at), states(model, ids, at)), (
        "as after an interruption"
    )


def test_without_prompts_the_summary_names_none(overrides, capsys):
    explore.main(load_recipe(None, [*overrides, "explore.roles=[window]", "explore.retrieval_sequences=0"]))
    said = capsys.readouterr().out
    assert "nats per token of text" in said and "of answers" not in said


def test_a_plan_with_nothing_to_exchange_is_not_measured(overrides, monkeypatch):
    """All leads, all windows, and leads that are followed."""
    recipe = load_recipe(None, overrides)
    exploration = Exploration.of(recipe)
    monkeypatch.setattr(rounds, "_Bench", None)
    for lead in ([[0, 0], [1, 1]], [[None, None], [None, None]], [[0, 0], [0, 0], [None, None]]):
        plan = SharingPlan(lead=lead)
        assert rounds.improve(exploration, MeasuredCosts({}, {}), plan) == (plan, [])


def bench_that(measures):
    """A stand-in for `_Bench`, in which this function measures a plan, with or without slopes."""

    class Bench:
        lead4 = None

        def __init__(self, exploration, *_):
            self.exploration = exploration

        def measure(self, plan, with_slopes):
            return measures(plan, with_slopes)

    return Bench


@pytest.mark.parametrize("fits", [0, 1, 2, 4])
def test_fewer_exchanges_are_tried_where_many_are_worse(monkeypatch, overrides, fits):
    """Here a plan after more than ``fits`` exchanges measures more than the first one."""
    recipe = load_recipe(None, [*overrides, "explore.rounds=1", "explore.roles=[window]"])
    layers, heads = 12, 2
    eye = torch.eye(layers * heads, dtype=torch.float64).view(layers, heads, layers, heads)
    costs = MeasuredCosts({"windows": eye, "lead4": torch.zeros(layers, heads)}, {})
    plan = SharingPlan(lead=[[None, layer] for layer in range(layers)])
    asked = []

    def measure(tried, with_slopes):
        count = rounds.exchanges(plan, tried)
        asked.append(count)
        cost = 1.0 - 0.1 * count if count <= fits else 2.0
        slopes = np.where(has_windows(tried), 5.0, 0.1 * np.arange(layers)[:, None])
        return rounds.Measured(cost, 0.0, cost, slopes if with_slopes else None)

    monkeypatch.setattr(rounds, "_Bench", bench_that(measure))
    found = rounds.improve(Exploration.of(recipe), costs, plan)
    assert asked == [0, 0, 4, 2, 1][: {4: 3, 2: 4, 1: 5, 0: 5}[fits]]
    assert rounds.exchanges(plan, found.plan) == fits
    assert [one["exchanged"] for one in found.rounds] == [0, fits][: 1 + (fits > 0)]


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_best_of_three_choices_of_windows_goes_on(monkeypatch, overrides, best):
    """Full costs on prompts choose the windows 4 and 5, a fourth 2 and 3, a sixteenth 0 and 1."""
    recipe = load_recipe(None, [*overrides, "explore.roles=[window]", "explore.retrieval_weight=16"])
    text = torch.diag(torch.tensor([0.1, 0.1, 0.4, 0.4, 1.0, 1.0], dtype=torch.float64))
    prompts = torch.diag(torch.tensor([0.2, 0.2, 0.06, 0.06, 0.0, 0.0], dtype=torch.float64))
    tensors = {
        name: one.view(6, 1, 6, 1) for name, one in (("windows", text), ("windows_retrieval", prompts))
    }
    costs = MeasuredCosts({**tensors, "lead4": torch.zeros(6, 1)}, {})
    plan = SharingPlan(lead=[[0], [1], [2], [3], [None], [None]])
    choices = [[4, 5], [2, 3], [0, 1]]
    tried = []

    def measure(plan, with_slopes):
        windows = has_windows(plan)[:, 0].nonzero()[0].tolist()
        tried.append((windows, with_slopes))
        cost = 1.0 if windows == choices[best] else 2.0 + len(tried) * 0.1
        slopes = np.where(has_windows(plan), 0.1, 5.0) if with_slopes else None
        return rounds.Measured(cost, 0.0, cost, slopes)

    monkeypatch.setattr(rounds, "_Bench", bench_that(measure))
    found = rounds.improve(Exploration.of(recipe), costs, plan)
    assert tried[:4] == [*((one, False) for one in choices), (choices[best], True)]
    assert has_windows(found.plan)[:, 0].nonzero()[0].tolist() == choices[best]
    assert [one["exchanged"] for one in found.rounds] == ([0, 2] if best else [0])


@torch.no_grad()
def test_what_was_measured_with_slopes_is_not_measured_again(overrides, monkeypatch):
    exploration, costs, plan = chosen_by_costs(overrides)
    whole = rounds._Bench(exploration, costs).measure(plan, with_slopes=True)
    monkeypatch.setattr(rounds, "measure_under", None)
    alone = rounds._Bench(exploration, costs).measure(plan, with_slopes=False)
    assert alone.cost == whole.cost and alone.slopes is None


def test_costs_on_prompts_are_scaled_to_what_was_measured_of_the_plan():
    costs = np.diag([0.1, 0.2, 0.3, 0.4]).reshape(2, 2, 2, 2)
    chosen = np.array([[True, False], [True, False]])
    assert rounds.scaled(costs, chosen, 0.1) == pytest.approx(costs / 4)
    assert rounds.scaled(costs, chosen, 9.0) == pytest.approx(costs), "they are never made larger"
    assert rounds.scaled(costs, chosen, 0.0) == pytest.approx(costs * rounds.LEAST_SHARE)
    assert not rounds.scaled(costs, ~chosen & chosen, 0.1).any()


def test_exchanges_spare_heads_that_cost_much_on_prompts(monkeypatch, overrides):
    """Here a head's slope is small while it leads, but its window costs more than any other on prompts."""
    recipe = load_recipe(None, [*overrides, "explore.rounds=1", "explore.roles=[window]"])
    text = torch.eye(6, dtype=torch.float64) * 0.01
    prompts = torch.diag(torch.tensor([0.01, 0.01, 0.01, 5.0, 0.02, 0.02], dtype=torch.float64))
    tensors = {"windows": text, "windows_retrieval": prompts}
    tensors = {name: one.view(6, 1, 6, 1) for name, one in tensors.items()}
    costs = MeasuredCosts({**tensors, "lead4": torch.zeros(6, 1)}, {})
    plan = SharingPlan(lead=[[None], [None], [None], [3], [4], [5]])
    tried = []

    def measure(plan, with_slopes):
        tried.append(has_windows(plan)[:, 0])
        slopes = np.array([0.5, 0.0, 0.0, 0.0, 0.01, 0.01])[:, None]
        needed = 9.0 if tried[-1][3] else 0.0
        cost = needed + (1.0 if tried[-1][0] else 0.5)
        return rounds.Measured(cost, 0.03, cost, slopes if with_slopes else None)

    monkeypatch.setattr(rounds, "_Bench", bench_that(measure))
    monkeypatch.setattr(rounds, "LIGHTER", ())
    found = rounds.improve(Exploration.of(recipe), costs, plan)
    assert len(tried) == 3 and not tried[2][3], "the first exchange that is tried spares the head"
    assert not has_windows(found.plan)[0, 0]
