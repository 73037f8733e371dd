"""The head search against n x n attention, heads built to be found, and what its file refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch

import pod
from pod.commands import explore
from pod.modeling.retrieval_heads import RetrievalHeads, plan_of_heads
from pod.plan import measured_costs as measure_module
from pod.plan.measured_costs import HEADS_NAME, head_scores, repeated_tokens, search_heads
from pod.plan.plan_report import describe_heads
from pod.plan.recording import record_attention_inputs
from pod.recipe import load_recipe, run


def tiny_model(seed=0, num_key_value_heads=2, qk_norm=False):
    torch.manual_seed(seed)
    config = pod.PodConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=num_key_value_heads,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.4,
        qk_norm=qk_norm,
    )
    return pod.PodForCausalLM(config).double().eval()


def turn(x, frequencies):
    """RoPE as complex multiplication of ``[h, n, d]``: pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).double()[:, None] * frequencies.double()
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


@torch.no_grad()
def naive_attention(model, ids):
    """n x n attention ``[L, Hq, n, n]`` of a dense model on ``[n]`` ids, fp64."""
    frequencies = model.model.context(torch.zeros(1, 1), torch.zeros(1, 1)).ropes[0].frequencies
    hidden, maps = model.model.embed_tokens(ids), []
    for layer in model.model.layers:
        q, k, v = (x[0] for x in layer.self_attn._project(layer.input_layernorm(hidden)[None]))
        groups = q.shape[0] // k.shape[0]
        k, v = turn(k, frequencies).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        logits = turn(q, frequencies) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        maps.append(logits.masked_fill(future, -math.inf).softmax(-1))
        out = (maps[-1] @ v).transpose(0, 1).flatten(1)
        hidden = hidden + layer.self_attn.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return torch.stack(maps)


def scores_by_definition(attention, num_tokens):
    """Loops over queries and copies: ``[2, L, Hq]``."""
    n = attention.shape[-1]
    totals = torch.zeros(2, *attention.shape[:2], dtype=torch.float64)
    for i in range(num_tokens, n):
        for r in range(1, i // num_tokens + 1):
            totals[0] += attention[:, :, i, i - r * num_tokens]
            totals[1] += attention[:, :, i, i - r * num_tokens + 1]
    return totals / (n - num_tokens)


@pytest.mark.parametrize(("num_key_value_heads", "qk_norm"), [(6, False), (2, True), (1, False)])
@pytest.mark.parametrize(("num_tokens", "repeats"), [(11, 4), (2, 3), (16, 4), (13, 2)])
def test_scores_equal_those_of_the_whole_matrix(num_key_value_heads, qk_norm, num_tokens, repeats):
    model = tiny_model(num_key_value_heads=num_key_value_heads, qk_norm=qk_norm)
    ids = repeated_tokens(num_tokens, repeats, 50, seed=3)
    expected = scores_by_definition(naive_attention(model, ids), num_tokens)
    assert expected.std() > 1e-3
    found = search_heads(model, ids, num_tokens)
    assert (torch.tensor(found, dtype=torch.float64) - expected).abs().max() <= 1e-9
    for queries in (1, 7):  # at a time
        recorded = record_attention_inputs(model, ids[None])
        blocked = [head_scores(x.q, x.k, num_tokens, 6 * len(ids) * queries) for x in recorded]
        difference = torch.stack([torch.stack(scores) for scores in blocked], 1) - expected
        assert difference.abs().max() <= 1e-9


def test_a_built_induction_head_and_a_built_echo_head_are_found():
    """Queries ask for their own token; keys carry the token before them (induction) or their own (echo)."""
    num_tokens, repeats = 9, 4
    ids = repeated_tokens(num_tokens, repeats, 40, excluded=range(10))
    own = torch.nn.functional.one_hot(ids, 40).double() * 20
    before = torch.cat((torch.zeros(1, 40), own[:-1]))
    q, k = torch.stack((own, own, 0 * own)), torch.stack((before, own, own))
    echo, induction = head_scores(q, k, num_tokens)
    # the current token is a copy of itself: 1, 2, 3 of 2, 3, 4 copies lie behind
    assert echo[1] == pytest.approx((1 / 2 + 2 / 3 + 3 / 4) / 3, abs=1e-9) and induction[1] < 1e-9
    assert induction[0] == pytest.approx(1, abs=1e-9)
    assert echo[0] < 1e-9
    assert induction[2] < 0.2 and echo[2] < 0.2  # attends to everything alike
    found = RetrievalHeads(
        echo=(tuple(echo.tolist()),),
        induction=(tuple(induction.tolist()),),
        num_key_value_heads=3,
        induction_share=0.3,
        echo_share=0.3,
    )
    assert found.query_heads == found.key_value_heads == ((0, 1),)


def test_tokens_are_distinct_ordinary_and_seeded():
    ids = repeated_tokens(30, 4, 50, excluded=[0, 1, 2, 49, -1, 99], seed=5)
    rounds = ids.view(4, 30)
    assert (rounds == rounds[0]).all() and len(set(rounds[0].tolist())) == 30
    assert not set(ids.tolist()) & {0, 1, 2, 49}
    assert torch.equal(ids, repeated_tokens(30, 4, 50, [0, 1, 2, 49], seed=5))
    assert not torch.equal(ids, repeated_tokens(30, 4, 50, [0, 1, 2, 49], seed=6))
    with pytest.raises(ValueError, match="num_tokens is 47, it must be from 2 to 46"):
        repeated_tokens(47, 4, 50, excluded=[0, 1, 2, 49])


def some_heads(**changes):
    """2 layers, 10 query heads in 5 groups: induction best at (1, 4), (0, 9), (1, 5), echo best at (0, 0)."""
    induction = [[0.0] * 9 + [0.8], [0.0] * 4 + [0.9, 0.7] + [0.0] * 4]
    echo = [[0.6] + [0.1] * 9, [0.1] * 10]
    options = {"echo": echo, "induction": induction, "num_key_value_heads": 5} | changes
    rows = {name: tuple(map(tuple, options[name])) for name in ("echo", "induction")}
    return RetrievalHeads(**(options | rows))


def test_the_best_heads_of_the_whole_model_protect_their_groups():
    heads = some_heads()  # 14 % of 20 = 2.8 → 3, 1 % → 1
    assert heads.query_heads == ((0, 9), (4, 5))
    assert heads.key_value_heads == ((0, 4), (2,))
    assert "3 of 10 KV heads (30.0%)" in describe_heads(heads) and "2.27x smaller" in describe_heads(heads)
    assert some_heads(induction_share=0.0, echo_share=0.0).key_value_heads == ((), ())
    assert some_heads(induction_share=1.0).key_value_heads == (tuple(range(5)),) * 2
    ties = some_heads(induction=[[0.5] * 10] * 2, echo_share=0.0)
    assert ties.query_heads == ((0, 1, 2), ())


def test_the_figures_of_the_paper():
    """15 % of the heads full, the others 1/5: 3.125x; in the worst case of groups of four, 1.47x."""
    one_each = [[float(head == 0) for head in range(100)]]
    heads = some_heads(
        induction=one_each, echo=one_each, num_key_value_heads=100, induction_share=0.15, echo_share=0.0
    )
    assert "(15.0%)" in describe_heads(heads) and "3.13x smaller" in describe_heads(heads)
    spread = [[float(head % 4 == 0 and head < 60) for head in range(100)]]
    heads = some_heads(
        induction=spread, echo=spread, num_key_value_heads=25, induction_share=0.15, echo_share=0.0
    )
    assert "(60.0%)" in describe_heads(heads) and "1.47x smaller" in describe_heads(heads)


@pytest.fixture
def overrides(tmp_path):
    return [
        f"output_dir={tmp_path / 'run'}",
        "model.path=package:tiny",
        "explore.heads=true",
        "explore.head_tokens=12",
    ]


def test_launcher_writes_the_heads_and_measures_once(overrides, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run" / "plan" / HEADS_NAME
    explore.main(load_recipe(None, overrides))
    printed = capsys.readouterr().out
    first = RetrievalHeads.load(path)
    assert describe_heads(first) in printed and str(path) in printed
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and "retrieval_heads.png" in printed
    assert (len(first.echo), len(first.echo[0]), first.num_key_value_heads) == (4, 4, 2)
    assert first.provenance["num_tokens"] == 12

    loaded = []
    search = measure_module._search
    monkeypatch.setattr(measure_module, "_search", lambda *args: loaded.append(1) or search(*args))
    explore.main(load_recipe(None, [*overrides, "explore.induction_share=0.5", "explore.echo_share=0"]))
    again = RetrievalHeads.load(path)
    assert not loaded and again.induction == first.induction and sum(map(len, again.query_heads)) == 8
    explore.main(load_recipe(None, [*overrides, "seed=1"]))
    assert loaded == [1] and "differs in seed" in capsys.readouterr().out
    (old,) = path.parent.glob("retrieval_heads-*.json")
    assert RetrievalHeads.load(old).induction == first.induction != RetrievalHeads.load(path).induction


def test_the_file_serves_models_of_its_shape(overrides, tmp_path):
    explore.main(load_recipe(None, overrides))
    heads = RetrievalHeads.load(tmp_path / "run" / "plan" / HEADS_NAME)
    with pytest.raises(ValueError, match="4 layers, 4 query and 2 KV heads, this one has 3, 6 and 2"):
        plan_of_heads(heads, tiny_model().config)


def test_dry_run_and_a_context_too_short_for_k(overrides, capsys):
    argv = [part for override in overrides if "heads" not in override for part in ("--set", override)]
    run(
        explore.main,
        sections=("model", "explore"),
        estimate=explore.estimate,
        add_arguments=explore.add_arguments,
        argv=[*argv, "--heads", "--dry-run", "--set", "explore.head_tokens=12"],
    )
    assert "4 x 12 = 48 tokens" in capsys.readouterr().out
    explore.main(load_recipe(None, [*overrides, "explore.head_tokens=2500"]))
    assert "256 distinct tokens instead of 2500" in capsys.readouterr().out
    with pytest.raises(ValueError, match="head_repeats is 5000"):
        explore.main(load_recipe(None, [*overrides, "explore.head_repeats=5000"]))


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("eval.methods=full,razor", True),
        ("eval.methods=full,pod-unadapted,razor+int4", True),
        ("eval.methods=full,snapkv", False),
    ],
)
def test_heads_are_searched_where_an_evaluation_will_ask_for_them(override, needed):
    assert explore.compares_razor(load_recipe(None, [override])) is needed


def test_heads_that_an_option_names_are_not_searched():
    recipe = load_recipe(None, ["eval.methods=razor", "eval.method_options={razor: {heads: mine.json}}"])
    assert not explore.compares_razor(recipe)


def test_files_and_lists_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "heads.json"
    some_heads().save(path)
    assert RetrievalHeads.load(path) == replace(some_heads(), provenance={})
    content = json.loads(path.read_text())
    for change, message in [
        ({"schema": "retrieval heads 0"}, "schema"),
        ({"key_value_heads": [[0], [1]]}, "edited by hand"),
        ({"echo": [[0.1] * 10]}, "must both be"),
        ({"num_key_value_heads": 3}, "3 equal groups"),
        ({"num_key_value_heads": 0}, "not a file of retrieval heads"),
        ({"induction": None}, "not a file of retrieval heads"),
        ({"induction": [[7.0] * 10] * 2}, "NaN"),
        ({"echo_share": 2}, "echo_share is 2"),
    ]:
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message) as error:
            RetrievalHeads.load(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    path.write_text("[]")
    with pytest.raises(ValueError, match="schema"):
        RetrievalHeads.load(path)
    config = tiny_model().config
    for wrong, message in [
        (None, "`pod explore --heads`"),
        (tmp_path / "none.json", "no such file"),
        ([[0], [1]], "for each of 3 layers"),
        ([[0], [2], []], "whole numbers from 0 to 1 such as"),
        ([0, 1, 2], "expected a path or"),
        (7, "expected a path or"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan_of_heads(wrong, config)
    assert plan_of_heads([[1, 0, 1], (), [1]], config).lead == ((0, 0), (None, None), (None, 2))


def test_the_best_share_of_kv_heads_leads():
    scores = RetrievalHeads(
        echo=((0.1, 0.0, 0.2, 0.3), (0.0, 0.9, 0.0, 0.0)),
        induction=((0.0, 0.4, 0.0, 0.0), (0.2, 0.1, 0.0, 0.05)),
        num_key_value_heads=2,
    )
    assert scores.plan(0.25).lead == ((None, None), (1, None))
    assert scores.plan(0.5).lead == ((0, None), (1, None))
    assert scores.plan(0.75).lead == ((0, 0), (1, None))
    assert scores.plan(1.0).is_dense and scores.plan(0.0).num_windows == 4
    config = tiny_model().config
    with pytest.raises(ValueError, match="share = 0.5 chooses by scores"):
        plan_of_heads([[0], [], []], config, 0.5)
