"""Scripts that compare speeds and batches: what they conclude from made-up figures, and runs at toy sizes."""

import argparse
import json

import pytest
import torch


def arguments(tmp_path, **more):
    return argparse.Namespace(tiny=True, out=tmp_path / "x.json", failed={}, budget=1000.0, **more)


def test_the_verdict_is_about_pod_the_others_are_stated(script):
    row_of = script("tokens_per_second").row_of

    def found(own, full, limit=1.34):
        row = {"tokens_per_second": {"median": own}, "byte_ceiling": limit, "note": None}
        row |= {"speed_over_full": {"median": own / full}, "share_of_ceiling": own / full / limit}
        return row | {"full_backend": {"backend": "y"}}

    row = row_of("x", "pod", found(15.4, 12.0), False)
    assert row["met"] is True and row["figure"] == pytest.approx(15.4 / 12 / 1.34) and "by y" in row["reason"]
    assert row_of("x", "pod", found(12.0, 10.0), False)["met"] is False
    assert row_of("x", "pod", found(15.4, 12.0), True)["met"] is None, "toy sizes"
    row = row_of("x", "int4", found(15.4, 12.0), False)
    assert row["met"] is None and row["figure"] == pytest.approx(15.4 / 12)
    row = row_of("x", "pod", {"error": "broke"}, False)
    assert row["figure"] is row["met"] is None and row["reason"] == "broke"


def test_tokens_per_second_tiny(script, tmp_path):
    module, given = script("tokens_per_second"), arguments(tmp_path, batch=2)
    given.failed = {"pod": "broke"}
    assert module.main(given) == 0
    found = json.loads(given.out.read_text())
    assert {"environment", "rows", "methods"} <= set(found) and found["batch"] == 2
    assert found["methods"]["pod"] == {"error": "broke"}
    assert [row["figure"] is None for row in found["rows"]] == [True, False, False, False]
    given.budget = -1.0
    assert module.main(given) == 0
    rows = json.loads(given.out.read_text())["rows"]
    assert all(row["figure"] is None for row in rows) and "had passed" in rows[1]["reason"]


def test_a_lost_device_names_the_method(script, monkeypatch):
    module, given = script("tokens_per_second"), argparse.Namespace(tiny=True, batch=1)
    recipe = module.recipe_of(given)
    bench = module.load(recipe, module.plan_bench(recipe), [torch.device("cpu")])

    def broken(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(module, "compare", broken)
    pod = recipe.bench.raced_methods[0]
    assert module.measure(bench, pod, 1, 192, None) == {"error": "RuntimeError: an illegal memory access"}
    monkeypatch.setattr(module, "is_lost", lambda device: True)
    with pytest.raises(module.DeviceLost) as lost:
        module.measure(bench, pod, 1, 192, None)
    assert lost.value.contestant == "pod"


def test_max_batch_tiny(script, tmp_path):
    module, given = script("max_batch"), arguments(tmp_path)
    given.failed = {"160 tokens": "broke"}
    assert module.main(given) == 0
    first, second = json.loads(given.out.read_text())["lengths"]
    assert first == {"tokens": 160, "error": "broke"}
    full, own = (second["methods"][name] for name in ("full", "pod"))
    for one in (full, own):
        peaks = {int(rows): size for rows, size in one["peak_bytes"].items()}
        assert max(peaks.values()) <= module._TINY_LIMIT and max(peaks) == one["batch"]
        assert str(one["batch"] + 1) in one["failed"] and int(one["fractional_batch"]) == one["batch"]
    assert second["theory"] == pytest.approx(1 / (1 - 6 / 16 * (256 - 64) / 256))
    assert second["ratio"] == pytest.approx(second["theory"], rel=0.05)
    assert second["whole_ratio"] == own["batch"] / full["batch"]
    row = module.row_of(second, 128, 128, False)
    assert row["met"] is (second["ratio"] / second["theory"] >= 0.97)
    assert module.row_of(first, 32, 128, False)["reason"] == "broke"
