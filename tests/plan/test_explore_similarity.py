"""`pod explore` by similarity, from text to plan on a random four-layer model.

What is measured again and what is not.
"""

from pathlib import Path

import pytest
import torch

from pod.commands import explore
from pod.data import DataArgs
from pod.modeling.model.sharing import SharingPlan
from pod.plan import exploration as explore_module
from pod.plan import measured_costs as measure_module
from pod.plan.measured_costs import MeasuredCosts
from pod.plan.similarity import dissimilarity, greedy_plan
from pod.plan.solve import solve
from pod.recipe import load_recipe, run

WRITTEN = {
    "plan.json",
    "similarity.safetensors",
    "summary.txt",
    "similarity.png",
    "blocks.png",
    "pareto.json",
    "pareto.png",
}


@pytest.fixture
def overrides(explore_overrides):
    """The paper's plan: similarity, saving in the limit of long sequences."""
    paper = ["explore.cost=similarity", "explore.roles=follow", "explore.budget_length=0"]
    return [*explore_overrides, *paper, "explore.target_saving=0.25"]


def saved(tmp_path):
    folder = tmp_path / "run" / "plan"
    return SharingPlan.load(folder / "plan.json"), MeasuredCosts.load(folder / "similarity.safetensors")


def test_writes_plan_similarity_summary_and_pictures(overrides, tmp_path, capsys):
    explore.main(load_recipe(None, overrides))
    plan, similarity = saved(tmp_path)
    assert {path.name for path in (tmp_path / "run" / "plan").iterdir()} == WRITTEN
    assert plan.lead == solve(dissimilarity(similarity.tensors["similarity"], 2), None).plan(4).lead
    assert plan.asymptotic_saving == 0.25
    assert plan.provenance["algorithm"] == "dp" and plan.provenance["num_queries"] == 5
    assert len(plan.provenance["tokens_sha256"]) == 64
    summary = (tmp_path / "run" / "plan" / "summary.txt").read_text()
    assert "25.0%" in summary and summary in capsys.readouterr().out


def test_similarity_is_that_of_stock_attention(overrides, tmp_path):
    """The rows come from our decoder; here they come from transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    from pod.models import resolve_model
    from pod.plan.similarity import jensen_shannon_similarity

    recipe = load_recipe(None, [*overrides, "model.dtype=float64"])
    explore.main(recipe)
    folder = resolve_model("package:tiny")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    sequences = explore_module.Exploration.of(recipe).read()
    expected = []
    for sequence in sequences:
        rows = stock(sequence[None], output_attentions=True).attentions
        expected.append(jensen_shannon_similarity(torch.stack([row[0, :, -5:] for row in rows]).detach()))
    assert len(expected) == 3
    # stock softmax computes in fp32 even for fp64 models
    assert (saved(tmp_path)[1].tensors["similarity"] - torch.stack(expected).mean(0)).abs().max() < 1e-5


def test_another_algorithm_measures_nothing_and_loads_no_model(overrides, tmp_path, monkeypatch):
    explore.main(load_recipe(None, overrides))
    first = saved(tmp_path)[1].tensors["similarity"]

    def loaded_again(*args, **kwargs):
        raise AssertionError("loaded the model again")

    monkeypatch.setattr(explore_module, "load_model", loaded_again)
    explore.main(load_recipe(None, [*overrides, "explore.algorithm=greedy", "explore.threshold=0.2"]))
    plan, second = saved(tmp_path)
    assert torch.equal(first, second.tensors["similarity"])
    assert plan.lead == greedy_plan(first, 2, 0.2).lead
    assert plan.provenance["threshold"] == 0.2 and "target_saving" not in plan.provenance


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "explore.num_queries=4",
        "explore.sequence_length=40",
        "model.dtype=float64",
        "explore.num_sequences=2",
        "model.rope_theta=9e5",
    ],
)
def test_other_settings_measure_again_and_keep_the_old_file(overrides, tmp_path, change, capsys):
    explore.main(load_recipe(None, overrides))
    old = saved(tmp_path)[1].tensors["similarity"]
    capsys.readouterr()
    explore.main(load_recipe(None, [*overrides, change]))
    assert change.split("=")[0].split(".")[-1].removesuffix("_theta") in capsys.readouterr().out
    assert not torch.equal(saved(tmp_path)[1].tensors["similarity"], old)
    (kept,) = (tmp_path / "run" / "plan").glob("similarity-*.safetensors")
    assert torch.equal(MeasuredCosts.load(kept).tensors["similarity"], old)


def test_an_interrupted_launch_continues(overrides, tmp_path, monkeypatch):
    explore.main(load_recipe(None, [*overrides, f"output_dir={tmp_path / 'whole'}"]))
    record = measure_module.record_attention_rows
    calls = []

    def interrupted(model, input_ids, num_queries):
        calls.append(input_ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return record(model, input_ids, num_queries)

    monkeypatch.setattr(measure_module, "record_attention_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explore.main(load_recipe(None, overrides))
    assert not (tmp_path / "run" / "plan" / "plan.json").exists()
    explore.main(load_recipe(None, overrides))
    assert len(calls) == 4  # the third sequence only
    whole = MeasuredCosts.load(tmp_path / "whole" / "plan" / "similarity.safetensors")
    assert torch.equal(saved(tmp_path)[1].tensors["similarity"], whole.tensors["similarity"])
    assert {path.name for path in (tmp_path / "run" / "plan").iterdir()} == WRITTEN


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ["explore.target_saving=0.45"],
            "explore.target_saving is 0.45, but the allowed roles save 0.000 to 0.375",
        ),
        (["explore.sequence_length=9000"], "the model reads 8192"),
        (["explore.num_sequences=999"], "asked for 999 sequences of 48 tokens"),
        (["explore.sources=[/nowhere/at/all]"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_writes_no_plan(explore_refused, overrides, change, words):
    explore_refused([*overrides, *change], words)


def test_shorthands_and_dry_run(overrides, capsys):
    argv = [part for override in overrides for part in ("--set", override)]
    argv += [
        "--algorithm",
        "greedy",
        "--threshold",
        "0.42",
        "--target-saving",
        "0.1",
        "--dry-run",
        "--print-config",
    ]
    run(
        explore.main,
        sections=("model", "explore"),
        estimate=explore.estimate,
        add_arguments=explore.add_arguments,
        argv=argv,
    )
    printed = capsys.readouterr().out
    assert "algorithm: greedy" in printed and "threshold: 0.42" in printed and "target_saving: 0.1" in printed
    assert "3 x 48 = 144 tokens" in printed


@pytest.mark.slow
def test_without_sources_of_its_own_it_reads_the_held_out_text_of_prepared_data(overrides, tmp_path, capsys):
    """And nothing else: the sources may be gone. Other data is measured again."""
    from pod.data import held_out_documents, prepare

    file = Path(
        next(item for item in overrides if item.startswith("explore.sources")).split("=")[1].strip("[]")
    )
    kept = [item for item in overrides if not item.startswith("explore.sources")]
    recipe = load_recipe(None, [*kept, "data.sources=[gone.txt]"])
    with pytest.raises(ValueError, match="has no manifest.json: run .* first") as error:
        explore.main(recipe)
    assert "\n" not in str(error.value)
    exploration = explore_module.Exploration.of(recipe)
    args = DataArgs(
        sources=[f"{file}#chapters=100"], context_length=64, shortest_interval=16, target_tokens=10**5
    )
    for args.held_out_tokens in (200, 300):
        prepare(args, exploration.load_tokenizer(), recipe.data_dir, overwrite=True)
        explore.main(recipe)
        said = capsys.readouterr().out
        assert ("differs in text" in said) == (args.held_out_tokens == 300)
    held = {token for one in held_out_documents(recipe.data_dir) for token in one.tolist()}
    read = explore_module.Exploration.of(recipe).read()
    assert len(read) == 3 and {token for one in read for token in one.tolist()} <= held
