"""What tells models apart: content, not place or time; what a plan decides, not where it came from."""

import os
import shutil
from dataclasses import replace

import pod.identity as identity_module
from pod import SharingPlan
from pod.files import sha256_file
from pod.identity import content_of, plan_of
from pod.modeling.model.sink_constants import SinkConstants


def test_identity_is_names_and_content(tmp_path, monkeypatch):
    """A copy, another place, another time of change: the same model. One byte of weights: another one."""
    monkeypatch.setenv("POD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity_module, "_LARGE", 1 << 20)
    first = tmp_path / "model"
    first.mkdir()
    (first / "config.json").write_text("{}")
    large = first / "model.safetensors"
    large.write_bytes(bytes(2 << 20))
    before = content_of(first)
    os.utime(large, ns=(1, 1))
    assert content_of(first) == before
    shutil.copytree(first, tmp_path / "moved" / "elsewhere")
    assert content_of(tmp_path / "moved" / "elsewhere") == before
    monkeypatch.setattr(
        identity_module, "sha256_file", lambda file: "" if file == large else sha256_file(file)
    )
    assert content_of(first) == before
    monkeypatch.undo()
    monkeypatch.setenv("POD_CACHE", str(tmp_path / "cache"))
    large.write_bytes(bytes(1 << 20) + b"\x01" + bytes((1 << 20) - 1))
    assert content_of(first) != before
    assert content_of("owner/name") == "owner/name"


def test_cards_licences_and_own_code_are_beside_the_model(tmp_path):
    """What decides no answer may change; a tokenizer's file may not."""
    for name in ("config.json", "tokenizer_config.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    before = content_of(tmp_path)
    for name in ("README.md", "LICENSE", "LICENSE.base.txt", "plan.json", "modeling_pod.py"):
        (tmp_path / name).write_text("x")
    assert content_of(tmp_path) == before
    for name in ("config.json", "tokenizer_config.json", "merges.txt"):
        (tmp_path / name).write_text("{ }")
        assert content_of(tmp_path) != before
        (tmp_path / name).write_text("{}")


def test_which_file_holds_what_counts(tmp_path):
    """Contents that change places make another model.

    A walk in the order of names finds the same digests.
    """
    first, second = (tmp_path / name for name in ("a", "b"))
    for folder, names in (
        (first, ("config.json", "tokenizer.json")),
        (second, ("config.json", "vocab.json")),
    ):
        folder.mkdir()
        for name, text in zip(names, ("{}", "[]"), strict=True):
            (folder / name).write_text(text)
    assert content_of(first) != content_of(second)


def test_a_plan_is_what_it_decides(tmp_path):
    plan = SharingPlan([[0, 0], [0, None]], {"model": "a", "cost": 1.0})
    plan.save(tmp_path / "a.json")
    replace(plan, provenance={"cost": 2.0}).save(tmp_path / "b.json")
    assert plan_of(tmp_path / "a.json") == plan_of(tmp_path / "b.json")
    for other in (
        SharingPlan([[0, 0], [0, 1]]),
        replace(plan, bits=(16, 4)),
        replace(plan, head_order=((0, 1), (1, 0))),
    ):
        other.save(tmp_path / "c.json")
        assert plan_of(tmp_path / "a.json") != plan_of(tmp_path / "c.json")


def test_identity_of_a_plan_knows_its_constants(tmp_path):
    """Other constants, or none, make another model; plans without constants are named as before."""
    stored = SharingPlan(((0, 0), (None, 1)), num_sink_tokens=4, num_recent_tokens=8)
    without = replace(stored, num_sink_tokens=0, sinks="none")
    values = ((0.0, 1.0), (2.0, 3.0))
    ids = []
    for plan in (
        stored,
        without,
        replace(without, sinks="constant"),
        *(
            replace(without, sinks="constant", sink_constants=SinkConstants((None, logits), (None, values)))
            for logits in ((0.5, 0.5), (0.5, 0.6))
        ),
    ):
        plan.save(tmp_path / "plan.json")
        ids.append(plan_of(tmp_path / "plan.json"))
    assert ids[0] == ids[1] == [stored.lead, None, None]
    assert all(ids[i] != ids[j] for i in range(2, 5) for j in range(i))
