"""Published tables, ours next to theirs.

The CSV files agree with themselves, and with the papers where their texts are at hand.
"""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from synthetic import payload_of, result_file

from pod.eval.answer.methods import safe_name
from pod.eval.report import paper_tables
from pod.eval.report.merge import merge
from pod.eval.report.names import CATEGORIES
from pod.eval.report.page import Section
from pod.eval.report.paper_tables import Published, load, paper_name, relative_drop, same_model
from pod.eval.report.report_tables import suite_table
from pod.eval.suites.configs import suite_configs
from pod.files import read_json, write_json

ROOT = Path(__file__).parents[2]
AVERAGES_THAT_DO_NOT_FIT = {  # as printed: (paper, table, model, method)
    *[("imdc", "2", model) for model in ("LLaMA2-7b", "InternLM2-7b", "Tiny-LLaMA")],
    ("simlayerkv", "1", "LLaMA3-8B-Instruct", "minicache"),
    ("simlayerkv", "1", "Mistral-7B-Instruct", "simlayerkv"),
    ("simlayerkv", "6", "Yi-9B-chat-16K", "snapkv"),
    ("simlayerkv", "6", "Qwen2.5-3B-chat-32K", "full"),
    ("simlayerkv", "6", "Qwen2.5-3B-chat-32K", "streamingllm"),
}


@pytest.fixture(scope="module")
def published():
    return load()


def value(rows, **where):
    found = [row.value for row in rows if all(getattr(row, key) == wanted for key, wanted in where.items())]
    assert len(found) == 1, found
    return found[0]


def test_every_table_is_there(published):
    counts = defaultdict(int)
    for row in published:
        counts[row.paper, row.table] += 1
    assert {
        paper: sum(n for (name, _), n in counts.items() if name == paper) for paper in paper_tables.TITLES
    } == {
        "pod": 374,
        "simlayerkv": 709,
        "d2o": 638,
        "razorattention": 265,
        "imdc": 195,
    }
    assert [counts["pod", str(table)] for table in range(1, 8)] == [120, 8, 12, 180, 31, 18, 5]
    keys = [
        (row.paper, row.table, row.model, row.benchmark, row.task, row.method, row.setting, row.metric)
        for row in published
    ]
    assert len(set(keys)) == len(keys)


def test_numbers_that_the_project_is_held_against(published):
    assert (
        value(published, paper="pod", table="1", task="average", method="pod", benchmark="longbench_14")
        == 44.8
    )
    assert (
        value(published, paper="pod", table="1", task="average", method="full", benchmark="longbench_14")
        == 45.3
    )
    assert value(published, paper="pod", table="2", method="pod") == 98.9
    assert value(published, paper="pod", table="5", method="pod", task="decode") == 31.7
    assert value(published, paper="pod", table="7", setting="window 4096") == 86.0
    assert (
        value(
            published,
            paper="simlayerkv",
            table="2",
            model="LLaMA3-8B-Instruct",
            method="simlayerkv+int4",
            task="kv_compression",
        )
        == 5.57
    )
    assert value(published, paper="d2o", table="2", method="d2o", setting="up to 100K, budget 4096") == 83.98
    assert (
        value(
            published,
            paper="razorattention",
            table="3",
            model="Qwen1.5-7B-Chat",
            method="razor",
            task="average",
        )
        == 35.87
    )


def test_printed_averages_are_the_means_of_their_rows(published):
    """A wrong digit anywhere in a row would show here."""
    groups = defaultdict(dict)
    for row in published:
        if row.metric == "score":
            groups[row.paper, row.table, row.model, row.benchmark, row.method, row.setting][row.task] = (
                row.value
            )
    checked = 0
    for (paper, table, model, _, method, _), values in groups.items():
        average = values.pop("average", None)
        if average is None or not values:
            continue
        if {(paper, table, model), (paper, table, model, method)} & AVERAGES_THAT_DO_NOT_FIT:
            continue
        checked += 1
        assert average == pytest.approx(sum(values.values()) / len(values), abs=0.075), (
            paper,
            table,
            model,
            method,
        )
    assert checked == 76


def test_infinitebench_average_is_over_all_lengths(published):
    rows = [row for row in published if (row.paper, row.table) == ("pod", "4")]
    for method in ("full", "pod", "snapkv", "cla"):
        own = [row.value for row in rows if row.method == method and row.task != "average"]
        average = value(rows, method=method, task="average")
        assert len(own) == 15 and average == pytest.approx(sum(own) / 15, abs=0.06)


def test_values_stand_in_the_papers(published):
    """With POD_PAPERS=<folder of pod.txt, d2o.txt …>: every value is printed in its paper's text."""
    folder = os.environ.get("POD_PAPERS")
    if not folder:
        pytest.skip("POD_PAPERS is not set: the papers' texts are not part of this repository")
    texts = {
        paper: (Path(folder) / f"{paper}.txt").read_text(encoding="utf-8") for paper in paper_tables.TITLES
    }
    for file in sorted((ROOT / "pod" / "eval" / "report" / "papers").glob("*.csv")):
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:
            number = re.escape(line.rpartition(",")[2])
            latex = (
                rf"(?<!\d){number}({number})*(?!\d)"  # the texts print a formula up to three times in a row
            )
            assert re.search(latex, texts[file.stem]), (file.name, line)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "LLaMA3-8B-Instruct", True),
        ("meta-llama/Meta-Llama-3-8B", "LLaMA3-8B-32K", False),  # the paper extended it first
        ("runs/llama3_8b_32k_dense/export", "LLaMA3-8B-32K", True),
        ("runs/llama3_8b_32k_dense/export/", "Llama-3-8B", False),
        ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B", True),
        ("yaofu/llama-2-7b-80k", "Llama-2-7B-80k", True),
        ("meta-llama/Llama-3.1-8B", "LLaMA3.1-8B", True),
        ("/models/Llama-2-7b-chat-hf/", "LLaMA2-7B-chat", True),
        ("mistralai/Mistral-7B-Instruct-v0.2", "Mistral-7B-Instruct", True),
        ("Qwen/Qwen1.5-7B-Chat", "Qwen1.5-7B-Chat", True),
        ("meta-llama/Llama-3.1-8B", "LLaMA3-8B-32K", False),
        ("meta-llama/Meta-Llama-3-8B", "LLaMA3-8B-Instruct", False),
        ("meta-llama/Llama-2-13b-chat-hf", "LLaMA2-7B-chat", False),
        ("HuggingFaceTB/SmolLM2-135M", "LLaMA3-8B-32K", False),
    ],
)
def test_same_model(ours, theirs, same):
    assert same_model(ours, theirs) == same


def test_categories_are_made_of_tasks_that_exist():
    names = {
        name.removeprefix(f"pod_{suite}_")
        for suite in ("longbench", "leval")
        for name in suite_configs()[suite]
    }
    members = [paper_tables._MEMBERS[suite] for suite in ("longbench", "longbench_14", "leval")]
    wanted = {task for groups in members for tasks in groups.values() for task in tasks}
    assert wanted - names == set() and len(wanted) == 21 + 20


RAW, EXTENDED = "meta-llama/Meta-Llama-3-8B", "runs/llama3_8b_32k_dense/export"


def run_of(folder, method, scores, path=EXTENDED):
    parts = {name: payload_of([score] * 2) for name, score in scores.items()}
    write_json(folder / "eval" / f"{safe_name(method)}.json", result_file(method, parts, path))


def table_of(folder, published, model=None):
    return tables_of(merge([folder]), published, model)


def tables_of(comparison, published, model=None):
    found = paper_tables.blocks(comparison, published, model)[:-1]
    tables = {block.title: block.blocks[0] if isinstance(block, Section) else block for block in found}
    return {title: [[cell.text for cell in row] for row in table.rows] for title, table in tables.items()}


def test_ours_stand_next_to_theirs(tmp_path, published):
    (tmp_path / "eval").mkdir()
    for name, score in (("full", 0.97), ("snapkv@25%", 0.9), ("razor", 0.9)):
        run_of(tmp_path, name, {"niah": score, "mmlu": 0.6} if name == "full" else {"niah": score})
    tables = table_of(tmp_path, published)
    assert list(tables) == ["PoD, Table 2: LLaMA3-8B-32K", "PoD, Table 6: LLaMA3-8B-32K"]
    assert tables["PoD, Table 2: LLaMA3-8B-32K"][1] == [
        *("average", "snapkv", "32K", "98.3", "+0.4", "snapkv@25%", "90.0", "-7.0")
    ]


def test_the_raw_model_has_the_tables_of_the_raw_model(tmp_path, published):
    (tmp_path / "eval").mkdir()
    run_of(tmp_path, "full", {"pod_longbench_qasper": 0.13, "niah": 0.97, "mmlu": 0.6}, RAW)
    run_of(tmp_path, "d2o", {"pod_longbench_qasper": 0.125}, RAW)
    assert table_of(tmp_path, published) == {
        "D2O, Table 1: Llama-3-8B": [
            ["qasper", "full", "–", "12.89", "–", "full", "13.0", "–"],
            ["qasper", "d2o", "20% of the prompt", "12.04", "-0.9", "d2o", "12.5", "-0.5"],
        ]
    }


def test_trained_baselines_are_the_papers(tmp_path, published):
    """Models of their own are `model:NAME` here, and their run may hold no dense model."""
    (tmp_path / "a" / "eval").mkdir(parents=True)
    (tmp_path / "b" / "eval").mkdir(parents=True)
    run_of(tmp_path / "a", "full", {"niah": 0.97, "mmlu": 0.6})
    for name in ("cla", "wa_cpt"):
        content = result_file(f"model:{name}", {"niah": payload_of([0.6]), "mmlu": payload_of([0.4])})
        content["model"]["kind"] = name
        write_json(tmp_path / "b" / "eval" / f"model_{name}.json", content)
    tables = tables_of(merge([tmp_path / "a", tmp_path / "b"]), published)
    assert tables["PoD, Table 2: LLaMA3-8B-32K"][1] == [
        *("average", "cla", "32K", "64.8", "-33.1", "model:cla", "60.0", "-37.0")
    ]
    assert [row[1] for row in tables["PoD, Table 6: LLaMA3-8B-32K"]] == ["full", "cla"]
    names = ("model:wa_cpt", "model:window", "model:cla", "snapkv@25%", "window")
    assert [paper_name(name) for name in names] == ["wa+cpt", "wa+cpt", "cla", "snapkv", "window"]
    assert paper_name("razor[heads=me@home]@25%") == "razor[heads=me@home]"


def test_printed_drops_are_means_over_both_benchmarks(published):
    """PoD Table 5's "Perf" of nine methods follows from Table 1.

    PoD's own 2.8 does not (1.1): pod/eval/report/papers/README.md.
    """
    averages = {
        (row.method, row.benchmark): row.value
        for row in published
        if (row.paper, row.table, row.task) == ("pod", "1", "average")
    }
    printed = [row for row in published if row.task == "performance_drop"]
    for row in printed:
        pairs = [(averages[row.method, name], averages["full", name]) for name in ("longbench_14", "leval")]
        drop = 100 * relative_drop(pairs)
        assert drop == pytest.approx(row.value, abs=0.25) or (row.method, round(drop, 1)) == ("pod", 1.1)
    assert len(printed) == 10


def test_efficiency_of_pod_table_5(tmp_path, published):
    """The saving is that of the longest length, not of the best task.

    The drop needs both benchmarks whole.
    """
    (tmp_path / "eval").mkdir()
    groups = {"longbench": paper_tables._ENGLISH, "leval": CATEGORIES["leval"]}
    tasks = [f"pod_{suite}_{task}" for suite, found in groups.items() for of in found.values() for task in of]
    for method, score in (("full", 0.5), ("snapkv", 0.4)):
        run_of(tmp_path, method, dict.fromkeys(tasks, score))
    content = read_json(tmp_path / "eval" / "snapkv.json")
    for task, length, held in ((tasks[0], 4096, 5), (tasks[1], 32768, 25)):
        row = {"length": length, "bytes": held, "dense_bytes": 100, "budget_tokens": 9}
        content["parts"][task]["bytes"] = [row]
    content["parts"][tasks[2]] |= payload_of([0.2, 0.2])
    write_json(tmp_path / "eval" / "snapkv.json", content)
    rows = {row[0]: row for row in table_of(tmp_path, published)["PoD, Table 5: LLaMA3-8B-32K"]}
    assert rows["kv saving (%)"][3:7] == ["87.5", "–", "snapkv", "75.0"]
    group = next(found for found in paper_tables._ENGLISH.values() if tasks[2].endswith(found[-1]))
    expected = 100 * (
        0.5 * (1 - (4 * 0.4 + (0.4 * (len(group) - 1) + 0.2) / len(group)) / 5 / 0.5) + 0.5 * 0.2
    )
    assert rows["performance drop (%)"][6] == f"{expected:.1f}"
    run_of(tmp_path, "full", dict.fromkeys(tasks[1:], 0.5))
    assert "performance drop (%)" not in {
        row[0] for row in table_of(tmp_path, published)["PoD, Table 5: LLaMA3-8B-32K"]
    }


def test_leval_is_the_mean_of_its_three_categories(tmp_path, published):
    (tmp_path / "eval").mkdir()
    values = dict(zip(CATEGORIES["leval"], (0.3, 0.6, 0.0), strict=True))
    scores = {f"pod_leval_{task}": values[name] for name, of in CATEGORIES["leval"].items() for task in of}
    run_of(tmp_path, "full", scores)
    rows = table_of(tmp_path, published)["PoD, Table 1: LLaMA3-8B-32K"]
    assert [(row[0], row[6]) for row in rows] == [
        *(("closed", "30.0"), ("open qa", "60.0"), ("open summarization", "0.0"), ("average", "30.0"))
    ]
    comparison = merge([tmp_path])
    (tasks,) = comparison.columns().values()
    shown = {row[0].text: row[1].text for row in suite_table(comparison, tasks).rows[20:]}
    assert shown == {
        **{"closed": "30.0", "open qa": "60.0", "open summarization": "0.0"},
        **{"mean of the categories": "30.0", "mean of the tasks": f"{100 * (7 * 0.3 + 6 * 0.6) / 20:.1f}"},
    }


def test_averages_need_every_task(tmp_path, published):
    (tmp_path / "eval").mkdir()
    groups = paper_tables._MEMBERS["longbench_14"]
    scores = {
        f"pod_longbench_{task}": 0.1 * number
        for number, name in enumerate(list(groups)[:4])
        for task in groups[name]
    }
    scores |= {f"pod_longbench_{task}": 0.6 for task in groups["code"]}
    run_of(tmp_path, "full", scores)
    rows = table_of(tmp_path, published)["PoD, Table 1: LLaMA3-8B-32K"]
    assert [row[0] for row in rows] == [
        "single doc qa",
        "multi doc qa",
        "summarization",
        "few shot",
        "code",
        "average",
    ]
    assert [row[6] for row in rows] == [
        "0.0",
        "10.0",
        "20.0",
        "30.0",
        "60.0",
        "24.0",
    ]  # the mean of five categories
    del scores["pod_longbench_lcc"]
    run_of(tmp_path, "full", scores)
    rows = table_of(tmp_path, published)["PoD, Table 1: LLaMA3-8B-32K"]
    assert [row[0] for row in rows] == ["single doc qa", "multi doc qa", "summarization", "few shot"]


def test_consistency_by_window(tmp_path, published):
    (tmp_path / "eval").mkdir()
    part = payload_of([1.0, 1.0]) | {"metrics": {"window 1024": {"value": 0.8, "ci95": None}}}
    write_json(
        tmp_path / "eval" / "full.json",
        result_file("full", {"consistency": part}, EXTENDED),
    )
    rows = table_of(tmp_path, published)["PoD, Table 7: LLaMA3-8B-32K"]
    assert rows == [
        ["last 100 tokens (identical %)", "full", "window 1024", "83.6", "–", "full", "80.0", "–"]
    ]


def test_parts_of_a_group_count_and_the_user_may_name_the_model(tmp_path, published):
    (tmp_path / "eval").mkdir()
    part = payload_of([0.5, 0.5]) | {
        "subtasks": {"pod_ruler_4k_vt": {"metric": "m", "value": 0.9, "count": 2}}
    }
    write_json(tmp_path / "eval" / "full.json", result_file("full", {"pod_ruler_4k": part}, "runs/my_model"))
    assert table_of(tmp_path, published) == {}
    (title, rows), *_ = table_of(tmp_path, published, "Mistral-7B-Instruct-v0.2").items()
    assert title == "SimLayerKV, Table 3: Mistral-7B-Instruct" and rows == [
        ["vt", "full", "4K", "99.4", "–", "full", "90.0", "–"]
    ]


def test_wrong_files_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="has no CSV files with the columns paper, table"):
        load(tmp_path)
    file = tmp_path / "x.csv"
    file.write_text("paper,value\n")
    with pytest.raises(ValueError, match=r"x.csv must have the columns paper, .* it has paper, value"):
        load(tmp_path)
    file.write_text(",".join(paper_tables.COLUMNS) + "\npod,1,m,b,t,full,,score,4x\n")
    with pytest.raises(ValueError, match=r"x.csv, line 2: could not convert string to float: '4x'"):
        load(tmp_path)
    file.write_text(",".join(paper_tables.COLUMNS) + "\npod,1,m,b,t,full,,score,4\n")
    assert load(tmp_path) == [Published("pod", "1", "m", "b", "t", "full", "", "score", 4.0)]
