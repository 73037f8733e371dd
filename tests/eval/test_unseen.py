"""Questions that methods do not see when they compress.

What of a prompt is put behind the compressed text, in every suite.
"""

import json
from pathlib import Path

import lm_tools
import pytest

from pod.eval import runner
from pod.eval.lm.index import Rule
from pod.eval.lm.requests import RequestEncoder
from pod.eval.suites import task_data
from pod.recipe import load_recipe

DATA = Path(__file__).parent / "data"
ASKED = {
    "pod_longbench_qasper": "Question: ",
    "pod_longbench_gov_report": "one-page summary",
    "pod_longbench_trec": "Question: ",
    "pod_leval_coursera": "\nQuestion: ",
    "pod_infinitebench_2k_passkey": "What is the pass key?",
    "pod_ruler_2k_niah_single_1": "What is the special magic number",
    "pod_ruler_2k_fwe": "Question: Do not provide",
    "pod_coqa": "Q: ",
}
"""What the question of a task holds."""


def encoder(**options):
    return RequestEncoder(lm_tools.tokenizer(), 20_000, **options)


def request(text, asked=None, doc=None):
    settings = {"until": ["\n"], "max_gen_toks": 6}
    found = lm_tools.instance("generate_until", (text, settings), 0)
    found.doc = doc or ({} if asked is None else {"asked": asked})
    return found


def parts(encoded):
    decode = lm_tools.tokenizer().decode
    ids = encoded.context
    return decode(ids[: len(ids) - encoded.num_asked]), decode(ids[len(ids) - encoded.num_asked :])


def test_the_question_is_the_end_that_the_row_names():
    text = "A story. What?\n\nQuestion: What?\nAnswer:"
    found = encoder().request(request(text, "\n\nQuestion: What?\n"), Rule())
    assert parts(found) == ("A story. What?\n\n", "Question: What?\nAnswer:")
    assert encoder(question_aware=True).request(request(text, "Question"), Rule()).num_asked == 0
    assert encoder().request(request(text), Rule()).num_asked == 0
    assert encoder().request(request(text, "not there"), Rule()).num_asked == 0
    assert encoder().request(request(text, text), Rule()).num_asked == 0, "nothing would be compressed"


def test_a_shortened_prompt_keeps_its_question_apart():
    text = "word " * 200 + "\n\nQuestion: who?"
    found = encoder().request(request(text, "Question: who?"), Rule(max_prompt_tokens=100))
    assert found.dropped and parts(found)[1] == "Question: who?" and len(found.context) <= 100


@pytest.mark.parametrize("task", ASKED)
def test_every_suite_names_its_questions(task, tmp_path):
    settings = {
        "output_dir": str(tmp_path),
        "model.path": "package:tiny",
        "eval.methods": ["full"],
        "eval.tasks": [task],
        "eval.data_dir": str(DATA),
        "eval.limit": 2,
        "eval.max_length": 20_000,
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    run = runner.prepare(recipe, log=lambda line: None)
    (leaf,) = run.tasks[task].leaves.values()
    with task_data.use(recipe.eval.data_dir, run.tokenizer, False):
        run.tasks[task]._prompts(leaf)
        found = encoder().requests(leaf.task.instances, Rule(max_prompt_tokens=19_000))
    for item in found:
        text, question = parts(item)
        assert ASKED[task].strip() in question and len(text) > len(question) > 0


@pytest.mark.parametrize("spec", ["full", "snapkv", "int4"])
def test_answers_behind_the_compressed_text_do_not_depend_on_the_batch(spec):
    requests = [
        request(lm_tools.text(i, 9 + 2 * i) + "\n" + lm_tools.text(50 + i, 2), lm_tools.text(50 + i, 2))
        for i in range(4)
    ]
    for number, one in enumerate(requests):
        one.metadata = ("t", number, 1)
        one.doc_id = number
    found = {}
    for size in (1, 3):
        lm = lm_tools.around(spec, batch_size=size, encoder=encoder())
        found[size] = lm.generate_until(requests)
    assert found[1] == found[3]
    aware = lm_tools.around(spec, batch_size=3, encoder=encoder(question_aware=True)).generate_until(requests)
    if spec != "int4":  # which packs other groups of tokens then
        assert (aware == found[1]) == (spec == "full")
