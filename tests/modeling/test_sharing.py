"""Sharing plans: validation, arithmetic, files."""

import json

import pytest

from pod.modeling.model.sharing import Roles, SharingPlan, is_followed, roles_of

LEAD = [[0, 0], [0, 1], [0, 1], [3, 1]]
ROLES = [[0, None, None], [0, 1, None], [None, 1, 2], [0, None, 3], [None, 1, 4]]


def test_blocks_and_saving():
    plan = SharingPlan(LEAD)
    assert plan.blocks(0) == [[0, 1, 2], [3]]
    assert plan.blocks(1) == [[0], [1, 2, 3]]
    assert plan.num_followers == 4 and plan.share_followers == 0.5 and plan.asymptotic_saving == 0.25
    assert plan.saving(100, 16, 24) == pytest.approx(0.25 * 60 / 100)
    assert plan.saving(40, 16, 24) == 0
    assert SharingPlan.dense(4, 2).is_dense and not plan.is_dense
    assert [is_followed(plan.lead, *place) for place in ((0, 0), (0, 1), (3, 1))] == [True, False, False]


def test_windows_stand_between_the_layers_of_a_block():
    plan = SharingPlan(ROLES)
    assert (plan.num_leads, plan.num_followers, plan.num_windows, plan.num_pairs) == (5, 4, 6, 15)
    assert plan.asymptotic_saving == pytest.approx((6 + 4 / 2) / 15) and not plan.is_dense
    assert [plan.blocks(head) for head in range(3)] == [[[0, 1, 3]], [[1, 2, 4]], [[2], [3], [4]]]
    assert [is_followed(plan.lead, layer, 0) for layer in range(5)] == [True, True, True, False, False]
    assert roles_of(plan.lead, 3) == Roles((2,), (0,), (), (1,), (0,))
    assert roles_of(plan.lead, 1) == Roles((1,), (0,), (1,), (2,)) and roles_of(plan.lead, 1).held == (0, 1)
    assert [roles_of(plan.lead, layer).num_heads for layer in range(5)] == [3] * 5
    windows = SharingPlan.windows(3, 2)
    assert windows.asymptotic_saving == 1 and windows.blocks(0) == [] and windows.saving(100, 4, 16) == 0.8


@pytest.mark.parametrize(
    ("lead", "message"),
    [
        ([[0], [2]], "between 0 and its own layer 1"),
        ([[0], [-1]], "between 0 and its own layer"),
        ([[0], [0], [1]], "a lead must lead itself"),
        ([[None], [0]], "layer 0 keeps its window: a lead must lead itself"),
        ([[0], [1], [0]], "must be consecutive"),
        ([[0], [1], [None], [0]], "below it layer 1 leads"),
        ([[0, 0], [0]], "equal, non-empty rows"),
        ([], "equal, non-empty rows"),
        ([[0.0]], "must hold integers"),
        ([[True]], "must hold integers"),
        (3, "must be"),
    ],
)
def test_bad_plans_are_refused(lead, message):
    with pytest.raises(ValueError, match=message):
        SharingPlan(lead)


def test_files(tmp_path):
    path = tmp_path / "plan.json"
    plan = SharingPlan(LEAD, provenance={"n": 1024})
    plan.save(path)
    assert SharingPlan.load(path) == plan and SharingPlan.load(path).provenance == {"n": 1024}
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    for text, message in [
        ("{", "cannot read sharing plan"),
        ("[]", "not a sharing plan"),
        (json.dumps({"model_type": "llama"}), "not a sharing plan"),
        (json.dumps({"schema": 99, "lead": LEAD}), "schema 99, allowed are 1, 2, 3, 4"),
        (json.dumps({"schema": "4", "lead": LEAD}), "schema '4', allowed are 1, 2, 3, 4"),
        (json.dumps({"schema": 4, "lead": LEAD, "num_sink_token": 3}), "'num_sink_token'.*num_sink_tokens"),
        (json.dumps({"schema": 4, "lead": LEAD, "bits": 4}), "bits must be 16, 8 or 4 .* got 4"),
        (json.dumps({"schema": 4, "lead": LEAD, "bits": [16.0] * 4}), "bits must be 16, 8 or 4"),
        (json.dumps({"schema": 4, "lead": LEAD, "head_dim": "64"}), "head_dim must be .* got '64'"),
        (json.dumps({"schema": 2, "lead": LEAD, "head_order": [[0, 2, 1, 3]] * 4}), "staying together"),
        (json.dumps({"schema": 2, "lead": LEAD, "head_order": [[0, 1, 2, 2]] * 4}), "must permute"),
        (json.dumps({"schema": 2, "lead": LEAD, "head_order": [[1, 0, 2, 3]] * 3}), "each of 4 layers"),
        (json.dumps({"schema": 1, "lead": [[1]]}), "plan.json: sharing plan"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            SharingPlan.load(path)
    path.write_text(json.dumps({"schema": 1, "lead": LEAD}))
    assert SharingPlan.load(path) == plan
    ordered = SharingPlan(ROLES, head_order=[[3, 2, 0, 1, 4, 5]] * 5)
    ordered.save(path)
    assert SharingPlan.load(path) == ordered != SharingPlan(ROLES)
    with pytest.raises(ValueError, match="cannot read"):
        SharingPlan.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="4 layers x 2 KV heads, the model has 5 x 2"):
        plan.check_fits(5, 2)
