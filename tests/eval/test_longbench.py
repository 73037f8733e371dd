"""LongBench: prompts, rules, data and scores against the official ones.

Golden values: github.com/THUDM/LongBench, commit 2e00731, its eval.py with rouge 1.0.1, jieba 0.42.1,
fuzzywuzzy 0.18.0 (without python-Levenshtein, as its requirements say) and Python 3.11, on
tests/eval/data/longbench_predictions.jsonl.
"""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest
from lm_eval import evaluator
from lm_eval.api.model import LM
from rouge import Rouge

import pod
from pod.eval.lm.index import Rule, task_manager
from pod.eval.lm.requests import RequestEncoder
from pod.eval.suites import task_data
from pod.eval.suites.longbench import longbench_metrics, longbench_tasks
from pod.eval.suites.longbench.longbench_tasks import PROMPTS
from pod.models import resolve_model

DATA = Path(__file__).parent / "data"

# config/dataset2prompt.json as json.dumps(sort_keys=True, ensure_ascii=False)
PROMPTS_SHA256 = "e7d865d712fe45e2455f5e864ac474001d7758d68d349e76ffbcdd382483358f"
NEW_TOKENS = {  # config/dataset2maxlen.json
    512: ["gov_report", "qmsum", "multi_news", "vcsum"],
    128: ["narrativeqa", "qasper", "dureader", "samsum"],
    64: ["multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"],
    32: [
        *("hotpotqa", "2wikimqa", "musique", "triviaqa"),
        *("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    ],
}
WITHOUT_CHAT = ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]  # pred.py
RESULT = {  # pred/<model>/result.json, percent
    **{"gov_report": 30.65, "vcsum": 27.98, "trec": 36.67, "multifieldqa_zh": 45.25, "triviaqa": 44.44},
    **{
        "passage_retrieval_zh": 41.67,
        "dureader": 27.22,
        "hotpotqa": 28.16,
        "repobench-p": 62.62,
        "lcc": 62.62,
    },
    **{"multi_news": 30.65, "qasper": 39.71, "samsum": 53.69, "narrativeqa": 28.16, "passage_count": 31.25},
    **{"passage_retrieval_en": 38.1, "2wikimqa": 28.16, "multifieldqa_en": 28.16, "qmsum": 30.65},
    **{"lsht": 50.0, "musique": 28.16},
}
RESULT_E = {  # pred_e/<model>/result.json: 0-4k, 4-8k, 8k+
    "gov_report": (43.28, 0.0, 42.37),
    "trec": (45.83, 37.5, 16.67),
    "triviaqa": (100.0, 0.0, 33.33),
    "hotpotqa": (46.67, 14.29, 14.29),
    "repobench-p": (74.8, 49.5, 60.5),
    "lcc": (74.8, 49.5, 60.5),
    "multi_news": (43.28, 0.0, 42.37),
    "qasper": (60.0, 32.14, 14.29),
    "samsum": (79.49, 0.0, 81.58),
    "passage_count": (50.0, 25.0, 0.0),
    "passage_retrieval_en": (66.67, 33.33, 0.0),
    "2wikimqa": (46.67, 14.29, 14.29),
    "multifieldqa_en": (46.67, 14.29, 14.29),
}
FUZZ_RATIOS = [  # fuzz.ratio of fuzzywuzzy 0.18.0 on ragged_pairs()
    *(100, 64, 100, 73, 90, 94, 81, 84, 83, 100, 89, 99, 86, 90, 88, 96, 94, 88, 100, 94),
    *(97, 85, 91, 88, 89, 84, 88, 96, 93, 85, 90, 97, 91, 86, 91, 100, 100, 3, 92, 90),
    *(76, 100, 0, 3, 99, 47, 85, 91, 98, 86, 2, 89, 89, 97, 95, 91, 99, 15, 91, 26),
]

LEVENSHTEIN_RATIOS = [  # the same with python-Levenshtein 0.27 installed
    *(100, 64, 100, 73, 90, 94, 81, 84, 83, 100, 89, 99, 86, 90, 88, 96, 94, 88, 100, 94),
    *(97, 85, 94, 88, 90, 84, 88, 96, 94, 85, 90, 97, 91, 86, 91, 100, 100, 94, 92, 90),
    *(83, 100, 88, 92, 99, 99, 85, 91, 98, 86, 97, 89, 90, 97, 95, 91, 99, 91, 91, 94),
]


@pytest.fixture(scope="module")
def recorded():
    """The recorded predictions by task."""
    rows = [json.loads(line) for line in (DATA / "longbench_predictions.jsonl").read_text().splitlines()]
    return {name: [row for row in rows if row["task"] == name] for name in longbench_tasks.TASKS}


@pytest.fixture(scope="module")
def manager():
    return task_manager(False)


def load(manager, name):
    with task_data.use(DATA):
        return manager.load([name])


def ragged_pairs(count=60, seed=7):
    """Texts of 0 to 365 characters and edited copies of them."""
    generator, pairs = random.Random(seed), []
    for index in range(count):
        alphabet = "abcdef (){}=._é总" if index % 2 else "ab "
        left = "".join(generator.choice(alphabet) for _ in range(generator.randrange(0, 12 + 6 * index)))
        right = list(left)
        for _ in range(generator.randrange(0, 4 + len(left) // 6)):
            place = generator.randrange(len(right) + 1)
            right[place : place + generator.randrange(3)] = generator.choice(alphabet)
        pairs.append((left, "".join(right)))
    return pairs


def scores(task, row, suffix=""):
    scorer = longbench_tasks.TASKS[task].scorer
    return (longbench_tasks.by_length(scorer) if suffix else scorer)(row, [row["pred"]])


@pytest.mark.parametrize("task", RESULT)
def test_scores_equal_the_official_result(recorded, task):
    assert len(recorded[task]) >= 6
    values = [scores(task, row)["score"] for row in recorded[task]]
    assert round(100 * sum(values) / len(values), 2) == RESULT[task]


@pytest.mark.parametrize("task", RESULT_E)
def test_length_groups_equal_the_official_result(recorded, task):
    groups = {"score_0_4k": [], "score_4_8k": [], "score_8k": []}
    for row in recorded[task]:
        for name, value in scores(task, row, "_e").items():
            if name in groups:
                groups[name].append(value)
    means = tuple(round(100 * sum(values) / len(values), 2) for values in groups.values())
    assert means == RESULT_E[task]
    assert sum(map(len, groups.values())) == len(recorded[task])


@pytest.mark.skipif("POD_LONGBENCH_PRED" not in os.environ, reason="POD_LONGBENCH_PRED names no predictions")
def test_scores_equal_a_result_that_somebody_published():
    """Scores equal a result that somebody published.

    It is a folder pred/<model> or pred_e/<model> of the official scripts, with its result.json.

    Equal so far: github.com/viridisGreen/LongBench at eaae805 (pred/llama2-7b-chat-4k, 21 tasks, 4,750
    answers) and github.com/dreaming-panda/MagicPiG at 8666d53 (pred_e/llama2-7b-chat-4k-original, 13 tasks,
    3,668 answers).
    """
    folder = Path(os.environ["POD_LONGBENCH_PRED"])
    result = json.loads((folder / "result.json").read_text())
    for task, expected in result.items():
        suffix = "_e" if isinstance(expected, dict) else ""
        groups = {"score_0_4k": [], "score_4_8k": [], "score_8k": []} if suffix else {"score": []}
        for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").split("\n"):
            row = json.loads(line) if line else None
            for name, value in scores(task, row, suffix).items() if row else ():
                if name in groups:
                    groups[name].append(value)
        means = [round(100 * sum(values) / len(values), 2) for values in groups.values()]
        assert means == (list(expected.values()) if suffix else [expected]), task


def test_edit_similarity_equals_fuzzywuzzy_with_and_without_levenshtein():
    pairs = ragged_pairs()
    assert [longbench_metrics.fuzz_ratio(left, right) for left, right in pairs] == FUZZ_RATIOS
    assert [longbench_metrics.levenshtein_ratio(left, right) for left, right in pairs] == LEVENSHTEIN_RATIOS
    gaps = [best - ratio for best, ratio in zip(LEVENSHTEIN_RATIOS, FUZZ_RATIOS, strict=True)]
    assert (sum(gap != 0 for gap in gaps), min(gaps), max(gaps)) == (12, 0, 95)
    edges = [("", ""), ("", "a"), ("a", "")]
    assert [longbench_metrics.fuzz_ratio(*edge) for edge in edges] == [100, 0, 0]
    assert [longbench_metrics.levenshtein_ratio(*edge) for edge in edges] == [100, 0, 0]


def test_rouge_l_equals_the_package():
    generator, rouge = random.Random(3), Rouge(metrics=["rouge-l"])
    words = ["dam", "ferry", "jars", "Jars", "the", "tower.", ".", "", "e.g.", "\n", "forty"]
    different = 0
    for length in range(1, 61):
        left, right = (
            " ".join(generator.choices(words, k=generator.randrange(1, length + 1))) for _ in range(2)
        )
        try:
            expected = rouge.get_scores([left], [right], avg=True)["rouge-l"]["f"]
        except ValueError:  # no sentence at all
            expected = 0.0
        assert longbench_metrics.rouge_l(left, right) == expected
        different += 0 < expected < 1
    assert different > 40


@pytest.mark.parametrize(
    ("metric", "last"),
    [(longbench_metrics.rouge_l, 990), (longbench_metrics.rouge_l_zh, 989)],
    ids=["en", "zh"],
)
def test_long_alignments_score_zero_where_the_official_recursion_ends(metric, last):
    """eval.py printed 0.2 for `z` among 990 words and 0.0 among 991; 989 and 990 for Chinese."""
    characters = [chr(0x4E00 + 7 * index) for index in range(last)]

    def score(words):
        return metric(" ".join(["z", *characters[: words - 1]]), "z")

    assert score(last) == pytest.approx(2 / (last + 1), rel=1e-4)
    assert score(last + 1) == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        # "location" is removed from the list that is walked, so "Other" after it is never looked at and stays
        ("Other location", "Other location", 1 / 2),
        ("location or City", "City", 1 / 2),
        ("something Definition of something", "Definition of something", 1.0),
        ("City", "Other location", 0.0),
    ],
)
def test_classification_skips_the_class_after_a_removed_one(prediction, reference, expected):
    classes = ["Definition of something", "something", "location", "Other", "Other location", "City"]
    assert longbench_metrics.classification(prediction, reference, classes) == expected


def test_prompts_limits_and_rules_are_the_official_ones(manager):
    text = json.dumps(PROMPTS, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPTS_SHA256
    assert {name: limit for limit, names in NEW_TOKENS.items() for name in names} == {
        name: task.new_tokens for name, task in longbench_tasks.TASKS.items()
    }
    for name, task in load(manager, "pod_longbench")["tasks"].items():
        rules = task.config.metadata["pod"]
        assert rules["chat_template"] == (name.removeprefix("pod_longbench_") not in WITHOUT_CHAT), name
        assert (rules["truncation"], rules["kind"]) == ("middle", "score")
        stop = {"min_new_tokens": 1, "until": ["\n"]} if name.endswith("samsum") else {"until": []}
        assert {key: task.config.generation_kwargs.get(key) for key in stop} == stop, name


def test_groups_are_those_of_the_papers(manager):
    def members(name):
        return {task.removeprefix("pod_longbench_") for task in load(manager, name)["tasks"]}

    everything = set(longbench_tasks.TASKS)
    assert members("pod_longbench") == everything and len(everything) == 21
    assert members("pod_longbench_e") == {f"{name}_e" for name in RESULT_E} and len(RESULT_E) == 13
    english = everything - {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
    assert members("pod_longbench_16") == english and len(english) == 16
    assert members("pod_longbench_14") == english - {"passage_count", "passage_retrieval_en"}
    assert members("pod_longbench_16_simlayerkv") == (english | {"dureader"}) - {"2wikimqa"}
    razor = (english | {"multifieldqa_zh", "vcsum", "lsht"}) - {"passage_count", "passage_retrieval_en"}
    assert members("pod_longbench_15") == razor - {"samsum", "repobench-p"}
    assert len(razor) - 2 == 15


class Answers(LM):
    """A model that knows every first answer; keeps the prompts."""

    def __init__(self):
        super().__init__()
        self.prompts = {}

    def generate_until(self, requests, disable_tqdm=False):
        for request in requests:
            self.prompts[request.task_name, request.doc["_id"]] = request.args[0]
        return [request.doc["answers"][0] for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize("group", ["pod_longbench", "pod_longbench_e"])
def test_fixtures_run_through_lm_eval(manager, group):
    """Right answers score 1 in every task.

    The prompt that a model gets is the official one, line ends included.
    """
    model = Answers()
    with task_data.use(DATA):
        out = evaluator.simple_evaluate(model, tasks=[group], task_manager=manager, bootstrap_iters=0)
    names = [name for name in out["results"] if name in out["configs"]]
    assert len(names) == (13 if group.endswith("_e") else 21)
    for name in names:
        short = name.removeprefix("pod_longbench_")
        prompt = PROMPTS[short.removesuffix("_e")]
        rows = [json.loads(line) for line in (DATA / "longbench" / f"{short}.jsonl").read_text().splitlines()]
        for row in rows:
            assert model.prompts[name, row["_id"]] == prompt.format(**row)
        found = {
            key.split(",")[0]: value for key, value in out["results"][name].items() if key.endswith(",none")
        }
        wanted = {"score", longbench_tasks.TASKS[short.removesuffix("_e")].metric}
        wanted |= {"edit_similarity_levenshtein"} if "edit_similarity" in wanted else set()
        wanted |= set(longbench_tasks.LENGTH_GROUPS) if group.endswith("_e") else set()
        values = {key: value for key, value in found.items() if not key.endswith("_stderr")}
        assert set(values) == wanted
        assert values == pytest.approx(dict.fromkeys(wanted, 1.0), abs=1e-7)
    assert out["groups"][group]["score,none"] == pytest.approx(1.0, abs=1e-7)


TEMPLATE = (
    "{{ '<system>' }}{% for m in messages %}{{ '<user>' + m['content'] + '</user>' }}{% endfor %}<model>"
)


@pytest.mark.parametrize(("name", "chat"), [("qasper", True), ("gov_report", False), ("triviaqa", False)])
def test_long_prompts_lose_their_middle_before_the_template(manager, name, chat):
    """Long prompts lose their middle before the template.

    pred.py: `half = int(max_length / 2)` tokens of the prompt's start and of its end stay; then build_chat.
    One token is one byte here.
    """
    tokenizer = pod.load_tokenizer(resolve_model("package:tiny"))
    tokenizer.chat_template = TEMPLATE
    task = load(manager, f"pod_longbench_{name}")["tasks"][f"pod_longbench_{name}"]
    rules = task.config.metadata["pod"]
    encoder = RequestEncoder(tokenizer, 900, "truncate")
    task.build_all_requests(
        rank=0,
        world_size=1,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        chat_template=encoder.apply_chat_template if chat else None,
        tokenizer_name="tiny",
    )
    encoded = encoder.requests(task.instances, Rule(truncation=rules["truncation"], chat_template=chat))
    assert len(encoded) == 2
    for request, item in zip(task.instances, encoded, strict=True):
        prompt = PROMPTS[name].format(**request.doc)
        head, tail = ("<system><user>", "</user><model>") if chat else ("", "")
        half = (900 - longbench_tasks.TASKS[name].new_tokens - len(head + tail)) // 2
        assert tokenizer.decode(item.context) == head + prompt[:half] + prompt[-half:] + tail
        assert item.dropped == len(prompt) - 2 * half > 0


def test_rows_that_are_not_official_are_refused(tmp_path):
    folder = tmp_path / "longbench"
    folder.mkdir()
    row = json.loads((DATA / "longbench" / "qasper.jsonl").read_text().splitlines()[0])
    broken = {key: value for key, value in row.items() if key != "answers"}
    (folder / "qasper.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(broken)}\n")
    (folder / "trec.jsonl").write_text(json.dumps({**row, "answers": []}) + "\n")
    with task_data.use(tmp_path):
        with pytest.raises(
            ValueError, match=r"longbench/qasper.jsonl, row 2: no answers; expected .*context"
        ):
            longbench_tasks.rows("qasper.jsonl")
        with pytest.raises(ValueError, match=r"longbench/trec.jsonl, row 1: no answer to score against"):
            longbench_tasks.rows("trec.jsonl")
        with pytest.raises(ValueError, match=r"longbench/lcc_e.jsonl.*data/lcc_e.jsonl in data.zip"):
            longbench_tasks.rows("lcc_e.jsonl")
