"""Several runs as one report: tables, sentences, files.

Result files are made up (tests/eval/synthetic.py).
"""

import csv
import io
import sys

import pytest
from synthetic import (
    LONGBENCH,
    group,
    needles,
    payload,
    perplexity,
    result_file,
    scores,
    speed_parts,
    write,
    write_runs,
)
from test_report import Page

from pod.commands import main as pod_command
from pod.eval.report import notes as report_notes
from pod.eval.report import report_pictures, report_tables
from pod.eval.report.merge import combined, merge
from pod.eval.report.names import suite_of
from pod.eval.report.page import Cell, Notes, Picture, Section, Table, render
from pod.eval.report.speed import speed_table
from pod.eval.report.write import csv_text, task_blocks, write_merged


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def comparison(two_runs):
    return merge(two_runs)


# -- tables and notes ----------------------------------------------------------------------------------------


def test_suites_and_groups(comparison):
    found = comparison.columns()
    assert list(found) == [
        *["perplexity", "niah", "mmlu_anatomy", "mmlu"],
        *["longbench (7 tasks)", "ruler 4k (5 tasks)", "tau_curve"],
    ]
    assert found["longbench (7 tasks)"] == tuple(f"pod_longbench_{task}" for task in LONGBENCH)
    assert suite_of("pod_ruler_16k_niah_single_1") == "pod_ruler_16k"
    assert suite_of("pod_infinitebench_128k_passkey") == "pod_infinitebench_128k"
    whole = (
        "pod_longbench",
        "pod_longbench_14",
        "pod_longbench_16_simlayerkv",
        "pod_longbench_e",
        "pod_ruler_4k",
        "niah",
    )
    assert [suite_of(name) for name in whole] == [None] * 6


def test_a_measured_group_is_a_column_of_its_own(tmp_path):
    parts = {name: scores("full", name, 4) for name in ("pod_longbench_qasper", "pod_longbench_trec")}
    parts["pod_longbench_single_doc_qa_en"] = group("full")
    found = merge([write(tmp_path, full=result_file("full", parts))]).columns()
    assert list(found.values()) == [
        ("pod_longbench_qasper", "pod_longbench_trec"),
        ("pod_longbench_single_doc_qa_en",),
    ]


def test_the_mean_of_a_suite_weighs_tasks_equally(comparison):
    tasks = tuple(f"pod_longbench_{task}" for task in LONGBENCH)
    pod = next(entry for entry in comparison.entries if entry.label == "pod")
    full = comparison.base_of(pod, tasks[0])
    mean = sum(pod.parts[task]["value"] for task in tasks) / 7
    assert combined(pod, tasks)["value"] == pytest.approx(mean)
    against = comparison.against(pod, tasks)  # gov_report has 27 samples, the others 30
    assert against.delta == pytest.approx(mean - sum(full.parts[task]["value"] for task in tasks) / 7)
    assert combined(comparison.entries[5], tasks) is None  # lacks narrativeqa
    mixed = comparison.against(
        pod, ("mmlu", "tau_curve")
    ).delta  # a group of two parts weighs as much as one task
    single = [comparison.against(pod, (task,)).delta for task in ("mmlu", "tau_curve")]
    assert mixed == pytest.approx(sum(single) / 2) and single[0] != single[1]


def test_warnings_say_what_cannot_be_compared(comparison):
    lines = "\n".join(report_notes.warnings(comparison))
    assert (
        "pod_longbench_trec: 30 of 30 samples had different prompts in different rows, which the report"
        in lines
    )
    assert "pod_longbench_trec: the runs differ in chat_template (run_a: False, run_b: True)." in lines
    assert (
        "pod_longbench_trec: snapkv@12.5%, snapkv@25%, snapkv@50% cannot be compared with full, "
        "because no sample has the same prompt." in lines
    )
    assert (
        "pod_longbench_gov_report: snapkv@12.5%, snapkv@25%, snapkv@50% and full are compared on the 27 "
        "samples that both have; "
        "3 are left out." in lines
    )
    assert "qasper" not in lines and "niah" not in lines


def test_partly_shared_samples_are_said(tmp_path):
    less = scores("snapkv", "qasper", 12)
    contents = {
        "full": result_file("full", {"t": scores("full", "qasper", 10)}),
        "snapkv": result_file("snapkv", {"t": less}),
    }
    lines = report_notes.warnings(merge([write(tmp_path, **contents)]))
    assert lines == ["t: snapkv and full are compared on the 10 samples that both have; 2 are left out."]


def test_settings_of_methods_are_no_difference_of_runs(tmp_path):
    contents = {}
    for method, fed in (("full", "chunks"), ("snapkv", "single tokens")):
        part = scores(method, "qasper", 5)
        part["settings"] |= {"fed": fed}
        contents[method] = result_file(method, {"t": part})
    other = scores("snapkv@25%", "qasper", 5)
    other["settings"] |= {"fed": "single tokens", "limit": 6}
    second = write(tmp_path / "b", other=result_file("snapkv@25%", {"t": other}))
    comparison = merge([write(tmp_path / "a", **contents), second])
    assert report_notes.differing_settings(comparison, "t") == ["limit (a: 5, b: 6)"]


def test_more_tasks_than_the_overview_shows_are_named(tmp_path):
    parts = {f"task {number}": payload([0.5, 0.6]) for number in range(14)}
    comparison = merge([write(tmp_path, full=result_file("full", parts))])
    assert report_tables.overview(comparison).columns[-1] == "task 11"
    assert "2 more tasks below: task 12, task 13." in report_notes.overview_notes(comparison)


def test_skipped_refused_and_failed_are_counted(comparison):
    skipped = report_notes.sentences("skipped", entries=comparison.entries)
    assert (
        "pod, pod_longbench_gov_report: 3 samples of 30 were skipped: longer than the model reads" in skipped
    )
    assert "razor, tau_curve: not run: razor has no gate: only PoD methods skip distant tokens" in skipped
    assert report_notes.sentences("failed", entries=comparison.entries) == [
        "streamingllm: mmlu: out of memory"
    ]
    assert "9 methods on 17 tasks" in report_notes.headline(comparison)
    rows = {row[0].text: row for row in report_tables.overview(comparison).rows}
    at = report_tables.overview(comparison).columns.index
    assert rows["streamingllm"][at("mmlu")] == Cell("failed", tone="failed")
    assert rows["razor"][at("tau_curve")].text == "not run"


def test_what_methods_decided_is_said(tmp_path):
    """The report says what methods decided.

    SimLayerKV's lazy layers (Figure 2) and D2O's variances (Figure 4), means over the samples of a task.
    """
    said = {
        "simlayerkv": {"lazy": [0.0, 1.0, 0.5, 0.5]},
        "d2o": {"tokens": [1500.0, 20.0], "variance": [None, 0.001234]},
        "full": {},
    }
    files = {name: result_file(name, {"t": payload([0.5]) | {"decisions": of}}) for name, of in said.items()}
    files["h2o"] = result_file("h2o", {"t": payload([0.5]) | {"decisions": {"lazy": [1.0, 1.0]}}})
    entries = merge([write(tmp_path, **files)]).entries
    lines = [line for line in report_notes.sentences("scoring", entries=entries) if ", t: " in line]
    assert lines == [
        "h2o, t: 100% of the layers were lazy, so they kept a window only; "
        "share of samples with a lazy layer, by layer: 1.00 1.00.",
        "d2o, t: mean tokens kept per KV head, by layer: 1,500 20; attention "
        "variances that set them: 0.00123.",
        "simlayerkv, t: 50% of the layers were lazy, so they kept a window only (layer ratio 2.00); "
        "share of samples with a lazy layer, by layer: 0.00 1.00 0.50 0.50.",
    ]


def test_files_of_another_schema_are_named(tmp_path):
    old = result_file("h2o", {"niah": needles("h2o")}) | {"schema": 1}
    speeds = result_file("efficiency", {"efficiency": {"methods": {}}})
    folder = write(tmp_path, full=result_file("full", {"niah": needles("full")}), h2o=old, efficiency=speeds)
    lines = report_notes.warnings(merge([folder]))
    assert lines == [
        f"{tmp_path.name}: {name}.json comes from an older version (schema {schema}): run `pod eval` again"
        for name, schema in (("efficiency", 2), ("h2o", 1))
    ]


def test_tones_and_csv_follow_the_verdicts_of_the_page(comparison):
    marks = {}
    for entry in comparison.entries:
        for task in entry.parts:
            against = comparison.against(entry, (task,))
            marks[entry.label, task] = "" if against is None else against.mark
    assert {"worse", ""} <= set(marks.values())
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert {(row["row"], row["task"]): row["mark"] for row in rows if row["status"] == "measured"} == marks
    for task in comparison.tasks:
        entries = comparison.measured(task)
        table = report_tables.task_table(comparison, task) if entries else None
        tones = [row[2].tone for row in table.rows] if table else []
        assert tones == [marks[entry.label, task] for entry in entries]


def test_small_numbers_are_said_to_be_small():
    assert [report_tables.percent(x, "+") for x in (0.123, -0.00042, 7.6e-05, 7.6e-06, -1e-9, 0.0, -0.0)] == [
        *("+12.3%", "-0.04%", "+0.01%", "+<0.01%", "-<0.01%", "+0.0%", "+0.0%")
    ]
    assert [report_tables.p_text(x) for x in (7.6e-05, 0.0123, 1)] == ["p < 0.001", "p = 0.012", "p = 1"]


def test_a_column_has_one_unit():
    rows = [
        {"tau": 0.5, "nats": 0.5, "nll": 21.5, "change": 7.6e-05, "saved": 0.413, "n": 12, "low": -12.0},
        {"tau": 0.9, "nats": 0.25, "nll": 0.25, "change": -0.031, "saved": 0.0, "n": 3000, "low": 7.6e-05},
    ]
    table = report_tables.plain_table(rows, {key: key for key in rows[0]}, "t")
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0.5", "0.5000", "21.50", "0.01%", "41.3%", "12", "-12.00"],
        ["0.9", "0.2500", "0.25", "-3.1%", "0.0%", "3,000", "<0.01"],
    ]


def test_metrics_of_all_rows_share_a_unit(tmp_path):
    parts = [
        payload([0.5])
        | {
            "metrics": {
                "m": {"value": value},
                "share": {"value": share},
                "raw": {"value": share, "percent": False},
            }
        }
        for value, share in ((0.5, 0.25), (2.0, 7e-6))
    ]
    files = {name: result_file(name, {"t": part}) for name, part in zip(("full", "h2o"), parts, strict=True)}
    comparison = merge([write(tmp_path, **files)])
    rows = report_tables.task_table(comparison, "t").rows
    assert [[cell.text for cell in row[-3:]] for row in rows] == [
        ["0.50", "25.0", "0.2500"],
        ["2.00", "<0.01", "<0.0001"],
    ]


def test_the_headline_says_what_the_judge_says(comparison, tmp_path):
    pod = next(entry for entry in comparison.entries if entry.label == "pod")
    before = "Compared with the dense model, PoD "
    verdicts = report_notes.headline(comparison).partition(before)[2].partition(". ")[0]
    said = dict.fromkeys(("is worse on", "shows no clear difference (too few samples to tell) on"), "")
    for piece in verdicts.split("; "):
        said[next(words for words in said if piece.startswith(words))] = piece
    assert len(said) == 2
    for title, tasks in comparison.columns().items():
        mark = comparison.against(pod, tasks).mark
        words = {"worse": "is worse on", "": "shows no clear difference (too few samples to tell) on"}[mark]
        assert f" {title} " in said[words]
    alone = merge([write(tmp_path, pod=result_file("pod", {"t": payload([0.5, 0.6])}))])
    assert report_notes.headline(alone).startswith("PoD has no dense result beside it on t 55.0. ")


def test_bars_are_shares_of_the_largest():
    rows = speed_table(speed_parts(["full", "h2o"])).rows
    bars = [[cell.shade.split()[2] for cell in row if cell.shade] for row in rows]
    assert bars == [["88.7%,", "100.0%,"], ["100.0%,", "68.0%,"]]


def test_verdicts_are_words_and_arrows_are_none(comparison):
    """Verdicts are words, and arrows are none.

    A rise of perplexity is worse. Colour alone does not say it, and no arrow points another way than the
    number.
    """
    table = report_tables.task_table(comparison, "perplexity")
    worse = next(row[2] for row in table.rows if row[2].tone == "worse")
    assert worse.text.startswith("+") and worse.text.endswith("% worse")
    page = ("t", "l", [], [Section("s", [table])])
    assert f'<span class="worse">{worse.text}</span>' in render("html", *page)
    assert f"| {worse.text} [" in render("md", *page)


def test_positions_are_rows_where_all_methods_have_the_same(tmp_path):
    files = {name: result_file(name, {"perplexity": perplexity(name)}) for name in ("full", "h2o")}
    table, *_ = report_tables.part_table(merge([write(tmp_path / "a", **files)]), "perplexity")
    assert [row[0].text for row in table.rows] == ["384–511", "896–1,023", "1,920–2,047"]
    bucket = files["h2o"]["parts"]["perplexity"]["buckets"][1]
    assert table.rows[1][2].text == f"{bucket['perplexity']:.2f}"
    bucket["first"] -= 1
    assert not report_tables.part_table(merge([write(tmp_path / "b", **files)]), "perplexity")


def test_heat_map_cells(comparison):
    maps = report_tables.heat_maps(comparison, "niah")
    assert (
        len(maps) == 9
        and maps[0].columns == ["depth", "1,024", "2,048", "4,096", "8,192"]
        and [row[0].text for row in maps[0].rows] == ["0%", "25%", "50%", "75%", "100%"]
    )
    stream = next(found for found in maps if found.title == "streamingllm")
    part = next(entry for entry in comparison.entries if entry.label == "streamingllm").parts["niah"]
    for cell in part["cells"]:
        row, column = (
            [0.0, 0.25, 0.5, 0.75, 1.0].index(cell["depth"]),
            [1024, 2048, 4096, 8192].index(cell["length"]),
        )
        found = stream.rows[row][column + 1]
        assert (found.sort, found.text) == (cell["value"], f"{100 * cell['value']:.0f}")
        assert found.shade == {0.0: "#f2b8b0", 1.0: "#a9d9bd"}.get(cell["value"], found.shade)
    shares = [[cell.sort for cell in row[1:]] for row in stream.rows]
    assert shares != shares[::-1]  # or a map that stands on its head would pass


def test_the_best_measured_values_by_growing_bytes():
    points = [
        {"label": name, "share": share, "value": value}
        for name, share, value in [
            ("a", 1.0, 50),
            ("b", 0.5, 49),
            ("c", 0.6, 48),
            ("d", 0.2, 30),
            ("e", 0.5, 40),
        ]
    ]
    assert [point["label"] for point in report_pictures.best_so_far(points, True)] == ["d", "b", "a"]
    assert [point["label"] for point in report_pictures.best_so_far(points, False)] == ["d"]


def test_payloads_may_bring_curves(comparison):
    titles = [block.title for block in task_blocks(comparison, "tau_curve") if getattr(block, "title", "")]
    assert "Score by gate threshold" in titles
    table = report_tables.plain_table([{"a": 1, "b": None}], {"a": "batch", "b": "share"}, "t")
    assert table.columns == ["batch", "share"] and [cell.text for cell in table.rows[0]] == ["1", "–"]


# -- files ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_merged_report_is_one_whole_page(two_runs, tmp_path):
    text = write_merged(two_runs, tmp_path / "out").read_text()
    page = Page(text)
    assert not page.open and all(source.startswith("data:image/") for source in page.sources)
    assert page.titles[0] == "Methods side by side" and "Read with care" in page.titles
    assert "SimLayerKV, Table 1: LLaMA3-8B-Instruct" in text
    assert "▲" not in text and "▼" not in text
    assert (tmp_path / "out" / "report.md").read_text().count("\n## ") == len(page.titles)
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    assert (
        len(rows) == 6 * 16 + 6 - 1 + 3 * 7 + 1
    )  # six methods, tau_curve, one failed, three budgets, one refused


def test_csv_has_what_the_page_says(comparison):
    rows = {(row["row"], row["task"]): row for row in csv.DictReader(io.StringIO(csv_text(comparison)))}
    snap = rows["snapkv@25%", "niah"]
    assert snap["base"] == "full" and float(snap["byte_share"]) == pytest.approx(0.26, abs=1e-6)
    assert float(snap["delta"]) == pytest.approx((int(snap["gained"]) - int(snap["lost"])) / 60)
    assert snap["runs"] == "run_b" and snap["delta_kind"] == "difference" and snap["budget_tokens"] == "2129"
    assert rows["streamingllm", "mmlu"]["reason"] == "out of memory"
    assert rows["razor", "tau_curve"]["status"] == "not run"


def test_command_line(two_runs, tmp_path, capsys, monkeypatch):
    out = str(tmp_path / "r")
    monkeypatch.setattr("pod.eval.report.write.write_merged", lambda *arguments: arguments)
    monkeypatch.setattr(
        sys, "argv", ["pod", "report", str(two_runs[0]), "--out", out, "--model", "LLaMA3-8B"]
    )
    pod_command()
    assert "LLaMA3-8B" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["pod", "report", str(tmp_path), "--out", out])
    with pytest.raises(SystemExit) as end:
        pod_command()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path} has no evaluation results: run `pod eval` first\n"


def test_page_escapes_and_sorts():
    table = Table(
        ["a_b", "n"], [[Cell("<i>"), Cell("1", sort=1.0)], [Cell("x|y"), Cell("–")], [Cell("z"), Cell("2")]]
    )
    page = ("t", "<lead>", ["o"], [Section("s", [table, Notes(["n & m"])]), Section("empty", [])])
    text, markdown = render("html", *page), render("md", *page)
    assert (
        "&lt;i&gt;" in text
        and "&lt;lead&gt;" in text
        and "n &amp; m" in text
        and "empty" not in text + markdown
    )
    assert 'data-sort="1"' in text and 'class="matrix sort"' in text and "| x\\|y | – |" in markdown
    Page(text)


def test_markdown_line_by_line():
    table = Table(["m", "v"], [[Cell("x|y"), Cell("1", "+1 worse\n[0, 2]")]], "T")
    fold = Section("F", [Table(["d"], [[Cell("z")]])])
    blocks = [table, Notes(["n & m", "o"]), Picture("<svg>", "p"), fold]
    assert render("md", "t", "<lead>", ["o1", "o2"], [Section("s", blocks), Section("r", [table])]) == (
        "# t\n\n<lead>\n\no1\n\no2\n\n## s\n\n### T\n\n| m | v |\n|---|---|\n| x\\|y | 1 +1 worse [0, 2] |\n"
        "\n* n & m\n* o\n\n### F\n\n| d |\n|---|\n| z |\n\n## r\n\n### T\n\n| m | v |\n|---|---|\n"
        "| x\\|y | 1 +1 worse [0, 2] |\n"
    )
