"""The report out of hand-made result files.

The cells have the right numbers, the page is one and self-contained, and failures are shown.
"""

import base64
import copy
import json
import math
import re
from html.parser import HTMLParser

import pytest

from pod.eval.report.merge import merge
from pod.eval.report.notes import overview_notes
from pod.eval.report.report_pictures import training_curve
from pod.eval.report.report_tables import overview, part_table
from pod.eval.report.speed import speed_table
from pod.eval.report.write import write_report
from pod.measure.machine import environment
from pod.recipe import Recipe

NAMES = ["full", "pod", "snapkv"]


def passkey_part():
    """3 of 4 keys found."""
    passkey = {
        "kind": "binary",
        "metric": "accuracy",
        "higher_is_better": True,
        "value": 0.75,
        "ci95": [0.3, 0.95],
        "samples": [
            {"id": f"80/{i // 2}/{i % 2}", "score": float(i < 3), "prompt_hash": f"key {i}"} for i in range(4)
        ],
        "skipped": [],
        "bytes": [],
        "settings": {},
    }
    passkey["cells"] = [{"length": 80, "depth": depth, "value": 0.5, "count": 2} for depth in (0.0, 1.0)]
    return passkey


def method_file(name, nll, held):
    """Two sequences in one bucket of 4 tokens with mean NLL `nll` and `nll + 1`; 3 of 4 keys found."""
    sums = [4 * nll, 4 * (nll + 1)]
    stated = {
        "length": 99,
        "budget_tokens": 60 if name == "snapkv" else None,
        "bytes": held,
        "dense_bytes": 2000,
    }
    stated |= {"pod_bytes": 1200, "bytes_over_pod": held / 1200, "saving": 1 - held / 2000}
    bucket = {
        "start": 50,
        "end": 100,
        "first": 96,
        "perplexity": math.exp(nll + 0.5),
        "ci95": [1.0, 90.0],
        "bytes": stated,
    }
    total = {"perplexity": math.exp(nll + 0.5), "ci95": [1.0, 90.0], "sequences": 2, "tokens": 8}
    perplexity = {
        "kind": "nll",
        "metric": "perplexity",
        "higher_is_better": False,
        "value": total["perplexity"],
        "ci95": total["ci95"],
        "scored_by": "one forward pass",
        "decode_path_check": None,
        "buckets": [bucket],
        "total": total,
        "samples": [
            {"id": str(i), "score": value, "tokens": 4, "buckets": [value], "prompt_hash": f"text {i}"}
            for i, value in enumerate(sums)
        ],
        "skipped": [],
        "bytes": [stated],
        "settings": {},
    }
    return {
        "schema": 2,
        "method": name,
        "title": f"what {name} is",
        "status": "finished",
        "seed": 0,
        "config": {},
        "model": {"path": "some/model", "dtype": "float32"},
        "environment": environment(),
        "parts": {"perplexity": perplexity, "passkey": passkey_part()},
    }


def speed_parts():
    """The part `efficiency` of every method."""
    parts = {}
    for name, rate in zip(NAMES, (10.0, 12.5, 9.0), strict=True):
        spread = {"median": rate, "min": rate - 1, "max": rate + 1, "repeats": 3}
        row = {
            "length": 90,
            "decode_tokens_per_second": spread,
            "speed_over_full": {**spread, "median": rate / 10},
            "time_to_first_token_seconds": 0.5,
            "bytes": {
                "length": 90,
                "budget_tokens": None,
                "bytes": 1000,
                "dense_bytes": 2000,
                "saving": 0.5,
                "bytes_over_pod": 1.0,
            },
            "bytes_by_part": {"keys": 400, "values": 599, "bookkeeping": 1},
        }
        parts[name] = {"lengths": [row], "max_batch": [], "environment": environment() | {"date": "now"}}
    return parts


@pytest.fixture
def recipe(tmp_path):
    recipe = Recipe(output_dir=str(tmp_path))
    recipe.eval.methods = list(NAMES)
    recipe.eval_dir.mkdir()
    contents = {
        "full": method_file("full", 2.0, 2000),
        "pod": method_file("pod", 2.1, 1200),
        "snapkv": method_file("snapkv", 3.0, 1190),
    }
    for name, part in speed_parts().items():
        content = contents[name]
        content["parts"]["efficiency"] = part
        (recipe.eval_dir / f"{name}.json").write_text(json.dumps(content))
    return recipe


def cells(table):
    """Text and small text of every cell, below the heads."""
    return [[f"{cell.text} {cell.small}".split() for cell in row] for row in table.rows]


def test_overview_cells(recipe):
    table = overview(merge([recipe.eval_dir]))
    assert table.columns == ["method", "KV MB", "saved", "perplexity", "passkey", "tokens/s", "× full"]
    assert [row[0].text for row in table.rows] == NAMES and table.ours == {1}
    full, ours, snap = cells(table)
    assert full[3] == [f"{math.exp(2.5):.2f}", "[1.00,", "90.00]"]
    assert ours[3] == [
        f"{math.exp(2.6):.2f}",
        "+10.5%",
        "worse",
        "[+10.5%,",
        "+10.5%]",
    ]  # exp(0.1) - 1 for every sequence
    assert snap[3][1] == "+171.8%"
    assert [row[4][0] for row in (full, ours)] == ["75.0", "75.0"] and ours[4][1] == "+0.0"
    assert ours[1:3] == [["0.0"], ["40%"]] and snap[1] == ["0.0", "60", "tokens"]
    assert ours[5:] == [["12.5"], ["1.25"]]
    assert [row[3].tone for row in table.rows] == ["", "worse", "worse"]


def test_rows_as_texts_for_the_demo(recipe):
    rows = overview(merge([recipe.eval_dir])).texts()
    assert [row["method"] for row in rows] == NAMES and rows[2]["KV MB"] == "0.0 60 tokens"
    assert rows[1]["perplexity"] == f"{math.exp(2.6):.2f} +10.5% worse [+10.5%, +10.5%]"
    assert (rows[1]["saved"], rows[1]["tokens/s"], rows[1]["× full"]) == ("40%", "12.5", "1.25")


def test_other_tables(recipe):
    (table,) = part_table(merge([recipe.eval_dir]), "perplexity")
    assert table.columns == ["part", *NAMES] and cells(table)[0][0] == ["96–99"]
    assert cells(table)[0][2] == [f"{math.exp(2.6):.2f}", "+10.5%", "worse", "[+10.5%,", "+10.5%]"]
    speed = speed_table(merge([recipe.eval_dir]).runs[0].speed)
    assert cells(speed)[1] == [
        ["pod"],
        ["90"],
        ["12.5", "(11.5–13.5)"],
        ["1.25"],
        ["0.50"],
        ["0.001"],
        ["100.0%"],
        *(["0.000"], ["0.001"], ["0.000"]),
    ]
    assert speed.columns[-3:] == ["keys, MB", "values, MB", "bookkeeping, MB"]
    assert [row[-2].sort for row in speed.rows] == [599 / 1e6] * 3
    assert "80.0%" in speed.rows[0][2].shade and "100.0%" in speed.rows[1][2].shade


def test_notes_state_budgets_and_lengths(recipe):
    notes = " ".join(overview_notes(merge([recipe.eval_dir])))
    assert "snapkv 60" in notes and "of 99 tokens" in notes and "after 90 tokens" in notes
    assert "No method saves memory" not in notes


class Page(HTMLParser):
    """Collects tags, checks that they close, and keeps what images and links refer to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.titles, self.ids, self.anchors = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        links = [attributes[key] for key in ("src", "href") if key in attributes]
        self.sources += [link for link in links if not link.startswith("#")]
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.anchors += [link[1:] for link in links if link.startswith("#")]
        if tag == "img":
            assert attributes["alt"]
        if tag not in ("img", "meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def test_page_is_whole_and_self_contained(recipe):
    recipe.plan_dir.mkdir()
    (recipe.plan_dir / "heads.png").write_bytes(b"\x89PNG picture")
    recipe.train_dir.mkdir()
    lines = [json.dumps({"step": step, "loss": 3 - step / 10}) for step in range(5)]
    (recipe.train_dir / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    text = write_report(recipe).read_text()
    page = Page(text)
    assert not page.open
    assert page.titles[0] == "Methods side by side" and {"Adaptation", "passkey"} <= set(page.titles)
    assert page.sources and all(source.startswith("data:image/") for source in page.sources)
    assert any(base64.b64decode(source.split(",")[1]) == b"\x89PNG picture" for source in page.sources)
    assert set(page.anchors) <= set(page.ids) and len(page.anchors) > 3
    assert not re.search(r"<script[^>]+src|@import|url\(|<link|https?://(?!www.w3.org)", text)
    assert 'name="viewport"' in text
    markdown = (recipe.eval_dir / "report.md").read_text()
    assert (
        f"| pod | 0.0 | 40% | {math.exp(2.6):.2f} +10.5% worse [" in markdown
        and "PoD keeps 60% of the dense KV cache at 99 tokens and decodes at 1.25× the "
        "dense speed after 90 tokens. "
        "Compared with the dense model, PoD "
        in markdown
        and "perplexity 13.46 (+10.5%)" in markdown
    )


def test_failed_method_is_shown_and_escaped(recipe):
    failed = method_file("snapkv", 1.0, 1)
    failed |= {"status": "failed", "parts": {}}
    failed["failed"] = {"perplexity": "<b> & 'x'"}
    (recipe.eval_dir / "snapkv.json").write_text(json.dumps(failed))
    text = write_report(recipe).read_text()
    assert "&lt;b&gt; &amp; &#39;x&#39;" in text and '<span class="failed">failed</span>' in text
    assert "* snapkv: perplexity: <b>" in (recipe.eval_dir / "report.md").read_text()


def test_a_missing_part_leaves_dashes(recipe):
    content = copy.deepcopy(method_file("pod", 2.1, 1200))
    del content["parts"]["passkey"]
    (recipe.eval_dir / "pod.json").write_text(json.dumps(content))
    for name in ("full", "snapkv"):
        other = json.loads((recipe.eval_dir / f"{name}.json").read_text())
        del other["parts"]["efficiency"]
        (recipe.eval_dir / f"{name}.json").write_text(json.dumps(other))
    table = overview(merge([recipe.eval_dir]))
    assert table.columns[-1] == "passkey" and table.rows[1][-1].text == "–"
    assert write_report(recipe).is_file()


def test_report_without_results_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="has no evaluation results: run `pod eval`"):
        write_report(Recipe(output_dir=str(tmp_path)))


def test_training_curve_needs_two_points(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"note": 1}\n')
    assert training_curve(tmp_path / "metrics.jsonl") is None
