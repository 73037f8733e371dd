"""The task efficiency: every method has its row, failures are its own, numbers by hand, options."""

import dataclasses
import json

import pytest
import torch
from own_runs import make_run, write_place

import pod
from pod.eval import runner
from pod.eval.answer.budget import CacheSpan
from pod.eval.args import EvalArgs
from pod.eval.speed import side_by_side
from pod.eval.speed.args import SpeedOptions
from pod.eval.suites.task_base import side_by_side_tasks
from pod.measure import speed_comparison
from pod.measure.max_batch import LongTries
from pod.measure.measured_memory import weight_bytes
from pod.measure.random_cache import fill_with_random_tokens
from pod.measure.speed_comparison import RaceEntry, race, read_prompt
from pod.modeling.methods.windowed import StreamingLayer
from pod.recipe import Recipe

METHODS = ["full", "pod-unadapted", "snapkv", "streamingllm"]
OPTIONS = {"prefill_repeats": 2, "max_batch": [[48, 2]], "memory_limit_gib": 0.004, "max_batch_rows": 64}
OPTIONS |= {"longest_prompt": 64, "longest_prompt_tokens": 4096}
CHANGES = {"eval__efficiency_lengths": [300], "eval__efficiency_tokens": 2, "eval__efficiency_repeats": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("run"))


def opened(run):
    return {name: runner.open_results(run, one) for name, one in run.method_runners.items()}


def is_known(run, results):
    parts = [result.content["parts"].get("efficiency") for result in results.values()]
    return run.side_by_side["efficiency"].is_known(run.models.reference_layout(), parts)


def measured(run):
    """The files of all methods."""
    results = opened(run)
    runner.measure_side_by_side(run, run.side_by_side["efficiency"], results, lambda line: None)
    return {name: json.loads(result.path.read_text()) for name, result in results.items()}


@pytest.fixture(scope="module")
def finished(place):
    run = make_run(place, "efficiency", METHODS, OPTIONS, **CHANGES)
    return run, measured(run)


def test_every_method_has_speeds_bytes_and_memory(finished):
    run, contents = finished
    rows = {}
    for name, content in contents.items():
        part = content["parts"]["efficiency"]
        assert content["status"] == "finished" and part["options"]["prefill_repeats"] == 2
        assert content["model"]["num_sink_tokens"] == 4, "so that a row of another run knows its model"
        (rows[name],) = part["lengths"]
    for name, own in rows.items():
        assert own["length"] == 300
        assert own["time_to_first_token"]["repeats"] == own["decode_tokens_per_second"]["repeats"] == 2
        assert own["time_to_first_token_seconds"] == own["time_to_first_token"]["median"] > 0
        assert sum(own["bytes_by_part"].values()) == own["bytes"]["bytes"]
        memory = own["memory"]
        kind = "unadapted" if name == "pod-unadapted" else "dense"
        assert memory["weights"] == weight_bytes(run.models.get(kind))
        for phase in ("prefill", "decode"):
            parts = memory[phase]
            assert parts["peak"] == memory["weights"] + parts["kv"] + parts["activations"]
        # the four tokens decoded for memory add less than 3 % to what the cache holds after the prompt
        assert memory["decode"]["kv"] == pytest.approx(own["bytes"]["bytes"], rel=0.03)
    assert rows["snapkv"]["bytes"]["bytes_over_pod"] == pytest.approx(1, abs=0.02)
    assert rows["full"]["speed_over_full"]["median"] == 1


def test_largest_batches(finished):
    _, contents = finished
    rows = {name: content["parts"]["efficiency"]["max_batch"][0] for name, content in contents.items()}
    full = rows["full"]
    for name, row in rows.items():
        assert (row["prompt"], row["generated"], row["limit_bytes"]) == (48, 2, int(0.004 * 2**30))
        assert 1 < row["batch"] < 64 and row["tokens_per_second"] > 0
        assert row["peak_bytes"][str(row["batch"])] <= row["limit_bytes"]
        assert str(row["batch"] + 1) in row["failed"]
        for key in ("batch", "fractional_batch", "tokens_per_second"):
            assert row[f"{key}_over_full"] == row[key] / full[key]
        assert (row["budget_tokens"] is None) == (name in ("full", "pod-unadapted"))


def test_longest_prompts(finished):
    """One row is as long as fits: the next step does not."""
    run, contents = finished
    rows = {name: content["parts"]["efficiency"]["max_batch"][1] for name, content in contents.items()}
    for name, row in rows.items():
        assert row["prompt"] % 64 == 0 and 64 < row["prompt"] < 4096 and not row["most_reached"]
        assert (row["batch"], row["generated"]) == (1, 1)
        assert row["batch_over_full"] == row["prompt"] / rows["full"]["prompt"]
        one = run.method_runners[name]
        for tokens, fits in ((row["prompt"], True), (row["prompt"] + 64, False)):
            make = lambda n, one=one: one.cache(CacheSpan(n, 0))  # noqa: E731
            tries = LongTries(one.model, make, tokens, 1, row["limit_bytes"])
            assert tries.fits(1) is fits


def test_finished_speeds_are_kept(finished, monkeypatch):
    run, contents = finished
    monkeypatch.setattr(pod, "make_cache", lambda *a, **k: pytest.fail("measured again"))
    again = measured(run)
    assert {name: content["parts"] for name, content in again.items()} == {
        name: content["parts"] for name, content in contents.items()
    }


def test_speeds_of_two_races_are_not_kept_together(finished):
    """Speeds of two races are not kept together.

    Rates are held against full in one process: a method that raced at another time races again with all.
    """
    run, _ = finished
    results = opened(run)
    assert is_known(run, results)
    part = results["snapkv"].content["parts"]["efficiency"]
    part["environment"] = {**part["environment"], "date": "2020-01-01T00:00:00+00:00"}
    assert not is_known(run, results)
    del results["snapkv"].content["parts"]["efficiency"]
    assert not is_known(run, results)
    del results["snapkv"]
    assert is_known(run, results), "fewer methods than raced"


def test_speeds_of_another_device_are_not_kept(finished):
    """The hardware is the same: `eval.device` says which part of it is timed."""
    run, _ = finished
    results = opened(run)
    assert is_known(run, results)
    recipe = dataclasses.replace(run.recipe, eval=dataclasses.replace(run.recipe.eval, device="cpu"))
    assert not is_known(dataclasses.replace(run, side_by_side=side_by_side_tasks(recipe)), results)


def test_a_method_that_fails_does_not_lose_the_others(place, tmp_path, monkeypatch):
    """Once when it reads the prompt, once not before it decodes."""
    original, calls = StreamingLayer.attend, []

    def attend(self, q, k, v, step):
        calls.append(step.is_decode)
        if step.is_decode or when == "prompt":
            raise RuntimeError(f"out of\nsinks at the {when}")
        return original(self, q, k, v, step)

    monkeypatch.setattr(StreamingLayer, "attend", attend)
    for when in ("prompt", "decoding"):
        options = {"memory": False}
        run = make_run(
            place,
            "efficiency",
            METHODS,
            options,
            output_dir=str(tmp_path / when),
            eval__reuse=False,
            **CHANGES,
        )
        calls.clear()
        contents = measured(run)
        failed = contents.pop("streamingllm")
        assert failed["failed"] == {"efficiency": f"RuntimeError: out of sinks at the {when}"}
        assert (failed["status"], failed["parts"]) == ("failed", {}) and calls[-1] == (when == "decoding")
        for content in contents.values():
            assert content["status"] == "finished"
            assert "memory" not in content["parts"]["efficiency"]["lengths"][0]


class Clock:
    """A model whose every pass takes the next of some seconds, for whoever calls it."""

    def __init__(self, seconds, monkeypatch):
        self.seconds, self.now = list(seconds), 0.0
        monkeypatch.setattr(speed_comparison, "now", lambda device: self.now)

    def __call__(self, **_):
        self.now += self.seconds.pop(0)
        return type("Output", (), {"logits": torch.zeros(1, 1, 5)})


def test_rates_and_ratios_by_hand(monkeypatch):
    # prompts 8 and 4 s; a warm-up round of one step each; then rounds in order b, a and a, b
    clock = Clock([8, 4, 1, 1, 2, 4, 5, 1], monkeypatch)
    pair = [RaceEntry(name=name, model=clock, cache=None) for name in "ab"]
    for one in pair:
        read_prompt(one, torch.zeros(1, 40, dtype=torch.long))
    race(pair, steps=1, repeats=2)
    assert (pair[0].seconds, pair[1].seconds) == ([4, 5], [2, 1])
    found = side_by_side.speeds(pair[1], pair[0], steps=1)
    assert found["time_to_first_token_seconds"] == 4 == found["time_to_first_token"]["max"]
    assert found["decode_tokens_per_second"] == {"median": 0.75, "min": 0.5, "max": 1, "repeats": 2}
    assert (found["speed_over_full"]["min"], found["speed_over_full"]["max"]) == (2, 5)
    assert found["prefill_speed_over_full"]["median"] == 2


def task_of(**options):
    args = EvalArgs(tasks=["efficiency"], task_options={"efficiency": options}, device="cpu")
    return side_by_side_tasks(Recipe(eval=args))["efficiency"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": [[64, 3]]}, "on a GPU only: set eval.task_options.efficiency.memory_limit_gib"),
        ({"longest_prompt": 64}, "longest_prompt fills all memory, which is safe on a GPU only"),
        ({"max_batch": [[64]], "memory_limit_gib": 1}, r"max_batch\[0\]\[1\] is missing"),
        ({"prefill_repeats": 0}, "prefill_repeats is 0: it should be greater than 0"),
        ({"memory_limit_gib": 0}, "memory_limit_gib is 0: it should be greater than 0"),
        ({"max_batches": [[64, 3]]}, "max_batch"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        task_of(**options)
    assert "\n" not in str(caught.value)


def test_the_task_says_which_lengths_it_needs():
    task = task_of(max_batch=[[64, 3], [100, 1]], memory_limit_gib=2)
    assert {span.length for span in task.spans()} == {2048, 66, 100}
    assert task.options.memory_limit == 2**31
    assert task_of().options == SpeedOptions()
    assert dataclasses.asdict(SpeedOptions())["max_batch"] == []


def test_budget_below_the_minimum_is_refused_before_measuring(place):
    run = make_run(place, "efficiency", ["snapkv@16"], {}, **CHANGES)
    with pytest.raises(ValueError, match="^snapkv: budget = 16 must exceed window = 32"):
        run.side_by_side["efficiency"].check(run.method_runners)


def test_longer_prompts_are_decoded_without_being_read(place):
    """Longer prompts are decoded without being read.

    Caches that are filled with random tokens hold the bytes of those that read a prompt. What chooses by the
    prompt is left out.
    """
    names = ["full", "int4", "pod-unadapted", "pod-unadapted+int4", "snapkv", "razor"]
    options = {"decode_lengths": [500, 400], "memory": False}
    heads = {"eval__method_options": {"razor": {"heads": [[0], [1], [0, 1], []]}}}
    run = make_run(place, "efficiency", names, options, **(CHANGES | heads))
    rows = {name: content["parts"]["efficiency"]["decoding"] for name, content in measured(run).items()}
    assert rows["snapkv"] == rows["razor"] == []
    for name in names[:4]:
        assert [row["length"] for row in rows[name]] == [500, 400]
        method = run.method_runners[name].method
        for row in rows[name]:
            cache = pod.make_cache(run.models.get(method.model), method.spec)
            with torch.no_grad():
                prompt = torch.zeros(1, row["length"], dtype=torch.long)
                run.models.get(method.model)(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
            dense = rows["full"][[500, 400].index(row["length"])]["bytes"]
            # full rows grow with a slack of their own; ids of what was fed are bookkeeping of 4 bytes a token
            assert row["bytes"] == pytest.approx(cache.nbytes, rel=0.02)
            assert row["bytes_over_full"] == row["bytes"] / dense
            assert row["decode_tokens_per_second"]["repeats"] == row["speed_over_full"]["repeats"] == 2
    with pytest.raises(ValueError, match="lower eval.efficiency_lengths"):
        make_run(place, "efficiency", names[:1], {"decode_lengths": [100_000]})


def test_a_packed_window_is_filled_as_a_prompt_fills_it():
    config = pod.PodConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=512,
        num_sink_tokens=2,
        num_recent_tokens=100,
        lead=[[0, None], [None, None]],
    )
    torch.manual_seed(0)
    model = pod.PodForCausalLM(config).eval()
    filled, read = (pod.make_cache(model, "pod+int4") for _ in range(2))
    fill_with_random_tokens(model, filled, 1, 300)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 300, dtype=torch.long), past_key_values=read)
    filled.check_integrity()
    expected = {name: size for name, size in read.nbytes_by_part().items() if name != "bookkeeping"}
    assert set(expected) == {"keys", "values", "near_keys", "near_values"}
    for name, size in expected.items():
        assert filled.nbytes_by_part()[name] == pytest.approx(size, rel=0.02), name
