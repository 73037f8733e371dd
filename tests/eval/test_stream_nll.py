"""Streamed text: chunks where they equal single tokens, sums by position, limits of the model."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from oracles_imdc import Chunked
from own_runs import make_run, measure, write_place

import pod
from pod.eval.answer import score
from pod.eval.answer.methods import find_method
from pod.eval.answer.score import ends_of, score_stream
from pod.eval.runner import check_caches
from pod.modeling.token_scores import token_scores
from pod.models import resolve_model

OPTIONS = {"length": 300, "sequences": 3, "prompt_tokens": 40, "every": 64, "chunk_size": 50}
CHUNKED = sorted(name for name, method in pod.methods().items() if method.takes_chunks)
STREAM = 12, ends_of(12, 64, 20, 64)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("stream"))


def scored(model, text, chunk, spec, stream=STREAM, **options):
    sums, held = score_stream(model, pod.make_cache(model, spec, **options), text, *stream, chunk)
    return torch.stack(sums), [sum(of_rows) for of_rows in held]


def test_ends_and_parts():
    assert ends_of(10, 100, 30, 75) == (40, 70, 75, 100)
    assert ends_of(10, 70, 30, 70) == (40, 70)
    assert ends_of(10, 20, 30, 20) == (20,)


def test_full_equals_one_forward(dense_model, text):
    hidden = dense_model.model(input_ids=text).last_hidden_state
    nll = -token_scores(dense_model.lm_head, hidden[:, :-1], text[:, 1:]).logprobs
    expected = torch.stack([nll[:, a - 1 : b - 1].sum(dim=1) for a, b in ((12, 32), (32, 52), (52, 64))])
    sums, held = scored(dense_model, text, 7, "full")
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-9)
    assert held == sorted(held) and len(set(held)) == 3


@pytest.mark.parametrize("spec", [*CHUNKED, "own pod", "own window"])
def test_chunks_equal_single_tokens(spec, dense_model, pod_model, text):
    model = pod_model if "pod" in spec else dense_model
    if spec == "own window":
        config = pod.PodConfig(**dense_model.config.to_dict() | {"layout": "window", "num_sink_tokens": 0})
        model = pod.PodForCausalLM(config).double().eval()
        model.load_state_dict(dense_model.state_dict())
    options = {"budget": 20} if pod.methods().get(spec) and pod.methods()[spec].takes_budget else {}
    name = None if spec.startswith("own") else spec
    chunked, held = scored(model, text, 7, name, **options)
    single, _ = scored(model, text, 1, name, **options)
    torch.testing.assert_close(chunked, single, rtol=0, atol=1e-9)
    if spec not in ("full",):
        full, most = scored(dense_model, text, 1, "full")
        assert (full - single).abs().max() > 1e-3 and held[-1] < most[-1]


@pytest.mark.parametrize("spec", ["local_window", "h2o"])
def test_methods_that_compress_by_prompt_take_single_tokens(spec, dense_model, text):
    """In chunks they would see more: the reason why they do not say `takes_chunks`."""
    chunked, _ = scored(dense_model, text, 16, spec, budget=20)
    single, _ = scored(dense_model, text, 1, spec, budget=20)
    assert (chunked - single).abs().max() > 1e-3
    assert score.chunk_of(find_method(spec), 16, {}) == 1
    assert score.chunk_of(find_method("wa"), 16, {"window": 3}) == 16
    assert [score.chunk_of(find_method("pod"), 16, options) for options in ({}, {"tau": 0.7})] == [16, 1]


@pytest.mark.parametrize("spec", ["streamingllm", "lm_infinite"])
def test_methods_that_read_any_length_do_not_depend_on_far_positions(spec, dense_model):
    """Unbounded methods do not depend on far positions.

    The text is periodic. The NLL of a period repeats exactly once the window is full; if the sinks' distances
    grew, it would not.
    """
    draw = torch.Generator().manual_seed(3)
    period = torch.randint(96, (1, 8), generator=draw)
    text = period.repeat(1, 101)[:, :804]
    stream = 4, ends_of(4, 804, 8, 804)
    sums, held = scored(dense_model, text, 64, spec, stream, budget=24, num_sink_tokens=4)
    assert (sums[-1] - sums[-10]).abs().max() < 1e-9
    assert held[-1] - held[-2] == pytest.approx(8 * 4, abs=8), "only the list of ids grows"


@torch.no_grad()
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("pruner", ["snapkv", "streamingllm"])
@pytest.mark.parametrize(
    "mode, update", [("fm", True), *((m, u) for m in ("im", "imdc") for u in (True, False))]
)
def test_a_text_is_scored_while_it_is_read(mode, pruner, update, chunk, dense_model, text):
    """A text is scored while it is read, whatever is fed at once.

    IMDC §4.4: every token is given the memory so far and its own chunk, twice as far as the model reads.
    """
    config = pod.PodConfig(**dense_model.config.to_dict() | {"max_position_embeddings": 32})
    model = pod.PodForCausalLM(config).double().eval()
    model.load_state_dict(dense_model.state_dict())
    options = {"chunk_size": 10, "num_sink_tokens": 2}
    options |= {"window": 4, "kernel": 3} if pruner == "snapkv" else {}
    options |= {} if mode == "fm" else {"update": update}
    name = f"{mode}({pruner})"
    sums, held = score_stream(
        model, pod.make_cache(model, name, budget=12, **options), text[:2], *STREAM, chunk, True
    )
    for row in range(2):
        oracle = Chunked(model, mode=mode, pruner=pruner, budget=12, **options)
        logits = oracle.run(text[row, :63], [("prompt", 63)])
        nll = F.cross_entropy(logits, text[row, 1:], reduction="none")
        wanted = torch.stack([nll[a - 1 : b - 1].sum() for a, b in ((12, 32), (32, 52), (52, 64))])
        torch.testing.assert_close(torch.stack(sums)[:, row], wanted, rtol=0, atol=1e-9)
        assert oracle.peak < 32 < 63
    full, most = scored(dense_model, text[:2], 64, "full")
    assert (torch.stack(sums) - full).abs().min() > 1e-3 and sum(held[-1]) < most[-1] / 2


def test_what_reads_on():
    for name, options, found in [
        *((name, {}, True) for name in ("im@9", "imdc(snapkv)@9", "fm(streamingllm)+int4@9")),
        ("h2o", {"prefill": "streaming"}, True),
        *((name, {}, False) for name in ("h2o", "streamingllm", "model:imdc", "full")),
    ]:
        assert score.reads_on(find_method(name), options) is found
        assert score.chunk_of(find_method(name), 16, options) == (1 if name == "h2o" and not options else 16)


def points_of(curve):
    return dict(zip(curve["x"], curve["y"], strict=True))


def test_value_and_curves_add_up(place):
    run = make_run(place, "stream_nll", ["full", "streamingllm", "h2o"], OPTIONS)
    found = {name: measure(run, name) for name in ("full", "streamingllm", "h2o")}
    for payload in found.values():
        total = sum(sample["score"] for sample in payload["samples"])
        assert payload["value"] == pytest.approx(math.exp(total / (3 * 260)))
        cumulative, within, _ = map(points_of, payload["curves"])
        assert list(cumulative) == [104, 168, 232, 296, 300]
        assert cumulative[300] == pytest.approx(total / (3 * 260))
        weighted = sum(y * n for y, n in zip(within.values(), (64, 64, 64, 64, 4), strict=True))
        assert weighted == pytest.approx(total / 3)
        assert payload["settings"]["stopped"] is None and payload["metrics"] == {}
    assert found["full"]["settings"]["fed"] == "50 tokens at once, equal to single ones"
    assert found["h2o"]["settings"]["fed"] == "token by token"
    assert found["h2o"]["bytes"][0]["bytes_over_pod"] == pytest.approx(1, abs=0.05)
    assert found["full"]["bytes"][0]["bytes_over_pod"] > 1.1
    assert len({round(payload["value"], 6) for payload in found.values()}) == 3


@pytest.mark.slow
def test_batch_of_three_scores_as_alone(place):
    names = ["h2o", "d2o", "imdc(snapkv)[chunk_size=30,window=6,function=adaptive]@40"]
    one = make_run(place, "stream_nll", names, OPTIONS | {"length": 120}, eval__batch_size=1)
    three = make_run(place, "stream_nll", names, OPTIONS | {"length": 120})
    for name in names:
        left, right = measure(one, name), measure(three, name)
        assert [s["score"] for s in left["samples"]] == pytest.approx(
            [s["score"] for s in right["samples"]], rel=1e-12
        )
        assert left["bytes"][0]["bytes"] == right["bytes"][0]["bytes"]


def test_texts_beyond_the_limit(place, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(resolve_model("package:tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    methods = ["full", "streamingllm"]
    short = make_run(place, "stream_nll", methods, OPTIONS, model__path=str(folder))
    long = make_run(place, "stream_nll", methods, OPTIONS)
    assert short.tasks["stream_nll"].longest() == 200
    full, other = measure(short, "full"), measure(short, "streamingllm")
    assert full["settings"]["stopped"].startswith(
        "at 200 of 300 tokens: the model reads no more, and positions of full grow"
    )
    assert full["settings"]["read"] == 200 and other["settings"]["read"] == 300
    assert other["settings"]["stopped"] is None
    assert {s["tokens"] for s in full["samples"] + other["samples"]} == {160}
    for payload in (full, other):
        mean = sum(s["score"] for s in payload["samples"]) / (3 * 160)
        assert mean == pytest.approx(points_of(payload["curves"][0])[200])
    points = points_of(measure(long, "full")["curves"][0])
    assert points_of(full["curves"][0])[168] == pytest.approx(points[168])
    nll = points_of(other["curves"][1])
    assert list(nll) == [104, 168, 200, 232, 296, 300]
    beyond = (nll[232] * 32 + nll[296] * 64 + nll[300] * 4) / 100
    assert other["metrics"]["perplexity beyond the model's limit"]["value"] == pytest.approx(math.exp(beyond))


def test_methods_without_a_limit_are_compared_over_the_whole_text(place, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(resolve_model("package:tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    named = "[chunk_size=50]@60"
    methods = [f"{name}(streamingllm){named}" for name in ("fm", "im", "imdc")] + ["streamingllm@60"]
    changes = {"model__path": str(folder), "model__plan": None, "output_dir": str(tmp_path)}
    run = make_run(place, "stream_nll", methods, OPTIONS, **changes)
    task = run.tasks["stream_nll"]
    found = [measure(run, name) for name in methods]
    assert len({payload["value"] for payload in found}) == 4
    for name, payload in zip(methods, found, strict=True):
        assert payload["metrics"] == {} and {sample["tokens"] for sample in payload["samples"]} == {260}
        assert payload["settings"]["fed"].startswith(
            "50 tokens" if name == methods[3] else "one prompt, compre"
        )
        assert task.token_counts(run.method_runners[name].method) == (900, 0)
        check_caches(run.method_runners[name], task)
    limited = make_run(place, "stream_nll", [*methods, "full"], OPTIONS, **changes)
    payload = measure(limited, methods[2])
    assert {sample["tokens"] for sample in payload["samples"]} == {160}
    total = sum(sample["score"] for sample in payload["samples"])
    beyond = 300 * math.log(payload["metrics"]["perplexity beyond the model's limit"]["value"])
    assert (total + beyond) / 780 == pytest.approx(math.log(found[2]["value"]))
    greedy = make_run(place, "stream_nll", ["imdc(streamingllm)[chunk_size=20]@60"], OPTIONS, **changes)
    with pytest.raises(ValueError, match="cannot do stream_nll.*chunk"):
        check_caches(*greedy.method_runners.values(), greedy.tasks["stream_nll"])


def test_growing_methods_need_a_budget_of_their_own(place):
    run = make_run(place, "stream_nll", ["snapkv", "snapkv@64", "full", "h2o"], OPTIONS)
    task = run.tasks["stream_nll"]
    reasons = {name: task.refuses(find_method(name)) for name in run.method_runners}
    assert (
        reasons["snapkv"].endswith("write a budget, for example snapkv@1024")
        and "\n" not in reasons["snapkv"]
    )
    assert [name for name, reason in reasons.items() if reason] == ["snapkv"]
    assert task.token_counts(find_method("full")) == (900, 0) and task.token_counts(find_method("h2o")) == (
        120,
        260,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 40}, r"eval\.task_options\.stream_nll\.length is 40, it must exceed prompt_tokens = 40"),
        ({"every": 0}, "every is 0"),
        ({"prompt_tokens": 1}, "prompt_tokens is 1: it should be greater than or equal to 2"),
        (
            {"sequences": 900},
            r"text for stream_nll \(eval\.text\): asked for 900 sequences of 300 tokens",
        ),
        (
            {"text": ["/nowhere.txt"]},
            r"text for stream_nll \(eval\.task_options\.stream_nll\.text\): .*nowhere\.txt",
        ),
    ],
)
def test_wrong_options_are_refused(place, changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(place, "stream_nll", ["full"], OPTIONS | changes)
