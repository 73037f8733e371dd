"""Sharing plans: validation, arithmetic, files."""

import json

import pytest

from pod.modeling.shipped.sharing import SharingPlan, is_followed

LEAD = [[0, 0], [0, 1], [0, 1], [3, 1]]


def test_blocks_and_saving():
    plan = SharingPlan(LEAD)
    assert plan.blocks(0) == [[0, 1, 2], [3]]
    assert plan.blocks(1) == [[0], [1, 2, 3]]
    assert plan.num_followers == 4 and plan.share_followers == 0.5 and plan.asymptotic_saving == 0.25
    assert plan.saving(100, 16, 24) == pytest.approx(0.25 * 60 / 100)
    assert plan.saving(40, 16, 24) == 0
    assert SharingPlan.dense(4, 2).is_dense and not plan.is_dense
    assert [is_followed(plan.lead, *place) for place in ((0, 0), (0, 1), (3, 1))] == [True, False, False]


@pytest.mark.parametrize(
    ("lead", "message"),
    [
        ([[0], [2]], "between 0 and its own layer 1"),
        ([[0], [-1]], "between 0 and its own layer"),
        ([[0], [0], [1]], "a lead must lead itself"),
        ([[0], [1], [0]], "must be consecutive"),
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
        (json.dumps({"schema": 99, "lead": LEAD}), "schema 1"),
        (json.dumps({"schema": 1, "lead": [[1]]}), "plan.json: sharing plan"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            SharingPlan.load(path)
    with pytest.raises(ValueError, match="cannot read"):
        SharingPlan.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="4 layers x 2 KV heads, the model has 5 x 2"):
        plan.check_fits(5, 2)
