"""The rows of benchmarks/plans_by_bytes.py: what they are called, and how many bytes they hold."""

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import pod
from pod.files import read_json, write_json
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.training.checkpoint.run_identity import plan_sha256

LAYERS, HEADS, HEAD_DIM, LENGTH = 4, 3, 32, 600


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=61, hidden_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, intermediate_size=64, max_position_embeddings=1024,
        num_sink_tokens=0, num_recent_tokens=8, attention_backend="reference",
    )  # fmt: skip
    return pod.PodForCausalLM(config).bfloat16().eval()


def test_every_row_of_a_case_has_its_own_name_and_files(script):
    plans = script("plans_by_bytes")
    for case in plans.CASES.values():
        names = [row.name for row in plans.rows(case)]
        kept = {script("judge_plans").kept_at(case.folder, name) for name in names}
        files = [
            plans.plan_file(case, kind, share) for kind, shares in case.plans.items() for share in shares
        ]
        assert len(set(names)) == len(kept) == len(names)
        assert len(set(files)) == len(files)


@pytest.mark.parametrize("method", ["razor", "razor+int4", "razor+int4 packed", "h2o", "snapkv+int4"])
def test_a_row_holds_its_share_of_the_bytes(script, model, method, tmp_path, monkeypatch):
    plans = script("plans_by_bytes")
    scores = torch.rand(LAYERS, HEADS).tolist()
    heads = tmp_path / "heads.json"
    RetrievalHeads(echo=scores, induction=scores, num_key_value_heads=HEADS).save(heads)
    monkeypatch.setattr(plans, "retrieval_heads", lambda case: heads)
    sizes = replace(plans.Sizes(), length=LENGTH)
    case = plans.Case("tiny", pairs=(LAYERS, HEADS), window=160, plans={}, methods={}, sizes=sizes)
    share = 0.4
    row = plans.method_row(case, method, share)
    budget = None if row.share is None else round(row.share * LENGTH)
    cache = pod.make_cache(model, row.spec, budget=budget, **row.options)
    with torch.no_grad():
        model(torch.randint(61, (1, LENGTH)), past_key_values=cache, use_cache=True)
    dense = 2 * LAYERS * HEADS * HEAD_DIM * LENGTH * 2
    # whole heads stay in razor; other methods have a budget in tokens, and rings with some free slots
    step = 0.04
    if method.startswith("razor"):
        step = (0.5 if "int4" in method else 1) / (LAYERS * HEADS)
    assert row.options.get("residual") == (32 if method.endswith("packed") else None)
    assert cache.nbytes / dense == pytest.approx(share, abs=step)


def test_lines_of_a_picture(script):
    """What differs in its windows or its weight has a line of its own."""
    kind_of = script("plans_by_bytes").kind_of
    weighs = "plan, retrieval weighs 16"
    expected = {
        "dense": None,
        "plan 12.5": "plan",
        "plan stored 20": "plan, stored first tokens",
        "plan retrieval_16 20": f"{weighs}, windows in 16 bits",
        "plan packed_16 20": weighs,
        "plan costs_0.5 20": "plan, retrieval weighs 0.5",
        "adapted packed_16_12.5-long-distilled": f"{weighs}, distilled",
        "adapted retrieval_16_20-long-distilled": f"{weighs}, windows in 16 bits, distilled",
        "adapted retrieval_16_20-slow-distilled": None,
        "adapted 33-slow-distilled": None,
        "razor+int4 20": "razor+int4",
        "razor+int4 packed 20": "razor+int4, packed windows",
        "int4": "int4",
    }
    assert {name: kind_of(name) for name in expected} == expected


@pytest.mark.parametrize("windows", [None, [100, None, 700, None]])
def test_dense_bytes_are_those_of_a_cache_of_the_model(script, model, windows):
    """Layers that were trained with windows hold these, or all tokens where they are fewer."""
    judge = script("judge_plans")
    if windows is not None:
        lead = [[layer if own is None else None] * HEADS for layer, own in enumerate(windows)]
        config = pod.PodConfig.from_dict(model.config.to_dict() | {"layer_windows": windows, "lead": lead})
        model = pod.PodForCausalLM(config).bfloat16().eval()
    bench = SimpleNamespace(model=lambda row: model, sizes=judge.Sizes(length=LENGTH), dtype=torch.bfloat16)
    cache = pod.make_cache(model, "pod")
    with torch.no_grad():
        model(torch.randint(61, (1, LENGTH - 1)), past_key_values=cache, use_cache=True)
    dense = judge.Bench.dense_bytes(bench, judge.Row("dense", "full"))
    per_token = 2 * HEADS * HEAD_DIM * 2
    assert dense == per_token * (4 * (LENGTH - 1) if windows is None else 100 + 3 * (LENGTH - 1))
    assert cache.nbytes / dense == pytest.approx(1, abs=0.05)


def test_a_plan_that_was_made_anew_loses_its_old_figures(script, tmp_path, monkeypatch, capsys):
    plans, kept_at = script("plans_by_bytes"), script("judge_plans").kept_at
    monkeypatch.setattr(plans, "WORK", tmp_path)
    case = plans.Case(
        "tiny", (1, 2), window=48, plans={"constant": (0.2, 0.5)}, methods={}, sizes=plans.Sizes()
    )
    (case.folder / "plans").mkdir(parents=True)
    for share, lead in ((0.2, [[0, None]]), (0.5, [[0, 0]])):
        SharingPlan(lead=lead).save(plans.plan_file(case, "constant", share))
    made = plan_sha256(SharingPlan(lead=[[0, 0]]))
    rows = [{"name": name, "plan": {"sha256": made}} for name in ("plan 20", "plan 50")]
    monkeypatch.setattr(plans, "RESULT", tmp_path / "result.json")
    write_json(plans.RESULT, {"cases": {case.name: {"sizes": plans.sizes_of(case), "rows": rows}}})
    plans.restore(case)
    assert not kept_at(case.folder / "rows", "plan 20").is_file()
    assert read_json(kept_at(case.folder / "rows", "plan 50")) == rows[1]
    SharingPlan(lead=[[0, 0]], residual=32).save(plans.plan_file(case, "constant", 0.5))
    plans.restore(case)
    assert not kept_at(case.folder / "rows", "plan 50").is_file(), "old rows have a residual of 128"
    assert "plan 20: the plan was made anew" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="of other sizes"):
        plans.restore(replace(case, window=64))


def test_a_plan_of_other_costs_is_made_anew(script):
    plans = script("plans_by_bytes")
    measured = {"text": "one", "prompts": "as long as the texts"}
    made = SharingPlan(lead=[[0, 0]], provenance=measured | {"target_saving": 0.8})
    assert plans.is_made_of(made, measured, 32)
    assert not plans.is_made_of(made, measured | {"text": "two"}, 32)
    assert not plans.is_made_of(replace(made, provenance={"text": "one"}), measured, 32)
    packed = replace(made, bits=[4], residual=32)
    assert plans.is_made_of(packed, measured, 32) and not plans.is_made_of(packed, measured, 128)


def test_a_model_that_was_trained_with_another_plan_is_measured_anew(script, tmp_path, monkeypatch):
    plans, kept_at = script("plans_by_bytes"), script("judge_plans").kept_at
    monkeypatch.setattr(plans, "WORK", tmp_path)
    monkeypatch.setattr(plans, "RESULT", tmp_path / "none.json")
    case = plans.Case("tiny", (1, 2), window=48, plans={}, methods={}, sizes=plans.Sizes())
    plan = SharingPlan(lead=[[0, None]])
    (tmp_path / "export").mkdir()
    (case.folder / "rows").mkdir(parents=True)
    plan.save(tmp_path / "export" / "plan.json")
    row = plans.Row("adapted 20", "pod", model=tmp_path / "export")
    monkeypatch.setattr(plans, "rows", lambda case: [row])
    file = kept_at(case.folder / "rows", row.name)
    for made, stays in ((plan, True), (SharingPlan(lead=[[0, 0]]), False)):
        write_json(file, {"name": row.name, "plan": {"sha256": plan_sha256(made)}})
        plans.restore(case)
        assert file.is_file() == stays


def test_training_goes_on_only_where_the_plan_is_the_same(script, tmp_path, monkeypatch):
    adaptation = script("adaptation_smollm2")
    monkeypatch.setattr(adaptation, "WORK", tmp_path)
    monkeypatch.setattr(adaptation, "OF_PLANS", tmp_path)
    row = adaptation.Row("20", "plan_20")
    assert not adaptation.is_trained(row)
    for folder in ("20/export", "plans"):
        (tmp_path / folder).mkdir(parents=True)
    for lead, same in (([[0, None]], True), ([[0, 0]], False)):
        SharingPlan(lead=[[0, None]]).save(tmp_path / "20" / "export" / "plan.json")
        SharingPlan(lead=lead).save(tmp_path / "plans" / "plan_20.json")
        assert adaptation.is_trained(row) == same


def test_a_name_without_a_row_is_refused(script, capsys):
    plans = script("plans_by_bytes")
    found = [plans.Row("plan 20", "pod"), plans.Row("int4", "int4")]
    assert [row.name for row in plans.named(found, "plan *", argparse.ArgumentParser())] == ["plan 20"]
    with pytest.raises(SystemExit):
        plans.named(found, "int4,plan", argparse.ArgumentParser())
    assert "no row is called 'plan'; there are: plan 20, int4" in capsys.readouterr().err
