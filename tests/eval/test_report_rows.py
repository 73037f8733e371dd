"""Several runs as rows and pairs: which go together, what is held against what.

Result files are made up (tests/eval/synthetic.py).
"""

import copy
from copy import deepcopy

import pytest
from synthetic import (
    ENVIRONMENT,
    choices,
    group,
    needles,
    payload,
    perplexity,
    result_file,
    speed_parts,
    write,
    write_runs,
)

from pod.eval.report import notes as report_notes
from pod.eval.report import report_tables
from pod.eval.report import speed as report_speed
from pod.eval.report.merge import byte_share, held_rows, merge
from pod.eval.statistics.comparison import compare, paired_samples


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def comparison(two_runs):
    return merge(two_runs)


# -- pairs ---------------------------------------------------------------------------------------------------


def test_mcnemar_counts_and_difference():
    own, base = payload([1, 1, 0, 0, 1, 0], "binary"), payload([1, 0, 1, 1, 1, 1], "binary")
    found = compare(own, base, "full")
    assert (found.gained, found.lost, found.common, found.relative) == (1, 3, 6, False)
    assert found.delta == pytest.approx(-2 / 6) and found.estimate.p == pytest.approx(2 * (1 + 4) / 16)


def test_commits_are_those_of_the_measurements(tmp_path):
    """Commits are those of the measurements.

    A later run that kept every part writes its own commit into the file. The parts say when they were
    measured.
    """
    old = {**ENVIRONMENT, "commit": "oldoldoldold", "date": "2026-11-01T00:00:00+00:00"}
    files = {
        name: result_file(name, {"a": {**payload([1.0, 0.0]), "environment": old}})
        for name in ("full", "snapkv")
    }
    comparison = merge([write(tmp_path / "same", **files)])
    assert "oldoldoldo" in report_notes.origin(comparison)[0]
    assert not any("versions of commit" in line for line in report_notes.warnings(comparison))
    new = {**ENVIRONMENT, "commit": "newnewnewnew+"}  # with files that no commit has
    files["snapkv"]["parts"]["a"]["environment"] = new
    comparison = merge([write(tmp_path / "mixed", **files)])
    assert "newnewnewn+" in report_notes.origin(comparison)[0]
    assert any("versions of commit: newnewnewn+, oldoldoldo" in x for x in report_notes.warnings(comparison))


def test_questions_about_one_text_count_as_what_their_texts_are_worth():
    own, base = payload([1, 1, 0, 0, 1, 1], "binary"), payload([1, 1, 1, 1, 1, 1], "binary")
    for part in (own, base):
        for number, sample in enumerate(part["samples"]):
            sample["cluster"] = f"text {number // 2}"
    found = compare(own, base, "full")
    assert (found.gained, found.lost) == (0, 2) and found.delta == pytest.approx(-1 / 3)
    for sample in own["samples"]:
        del sample["cluster"]
    apart = compare(own, base, "full").estimate
    assert found.estimate.low < apart.low and found.estimate.high > apart.high and found.estimate.p > 0.1


def test_only_samples_of_the_same_prompt_are_paired():
    own, base = payload([1.0, 0.5, 0.0, 0.2]), payload([0.0, 0.5, 1.0])
    own["samples"][0]["prompt_hash"] = "templated"
    pairs, left_out = paired_samples(own, base)
    assert [mine["id"] for mine, _ in pairs] == ["1", "2"] and left_out == {"another prompt": 1}
    found = compare(own, base, "full")
    assert found.delta == pytest.approx(-0.5) and (found.common, found.unpaired) == (2, 1)
    base["samples"][1]["prompt_hash"] = None  # not said
    assert compare(own, base, "full").common == 2


def test_perplexity_needs_the_same_scored_tokens():
    own, base = perplexity("pod", 3), perplexity("full", 3)
    whole = compare(own, base, "full")
    assert whole.relative and whole.common == 3 and whole.estimate.low <= whole.delta <= whole.estimate.high
    own["samples"][1]["tokens"] = 383
    part = compare(own, base, "full")
    assert part.common == 2 and part.left_out == {"another number of scored tokens": 1}


def test_groups_are_compared_as_the_mean_of_their_parts():
    own, base = group("pod-unadapted"), group("full")
    found = compare(own, base, "full")
    assert found.delta == pytest.approx(
        own["value"] - base["value"]
    )  # 12 and 18 samples: the plain mean would differ
    for part in (own, base):
        part["subtasks"]["history"]["weight"], part["subtasks"]["physics"]["weight"] = 0.4, 0.6
        part["value"] = sum(sample["score"] for sample in part["samples"]) / 30
    assert compare(own, base, "full").delta == pytest.approx(own["value"] - base["value"])


def test_nothing_in_common_is_no_comparison():
    other = payload([1.0])
    other["samples"][0]["id"] = "x"
    assert compare(payload([1.0]), other, "full") is None
    assert compare(payload([1.0]), payload([1.0], "binary"), "full") is None


# -- rows ----------------------------------------------------------------------------------------------------


def test_other_metrics_and_filters_are_not_compared():
    """Other metrics and filters are not compared.

    gsm8k by strict-match in one run, by flexible-extract in the other: the prompts are the same, the number
    is another.
    """
    strict, flexible = (payload([1, 0], settings={"filter": name}) for name in ("strict", "flexible"))
    assert compare(strict, strict, "full") is not None
    assert compare(strict, flexible, "full") is None
    assert compare(payload([1, 0]), payload([1, 0], metric="n"), "full") is None


def test_rows_of_two_runs(comparison):
    labels = [entry.label for entry in comparison.entries]
    assert labels == [
        *["full", "pod", "pod-unadapted", "streamingllm"],
        *["snapkv", "snapkv@12.5%", "snapkv@25%", "snapkv@50%", "razor"],
    ]
    budget = comparison.entries[5]
    base = comparison.base_of(budget, "niah")
    assert base.label == "full" and base.run is not budget.run  # the same dense model, from the other run
    assert comparison.against(budget, ("niah",)).common == 60


def test_tasks_of_one_method_from_two_runs_become_one_row(tmp_path):
    first = write(tmp_path / "a", full=result_file("full", {"niah": needles("full")}))
    second = write(tmp_path / "b", full=result_file("full", {"mmlu": choices("full")}))
    (row,) = merge([first, second]).entries
    assert row.label == "full" and list(row.parts) == ["niah", "mmlu"]
    assert [row.sources[task].label for task in row.parts] == ["a", "b"]


@pytest.mark.parametrize("change", ["task", "row", "old files"])
def test_what_does_not_go_together_stays_apart(tmp_path, change):
    first, second = (
        result_file("full", {"niah": needles("full")}),
        result_file("full", {"mmlu": choices("full")}),
    )
    if change == "task":
        second = result_file("full", {"niah": needles("full")})
    elif change == "row":  # another model, plan or option
        second["row"] = "another row"
    else:
        first["row"] = second["row"] = None
    runs = [write(tmp_path / "a", full=first), write(tmp_path / "b", full=second)]
    assert [row.label for row in merge(runs).entries] == ["full · a", "full · b"]


def test_options_in_a_name_are_another_method(tmp_path):
    """`h2o[window=64]` may be the same row as `h2o` with that option, under another name."""
    names = ["h2o", "h2o[window=64]"]
    files = [
        result_file(name, {task: payload([0.5])}) | {"row": "r"}
        for name, task in zip(names, "ab", strict=True)
    ]
    runs = [write(tmp_path / name, x=file) for name, file in zip(names, files, strict=True)]
    assert [row.label for row in merge(runs).entries] == names


def test_each_model_has_its_own_base(tmp_path):
    files = []
    for name, path in (("a", "some/model"), ("b", "another/model")):
        contents = {m: result_file(m, {"niah": needles(m)}, path) for m in ("full", "snapkv")}
        files.append(write(tmp_path / name, **contents))
    comparison = merge(files)
    bases = {row.label: comparison.base_of(row, "niah").label for row in comparison.entries}
    assert bases == {
        "full · a": "full · a",
        "full · b": "full · b",
        "snapkv · a": "full · a",
        "snapkv · b": "full · b",
    }
    alone = merge(
        [
            write(tmp_path / "c", snapkv=result_file("snapkv", {"niah": needles("snapkv")}, "third/model")),
            *files,
        ]
    )
    stranger = next(row for row in alone.entries if row.run.label == "c")
    assert alone.base_of(stranger, "niah") is None
    assert (
        "niah: snapkv · c cannot be compared, because no run measured full with the same model."
        in report_notes.warnings(alone)
    )


def test_the_base_is_of_the_same_run_where_there_is_one(tmp_path):
    contents = {m: result_file(m, {"niah": needles(m)}) for m in ("full", "snapkv")}
    comparison = merge([write(tmp_path / name, **contents) for name in ("a", "b")])
    bases = {row.label: comparison.base_of(row, "niah").label for row in comparison.entries}
    assert bases["snapkv · a"] == "full · a" and bases["snapkv · b"] == "full · b"
    assert comparison.against(comparison.entries[0], ("niah",)) is None  # full has no Δ to itself


def test_adapted_weights_are_held_against_dense_trained_on_the_same_tokens(tmp_path):
    files = {m: result_file(m, {"niah": needles(m)}) for m in ("full", "snapkv", "pod")}
    files["trained"] = result_file("model:dense_trained", {"niah": needles("full")})
    comparison = merge([write(tmp_path / "a", **files)])
    bases = {row.label: comparison.base_of(row, "niah").label for row in comparison.entries}
    assert bases == {
        "full": "full",
        "snapkv": "full",
        "pod": "model:dense_trained",
        "model:dense_trained": "full",
    }
    assert "Compared with the dense model trained on the same tokens, PoD " in report_notes.headline(
        comparison
    )
    notes = "\n".join(report_notes.overview_notes(comparison))
    assert "\npod: the change is against model:dense_trained" in notes
    rows = report_tables.task_table(comparison, "niah").rows
    assert ["to model:dense_trained" in row[2].small for row in rows] == [False, False, True, False]
    del files["trained"]
    assert "Compared with the dense model, PoD " in report_notes.headline(
        merge([write(tmp_path / "b", **files)])
    )


def test_a_task_that_dense_trained_lacks_is_held_against_full_and_says_so(tmp_path):
    files = {m: result_file(m, {"niah": needles(m), "mmlu": choices(m)}) for m in ("full", "pod")}
    files["trained"] = result_file("model:dense_trained", {"niah": needles("full")})
    comparison = merge([write(tmp_path, **files)])
    headline = report_notes.headline(comparison)
    assert "to model:dense_trained)" in headline and "to full)" in headline and "Compared" not in headline
    notes = "\n".join(report_notes.overview_notes(comparison))
    assert "\npod, niah: the change is against model:dense_trained" in notes


def test_the_headline_of_a_run_that_only_timed_methods(tmp_path):
    timed = speed_parts(["full", "pod"], 3000)
    files = {m: result_file(m, {"efficiency": timed[m]}) for m in timed}
    said = report_notes.headline(merge([write(tmp_path, **files)]))
    assert said.startswith("PoD keeps ") and said.endswith(
        "× the dense speed after 3,000 tokens. This report covers 2 methods."
    )


def test_the_headline_says_what_a_plan_is_for(tmp_path):
    """The headline says what a plan is for.

    It is faster after the longest prompt, or saves memory alone. It stands beside int4 where that and PoD
    under it were measured.
    """
    names = ["full", "int4", "pod", "pod+int4"]

    def said(name: str, speed: float, *left_out: str) -> str:
        known = speed_parts(["full", "pod"], 3000)
        timed = {method: deepcopy(known["full" if method == "full" else "pod"]) for method in names}
        for method, factor in zip(names, (10, 4, 6, 2), strict=True):
            timed[method]["lengths"][0]["bytes"] |= {"bytes": factor * 1000, "dense_bytes": 10_000}
        row = timed["pod"]["lengths"][0] | {"length": 8000}
        timed["pod"]["decoding"] = [row | {"speed_over_full": {"median": speed}}]
        kept = [method for method in names if method not in left_out]
        files = {m: result_file(m, {"efficiency": timed[m]}) for m in kept}
        return report_notes.headline(merge([write(tmp_path / name, **files)]))

    both = (
        "PoD keeps 60% of the dense KV cache at 3,000 tokens (20% with keys and values in 4 bits; "
        "int4 alone keeps 40%)"
    )
    assert said("a", 1.3).startswith(f"{both} and decodes at 1.30× the dense speed after 8,000 tokens. ")
    assert said("b", 0.6).startswith(
        f"{both}; it saves memory here, not time: it decodes at 0.60× the dense speed"
    )
    assert said("c", 1.3, "int4").startswith(
        "PoD keeps 60% of the dense KV cache at 3,000 tokens and decodes at 1.30×"
    )


def test_answers_that_end_early_are_held_against_a_dense_cache_of_their_length(tmp_path):
    part = choices("snapkv")
    row = {"length": 1024, "bytes": 50, "dense_bytes": 200, "pod_bytes": 120, "budget_tokens": 9}
    part["bytes"] = [
        row | {"held_tokens": 512},
        row | {"length": 512, "bytes": 30, "dense_bytes": 100, "held_tokens": 512},
    ]
    comparison = merge([write(tmp_path, snapkv=result_file("snapkv", {"t": part}))])
    (entry,) = comparison.entries
    assert byte_share(entry, "t") == pytest.approx((50 + 30) / (100 + 100))
    assert report_tables.common_length([entry]) == 512  # only there it reached the length
    assert report_tables.saving_of(report_tables.bytes_at(entry, 512)) == pytest.approx(0.7)


def test_bytes_that_are_known_are_filled_in(comparison):
    rows = {entry.label: entry for entry in comparison.entries}
    assert byte_share(rows["full"], "perplexity") == 1.0
    assert byte_share(rows["pod"], "perplexity") == pytest.approx(0.68, abs=1e-6)
    assert byte_share(rows["snapkv@25%"], "niah") == pytest.approx(0.26, abs=1e-6)
    unknown = copy.deepcopy(rows["snapkv"])
    unknown.parts["mmlu"]["bytes"] = [{"length": 512, "bytes": None, "dense_bytes": 99, "pod_bytes": 60}]
    assert byte_share(unknown, "mmlu") is None


def test_a_merged_row_keeps_its_speed(tmp_path):
    """A merged row keeps its speed.

    `full` of a run of tasks and of a run that only timed methods is one row, with the second run's tokens/s.
    """
    first = write(tmp_path / "a", full=result_file("full", {"niah": needles("full")}))
    timed = result_file("full", {"efficiency": speed_parts(["full"], 3000)["full"]})
    comparison = merge([first, write(tmp_path / "b", full=timed)])
    (row,) = report_tables.overview(comparison).rows
    assert [cell.text for cell in row[-2:]] == ["12.0", "1.00"]
    assert 3000 in {row["length"] for row in held_rows(comparison.entries[0])}
    again = merge(
        [first, tmp_path / "b", write(tmp_path / "c", full=result_file("full", {"niah": needles("full")}))]
    )
    assert [len(entry.speed) for entry in again.entries] == [1, 0]  # those of another run are not its own


def test_decoding_after_longer_prompts_has_its_table(tmp_path):
    timed = speed_parts(["full", "pod"], 3000)
    row = {"length": 8000, "decode_tokens_per_second": {"median": 5.0}, "bytes": 2_000_000}
    for method, speed, share in (("full", 1.0, 1.0), ("pod", 1.25, 0.55)):
        more = {"speed_over_full": {"median": speed}, "bytes_over_full": share}
        timed[method]["decoding"] = [row | more]
    table = report_speed.decoding_table(timed, "")
    assert [cell.text for cell in table.rows[1]] == ["pod", "8,000", "5.00", "1.25", "2.00", "55.0%"]
    assert report_speed.decoding_table(speed_parts(["full"], 3000), "").rows == []
