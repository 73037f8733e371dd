"""Questions after compression: documents, branches of one cache, and the payload."""

import method_table
import pytest
import torch
from own_runs import make_run, measure, write_place

import pod
from pod.eval.answer import generate, reading
from pod.eval.tasks import multi_query
from pod.models import byte_tokenizer

OPTIONS = {"lengths": [420, 500], "questions": 3, "samples": 2, "new_tokens": 5}
ROWS = [row for row in method_table.ROWS if row.model in ("dense", "pod")]
SNAP = {"window": 4, "kernel": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_place(tmp_path_factory.mktemp("multi"))


def options_of(place, **changes):
    return OPTIONS | {"haystack": [str(place / "text.txt")]} | changes


class Tokenizer:
    pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def rows(lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, 96, (n,), generator=draw).tolist()) for n in lengths]


def answers(model, make, prompts, questions):
    """Answers to every question of every prompt, [question][prompt], from branches of one cache."""
    cache = make()
    mask = reading.read(model, cache, prompts, hold_out=False).mask
    before = cache.nbytes
    found = []
    for asked in questions:
        records = generate.generate_behind(model, Tokenizer(), reading.branch(cache), mask, asked, 4)
        found.append([record["answer"] for record in records])
    assert cache.nbytes == before, "a branch wrote into the cache it came from"
    return found


def test_branches_equal_whole_prompts(dense_model):
    prompts, questions = rows([40, 33, 51], 1), [rows([5, 9, 1], 2), rows([7, 3, 4], 3)]
    found = answers(dense_model, lambda: pod.make_cache(dense_model, "full"), prompts, questions)
    for number, asked in enumerate(questions):
        for parts in (0, 1):  # at once, or the question behind the text
            whole = [
                type("P", (), {"token_ids": p + q, "num_asked": parts * len(q)})
                for p, q in zip(prompts, asked, strict=True)
            ]
            cache = pod.make_cache(dense_model, "full")
            said = generate.generate(dense_model, Tokenizer(), cache, whole, 4)
            assert found[number] == [record["answer"] for record in said]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_batch_of_three_answers_as_alone_and_in_any_order(row, dense_model, pod_model):
    model = pod_model if row.model == "pod" else dense_model
    options = row.options | ({"heads": row.options["heads"][:4]} if "heads" in row.options else {})

    def make():
        return pod.make_cache(model, row.spec, **options)

    prompts, questions = rows([64, 50, 57], 4), [rows([5, 9, 6], 5), rows([7, 3, 4], 6)]
    together = answers(model, make, prompts, questions)
    for index in range(3):
        alone = answers(
            model, make, prompts[index : index + 1], [q[index : index + 1] for q in reversed(questions)]
        )
        assert [row[index] for row in together] == [row[0] for row in reversed(alone)]


def test_compression_comes_before_the_question(dense_model):
    cache = pod.make_cache(dense_model, "snapkv", budget=24, **SNAP)
    reading.read(dense_model, cache, rows([64, 60], 7), hold_out=False)
    assert [layer.head_groups[0].held for group in cache.groups for layer in group.layers] == [24] * 8
    prompts, questions = rows([64, 50, 57], 4), [rows([5, 9, 6], 5)]
    few = answers(
        dense_model, lambda: pod.make_cache(dense_model, "snapkv", budget=24, **SNAP), prompts, questions
    )
    all_ = answers(
        dense_model, lambda: pod.make_cache(dense_model, "snapkv", budget=99, **SNAP), prompts, questions
    )
    full = answers(dense_model, lambda: pod.make_cache(dense_model, "full"), prompts, questions)
    assert few != full and all_ == full


@pytest.mark.parametrize("question_in_prompt", [False, True])
def test_documents_hold_every_fact_and_ask_once(question_in_prompt):
    tokenizer = byte_tokenizer()
    options = multi_query.MultiQueryOptions(questions=4, question_in_prompt=question_in_prompt)
    sentences = [f"Sentence {'abcdefghij'[i % 10]} speaks of thing {'xyz'[i % 3]}." for i in range(40)]
    document = multi_query.make_document(tokenizer, sentences, 900, 1, 3, options)
    assert document.depths == (0.125, 0.375, 0.625, 0.875)
    whole = [tokenizer.decode(list(document.prompt + question)) for question in document.questions]
    names = []
    for number, (text, value) in enumerate(zip(whole, document.values, strict=True)):
        name = text.rpartition("Answer: ")[2].removesuffix("'s favorite number is")
        names.append(name)
        assert text.startswith(document.text) and document.text.endswith(" </book>.\n")
        place = document.text.index(f"\n{name}'s favorite number is {value}.\n") / len(document.text)
        assert place == pytest.approx(document.depths[number], abs=0.12)
        told = f"is {document.values[0]}.\n Based on" in text
        assert told == (question_in_prompt and number > 0)
        if not question_in_prompt:
            assert len(document.prompt) + len(document.questions[number]) <= 900
    assert len(set(names)) == 4
    assert len(document.questions[0]) == 1 or not question_in_prompt
    if question_in_prompt:
        assert whole[0].startswith(document.text + " Based on the content of the book, Question: What is")


def test_payload_of_right_and_wrong_answers(place, monkeypatch):
    run = make_run(place, "multi_query", ["full"], options_of(place, question_in_prompt=True))
    task = run.tasks["multi_query"]
    turn = iter(range(100))

    def answer(model, tokenizer, cache, mask, asked, new_tokens):
        length, number = [(n, q) for n in OPTIONS["lengths"] for q in range(3)][next(turn)]
        documents = [document for document in task.items if document.length == length]
        assert [document.questions[number] for document in documents] == asked
        return [{"answer": document.values[0], "bytes": 1} for document in documents]

    monkeypatch.setattr(generate, "generate_behind", answer)
    payload = measure(run, "full")
    assert payload["kind"] == "binary" and payload["value"] == pytest.approx(1 / 3)
    assert (
        payload["metrics"]["first question"]["value"] == 1
        and payload["metrics"]["later questions"]["value"] == 0
    )
    assert [s["id"] for s in payload["samples"]][:4] == ["420/0/0", "420/0/1", "420/0/2", "420/1/0"]
    assert [s["cluster"] for s in payload["samples"]][:4] == ["420/0", "420/0", "420/0", "420/1"]
    assert payload["cells"][:2] == [
        {"length": 420, "depth": 0.1667, "value": 1.0, "count": 2},
        {"length": 420, "depth": 0.5, "value": 0.0, "count": 2},
    ]


@pytest.mark.slow
def test_run_through_methods(place):
    methods = ["full", "pod-unadapted", "snapkv", "streamingllm", "snapkv@1000"]
    one = make_run(place, "multi_query", methods, options_of(place), eval__batch_size=1)
    two = make_run(place, "multi_query", methods, options_of(place), eval__batch_size=2)
    found = {name: measure(two, name) for name in methods}
    for name in methods:
        for left, right in zip(found[name]["samples"], measure(one, name)["samples"], strict=True):
            assert left | {"bytes": 0} == right | {"bytes": 0}
    answered = {name: [s["answer"] for s in found[name]["samples"]] for name in methods}
    assert answered["snapkv@1000"] == answered["full"]
    assert len({tuple(answered[name]) for name in methods[:4]}) == 4
    for name in ("snapkv", "streamingllm"):
        assert found[name]["bytes"][1]["bytes_over_pod"] == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [150]}, "a needle prompt of 150 tokens is too short"),
        ({"questions": 0}, r"eval\.task_options\.multi_query\.questions is 0, it must be from 1 to 24"),
        ({"chat_template": True}, "multi_query.chat_template is true and the tokenizer has no chat template"),
        ({"chat_template": True, "question_in_prompt": True}, "question_in_prompt works in plain text only"),
        ({"samples": 0}, "samples is 0"),
    ],
)
def test_wrong_options_are_refused(place, changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(place, "multi_query", ["full"], options_of(place, **changes))
