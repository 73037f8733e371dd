"""configs/paper: each recipe is built on fixture data at its own lengths, with every cache.

Presets say nothing that methods do not take.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import pod
from pod.eval import runner
from pod.eval.args import EvalArgs
from pod.eval.estimate import estimate
from pod.eval.presets import PRESETS
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.models import resolve_model
from pod.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
PLAN = pod.SharingPlan(lead=[[0, 0], [0, 0], [0, 2], [3, 2]])
CASES = [(preset, part) for preset, parts in PRESETS.items() for part in parts]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The tiny models of these tests, and a text.

    `dense`: package:tiny, said to read 128K. `words`: with words as tokens, since RULER's shortest prompts
    have 7K bytes. `export`: under a plan. `deep`: with as many layers as Llama-3-8B.
    """
    folder = tmp_path_factory.mktemp("papers")
    shutil.copytree(resolve_model("package:tiny"), folder / "dense")
    config = json.loads((folder / "dense" / "config.json").read_text())
    config["max_position_embeddings"] = 131_072
    (folder / "dense" / "config.json").write_text(json.dumps(config))
    pod.load_model(str(folder / "dense"), plan=PLAN).save_pretrained(folder / "export")
    shutil.copytree(folder / "dense", folder / "words")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>").save_pretrained(folder / "words")
    deep = AutoConfig.from_pretrained(folder / "dense", num_hidden_layers=32)
    AutoModelForCausalLM.from_config(deep).save_pretrained(folder / "deep")
    PreTrainedTokenizerFast.from_pretrained(folder / "dense").save_pretrained(folder / "deep")
    for name, lines in (("text.txt", 4000), ("long.txt", 100_000)):
        (folder / name).write_text("".join(f"Line {number} of a text. " for number in range(lines)))
    return folder


def read(file, place):
    """A recipe on the tiny model and fixture data with one sample of each task.

    Lengths, budgets and options stay.
    """
    args, text = load_recipe(file).eval, [str(place / "text.txt")]
    values = {"output_dir": place / "out", "model.path": place / "dense", "model.dtype": "float32"}
    values |= {"eval.data_dir": ROOT / "tests" / "eval" / "data", "eval.unsafe_code": True, "eval.limit": 1}
    values |= {f"eval.models.{name}": place / "export" for name in args.models}
    values |= {"eval.text": text if "stream_nll" not in args.tasks else [str(place / "long.txt")]}
    values["eval.text_sequences"] = 1
    values |= {"eval.passkey_depths": [0.5], "eval.passkey_samples": 1}
    if "pod" in args.methods:
        values["eval.pod_model"] = place / "export"
    if "razor" in args.methods:  # the heads of `pod explore --heads`
        scores = ((0.0, 0.1, 0.2, 0.3),) * 4
        found = RetrievalHeads(echo=scores, induction=scores, num_key_value_heads=2)
        (place / "out" / "plan").mkdir(parents=True, exist_ok=True)
        found.save(place / "out" / "plan" / "retrieval_heads.json")
    if "niah" in args.tasks:
        values |= {"eval.task_options.niah.haystack": text, "eval.task_options.niah.depths": [0.5]}
    for task in {"consistency", "stream_nll"} & {*args.tasks}:
        values[f"eval.task_options.{task}.sequences"] = 1
    if args.tasks[0].startswith(("pod_ruler", "passkey")):
        values["model.path"] = place / "words"
    if any("lazy_layers" in name for name in args.methods):
        values["model.path"] = place / "deep"
    return load_recipe(file, [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()])


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_estimated_and_its_caches_made(file, place, monkeypatch):
    built, original = [], runner.prepare

    def kept(*args, **more):
        built.append(original(*args, **more))
        return built[-1]

    monkeypatch.setattr(runner, "prepare", kept)
    recipe = read(file, place)
    assert "Not counted" not in estimate(recipe)
    run = built[0] if built else kept(recipe, lambda line: None)
    for one in run.method_runners.values():
        for task in run.tasks.values():
            reason = runner.refusal(run.models, one.method, task)
            assert reason is None, reason
            runner.check_caches(one, task)
    for task in run.side_by_side.values():
        task.check(run.method_runners)


def test_every_recipe_stands_in_the_table_of_the_docs():
    text = (ROOT / "docs" / "evaluation.md").read_text()
    assert [file.stem for file in RECIPES if f"`{file.stem}`" not in text] == []


@pytest.mark.parametrize(("preset", "part"), CASES)
def test_methods_take_what_presets_say(preset, part, place):
    method, options = pod.methods()[part], PRESETS[preset][part]
    assert options.keys() <= method.parameters.keys()
    heads = {"heads": [[0], [], [1], []]} if part == "razor" else {}
    model = pod.load_model(str(place / "dense"))
    pod.make_cache(model, part, 4096 if method.takes_budget else None, **options, **heads)


def test_a_recipe_goes_before_its_preset():
    args = EvalArgs(
        preset="pod",
        methods=["full", "snapkv", "pod+snapkv@4096", "pod+int4", "h2o@25%", "model:cla"],
        method_options={"snapkv": {"window": 8, "kernel": 3}, "pod+int4": {"residual": 64}},
    )
    expected = {
        "snapkv": {"window": 8, "kernel": 3},
        "pod+snapkv@4096": {"window": 64},
        "pod+int4": {"residual": 64},
        "h2o@25%": {"num_recent_tokens": 4000},
    }
    assert args.method_options == expected
    assert replace(args, limit=3).method_options == expected
    assert EvalArgs(methods=["snapkv"]).method_options == {}
    args = EvalArgs(preset="imdc", methods=["imdc(streamingllm)+int4@1024", "fm(snapkv)@1024"])
    assert args.method_options["imdc(streamingllm)+int4@1024"]["function"] == "linear"
    assert args.method_options["fm(snapkv)@1024"] == {"chunk_size": 1024}


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="unknown preset 'razor'; did you mean 'razorattention'"):
        EvalArgs(preset="razor")
