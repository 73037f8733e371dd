"""L-Eval: prompts, data, scores against the official scorer, and cutting documents.

Golden values: github.com/OpenLMLab/LEval, commit cd34b05, Evaluation/{auto_eval,em,f1}.py and rouge-score
0.1.2, on tests/eval/data/leval_predictions.jsonl (own texts in the format of the official prediction files).
"""

import copy
import hashlib
import json
import os
import random
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM

import pod
from pod.eval.lm.index import Rule, task_manager
from pod.eval.lm.lm_prompts import WORD_STEP, cut_document
from pod.eval.lm.requests import RequestEncoder
from pod.eval.suites import task_data
from pod.eval.suites.leval import leval_metrics, leval_prompts, leval_tasks
from pod.models import resolve_model

DATA = Path(__file__).parent / "data"
OFFICIAL = Path(os.environ.get("POD_GOLDEN", "golden")) / "leval"
CHAT_TEMPLATE = (  # drops outer white space, as many do
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCORERS = {name: task.scorer for name, task in leval_tasks.TASKS.items()}
# README.md (gpt4-32k) and Leaderboard/*.csv at 679aabd (turbo-16k-0613; the closed tasks there are of other
# predictions)
PUBLISHED = {
    "exam_eval/gpt4-32k": {
        "coursera": 75.58,
        "quality": 82.17,
        "tpo": 84.38,
        "gsm100": 96.00,
        "codeU": 25.55,
    },
    "ngram_eval/turbo-16k-0613": {
        **{"financial_qa": 45.36, "legal_contract_qa": 24.87, "multidoc_qa": 31.45, "narrative_qa": 18.20},
        **{"natural_question": 45.90, "scientific_qa": 28.25, "gov_report_summ": 23.64, "news_summ": 16.06},
        **{"paper_assistant": 18.61, "patent_summ": 29.28, "review_summ": 18.67, "tv_show_summ": 16.87},
        "meeting_summ": 19.31,
    },
}


@pytest.fixture(scope="module")
def manager():
    return task_manager(False)


def docs_of(name):
    with task_data.use(DATA):
        return list(leval_tasks.rows(f"{leval_tasks.TASKS[name].folder}/{name}.jsonl", version=1.0)["test"])


def scored(task, answer, target):
    """Our scores of a recorded prediction; a sci_fi prediction holds both answers, as officially."""
    if task != "sci_fi":
        return SCORERS[task]({"target": target, "part": ""}, [answer])
    loyalty, _, fact = answer.partition("[fact:")
    found = {}
    for part, said in (("loyalty", loyalty), ("fact", fact)):
        doc = {"target": leval_metrics.judgement_target(target, part), "part": part}
        found[part] = leval_tasks.judgement(doc, [said])[part]
    return found


def test_scores_equal_the_official_ones_on_recorded_predictions():
    rows = [json.loads(line) for line in (DATA / "leval_predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 81
    assert {row["task"] for row in rows} == set(leval_tasks.CLOSED) | {"financial_qa", "gov_report_summ"}
    for row in rows:
        ours = scored(row["task"], row["own_pred"], row["gt"])
        for name, value in row["official"].items():
            assert ours[name] == pytest.approx(value, abs=1e-11), (row, ours)


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the official predictions lie outside of the repository")
@pytest.mark.parametrize("folder", PUBLISHED)
def test_published_scores_come_out_of_the_official_predictions(folder):
    """POD_GOLDEN/leval is a copy of github.com/OpenLMLab/LEval/Predictions."""
    for task, published in PUBLISHED[folder].items():
        file = OFFICIAL / folder / f"{task}.pred.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if row["evaluation"] in leval_tasks.BY_METRIC]
        answer = next(key for key in rows[0] if key.endswith("_pred"))
        scores = [SCORERS[task]({"target": row["gt"]}, [row[answer]])["score"] for row in rows]
        assert 100 * sum(scores) / len(scores) == pytest.approx(published, abs=0.0101), task


def test_option_subsets_count_a_quarter_and_wrong_letters_nothing():
    assert [leval_metrics.exact_match(given, "ABD") for given in ("ABD", "AB", "D", "ABC", "ABCD")] == [
        *(1.0, 0.25, 0.25, 0.0, 0.0)
    ]


def test_the_20_tasks_and_their_rules():
    assert len(leval_tasks.TASKS) == 20 and [len(members) for members in leval_tasks.GROUPS.values()] == [
        7,
        6,
        7,
        13,
        20,
    ]
    without_chat = {name for name, task in leval_tasks.TASKS.items() if not task.chat}
    keeps_end = {name for name, task in leval_tasks.TASKS.items() if task.keep == "end"}
    assert (without_chat, keeps_end) == ({"gsm100", "codeU"}, {"codeU"})


@pytest.mark.parametrize(
    ("task", "count", "start", "end", "prefix"),
    [
        (
            *(
                "coursera",
                3,
                "Now you are given a very long document. Please follow",
                "Week one, lesson one.",
            ),
            "B. Heat\nC. Sound\n"
            "D. Motion.  Please directly give the answer without any additional output or explanation ",
        ),
        (
            "gsm100",
            2,
            "Given several question answer pairs",
            "Question: Ada has",
            "Let's think step by step\n",
        ),
        (
            *(
                "topic_retrieval_longchat",
                6,
                "Below is a record of our previous",
                "USER: I would like to discuss",
            ),
            "What is the first topic we discussed? Only give me the topic name. Do not summarize yourself.",
        ),
        (
            *(
                "news_summ",
                2,
                "Now you are given a very long document. Please follow the instruction after",
                "A fox was",
            ),
            " Instruction: Please summarize these news articles. \nAnswer this question with 24 words.",
        ),
    ],
)
def test_prompts_are_the_official_ones(task, count, start, end, prefix):
    docs = docs_of(task)
    first = docs[0]
    assert len(docs) == count
    assert first["system"].startswith(start) and first["prompt"].endswith(prefix)
    assert first["document"] in first["prompt"] and first["document"].startswith(end)
    assert first["prefix"] == ("\nAnswer:" if task == "coursera" else "")


def test_system_prompts_are_the_official_ones():
    """SHA-256 of what get_sys_prompt of Baselines/LEval_config.py gives, by task."""
    ours = {name: leval_prompts.system_prompt(name) for name in leval_tasks.TASKS}
    digest = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()
    assert digest == "cbba09fa8031cd5bf3a563c36927dd3e2963d2fee9c6498b1dd99daa929ad85d"


def test_rows_for_judges_are_left_out_and_each_question_is_a_sample():
    assert len(docs_of("financial_qa")) == 2  # a third row is for an LLM judge
    assert len(docs_of("meeting_summ")) == 2  # a third row is for humans
    assert [doc["target"] for doc in docs_of("topic_retrieval_longchat")][:2] == [
        "The history of paper",
        "The care of cats",
    ]


def test_worked_examples_are_no_text_that_is_asked_about():
    """Worked examples are no text that is asked about.

    gsm100's 100 questions stand behind the same 16 examples. One cluster would leave it, and L-Eval's mean,
    no interval.
    """
    assert len({doc["document"] for doc in docs_of("gsm100")}) == 1
    assert {doc["cluster"] for doc in docs_of("gsm100")} == {None}
    assert all(doc["cluster"] for doc in docs_of("coursera"))


def test_science_fiction_asks_twice_once_without_the_document():
    docs = docs_of("sci_fi")
    assert [(doc["part"], doc["target"]) for doc in docs] == [
        *(("loyalty", "true"), ("fact", "false"), ("loyalty", "false"), ("fact", "true")),
        *(("loyalty", "true"), ("fact", "false")),
    ]
    assert docs[1]["document"] == docs[1]["system"] == "" and "QUIET MOON" not in docs[1]["prompt"]
    assert docs[1]["prompt"] + docs[1]["prefix"] == (
        "1.\tSound travels through empty space, True or False? Answer this question based on the real-world "
        "knowledge and facts up until your last training"
        "Please directly answer without any additional output or explanation. \nAnswer:"
    )


class Parrot(LM):
    """Answers each prompt with what a table holds for its end; remembers the prompts."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.prompts = answers, []

    def generate_until(self, requests, disable_tqdm=False):
        self.prompts += [request.args for request in requests]
        return [
            next((said for end, said in self.answers.items() if end in request.args[0]), "")
            for request in requests
        ]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise AssertionError("nothing is scored by likelihood")

    loglikelihood_rolling = loglikelihood


def test_all_tasks_run_offline_through_lm_eval(manager):
    model = Parrot(
        {
            "What does a lid save?": "A",  # half right: 0.25
            "energy into?": "B",
            "rule of a map": "A",
            "Sound travels through empty space, True or False? Answer this "
            "question based on the world": "True.",
            "three (3) years": "The initial term shall be three years from the Effective Date",
        }
    )
    with task_data.use(DATA):
        found = evaluator.simple_evaluate(
            model, tasks=["pod_leval"], task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    results = found["results"]
    leaves = [name for name in results if "score,none" in results[name] and name != "pod_leval"]
    assert len(leaves) == 20
    assert results["pod_leval_coursera"]["exact_match,none"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert results["pod_leval_sci_fi"]["exact_match,none"] == pytest.approx(1 / 6)
    assert results["pod_leval_sci_fi"]["loyalty,none"] == pytest.approx(1 / 3)
    assert results["pod_leval_sci_fi"]["fact,none"] == 0.0
    assert 0.8 < results["pod_leval_legal_contract_qa"]["qa_f1,none"] < 1
    mean = sum(results[name]["score,none"] for name in leaves) / 20
    assert results["pod_leval"]["score,none"] == pytest.approx(mean)
    assert {args[1]["max_gen_toks"] for args in model.prompts} == {512}
    assert {tuple(args[1]["until"]) for args in model.prompts} == {()}


def test_missing_or_foreign_data_is_one_line(tmp_path):
    with (
        task_data.use(tmp_path),
        pytest.raises(ValueError, match=r"leval: Exam/tpo\.jsonl is missing .*L4NLP/LEval") as error,
    ):
        leval_tasks.rows("Exam/tpo.jsonl")
    assert "\n" not in str(error.value)
    (tmp_path / "leval" / "Exam").mkdir(parents=True)
    file = tmp_path / "leval" / "Exam" / "tpo.jsonl"
    file.write_text(
        json.dumps({"input": "x", "instructions": ["a", "b"], "outputs": ["A"], "evaluation": "exam"})
    )
    with task_data.use(tmp_path), pytest.raises(ValueError, match="row 1: 2 instructions and 1 outputs"):
        leval_tasks.rows("Exam/tpo.jsonl")
    file.write_text(json.dumps({"input": "x", "question": "a"}))
    with task_data.use(tmp_path), pytest.raises(ValueError, match="no instructions, outputs, evaluation"):
        leval_tasks.rows("Exam/tpo.jsonl")


def words_and_one(text):
    """A tokenizer of two tokens per word, and one at the start."""
    return 1 + 2 * len(text.split())


@pytest.mark.parametrize("keep", ["start", "end"])
def test_documents_lose_words_in_steps_of_250_as_officially(keep):
    words = [f"w{number}" for number in range(20000)]
    document = " ".join(words)
    prompt = f"System. {document} \nQuestion: why?"
    shorter = cut_document(prompt, document, keep, 8004, words_and_one)
    # 8004 - 1 - 2 * 3 = 7997 tokens of room: 7997 - 16 * 250 = 3997 words are the first number that fits
    kept = 7997 - 16 * WORD_STEP
    wanted = words[:kept] if keep == "start" else words[-kept:]
    assert shorter == f"System. {' '.join(wanted)} \nQuestion: why?"
    assert words_and_one(shorter) <= 8004 < words_and_one(shorter) + 2 * WORD_STEP


def test_short_prompts_stay_and_small_rooms_use_small_steps():
    document = " ".join(["word"] * 300)
    prompt = f"Read: {document} Answer:"
    assert cut_document(prompt, document, "start", 1000, words_and_one) == prompt
    shorter = cut_document(prompt, document, "start", 105, words_and_one)
    assert words_and_one(shorter) <= 105 and 250 <= 300 - shorter.count("word") <= 265


def test_text_without_blanks_is_cut_by_characters():
    def count(text):
        return len(text)

    assert cut_document("<" + "x" * 5000 + ">", "x" * 5000, "start", 102, count) == "<" + "x" * 100 + ">"
    end = cut_document("<" + "ab" * 2500 + ">", "ab" * 2500, "end", 13, count)
    assert end == "<" + "babababababab"[-11:] + ">"


def test_prompts_that_do_not_fit_without_their_document_are_refused():
    with pytest.raises(
        ValueError, match="the prompt has 7 tokens without its document, and only 7 tokens may be read"
    ):
        cut_document("one two doc doc doc three", "doc doc doc", "start", 7, words_and_one)
    with pytest.raises(ValueError, match="does not contain its document"):
        cut_document("one two three", "four", "start", 3, words_and_one)


def test_outer_white_space_that_a_chat_template_dropped_does_no_harm():
    cut = cut_document("a b c d e f\n\nAnswer:", " a b c d e f ", "start", 9, words_and_one)
    assert cut == "a b c\n\nAnswer:"


@pytest.mark.parametrize("chat", [True, False])
def test_the_question_survives_truncation_in_our_encoder(manager, chat):
    """The whole question and all instructions of a long document stay.

    The document goes through YAML rule, chat template and tokenizer.
    """
    tokenizer = copy.deepcopy(pod.load_tokenizer(resolve_model("package:tiny")))
    tokenizer.chat_template = CHAT_TEMPLATE
    encoder = RequestEncoder(tokenizer, 2048, "truncate")
    with task_data.use(DATA):
        task = manager.load(["pod_leval_coursera"])["tasks"]["pod_leval_coursera"]
    rules = task.config.metadata["pod"]
    docs = [dict(doc) for doc in task.eval_docs]
    rng = random.Random(0)
    long = " ".join(rng.choice(["kettle", "water", "lid", "steam", "energy"]) for _ in range(3000))
    for doc in docs:
        doc["prompt"] = doc["prompt"].replace(doc["document"], long)
        doc["document"] = long
    task.dataset = task_data.dataset(docs)
    task.task_docs = task.eval_docs
    task.build_all_requests(
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        chat_template=encoder.apply_chat_template if chat else None,
    )
    rule = Rule(truncation=rules["truncation"], chat_template=chat, keep=rules["keep"])
    for item, doc in zip(encoder.requests(task.instances, rule), docs, strict=True):
        text = tokenizer.decode(item.context)
        assert item.skipped is None and item.dropped > 0
        assert text.count("<user>") == chat
        assert 1250 < len(item.context) <= 2048 - 512
        assert doc["prompt"].partition(long)[2].strip() in text and text.rstrip().endswith("Answer:")
        assert leval_prompts.system_prompt("coursera").strip() in text
        assert long[:60] in text and long[-60:] not in text
