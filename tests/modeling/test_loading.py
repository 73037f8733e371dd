"""Checkpoints whose configuration and files disagree, and the names of transformers.

All roads give the same model, or refuse.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import pod
from pod.export import export
from pod.models import ModelArgs
from pod.training.run.start_model import load_start_model, model_config

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def from_folder(folder):
    return pod.load_model(folder, dtype="float32")


def in_memory(folder):
    return pod.load_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def training_start(folder):
    return load_start_model(ModelArgs(path=str(folder), layout="dense"), None)


ROADS = [from_folder, in_memory, training_start]


def complaint(function, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def tied(tools, tmp_path):
    """`(folder, weights)` of a small tied Llama."""
    folder = tmp_path / "tied"
    tools.make_stock("llama-tied-biased-llama3", dtype=torch.float32).save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


def write(folder, weights, name="model.safetensors"):
    save_file({one: weight.contiguous() for one, weight in weights.items()}, folder / name, {"format": "pt"})


def own_head(weights):
    torch.manual_seed(1)
    return weights[EMBEDDING] + 0.2 * torch.randn_like(weights[EMBEDDING])


def shard(folder, parts, total=1):
    """The weights in files of their own, with an index that says that each stands in the last that has it."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    places = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1}-of-{len(parts)}.safetensors"
        write(folder, part, file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# -- the output head ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("form", ["file", "shards", "bin"])
def test_a_head_in_the_files_is_the_head_whatever_the_configuration_ties(tied, tools, road, form):
    folder, weights = tied
    weights[HEAD] = own_head(weights)
    if form == "shards":
        shard(folder, [{HEAD: weights.pop(HEAD)}, weights])
    else:
        write(folder, weights)
    if form == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    ids = tools.random_ids(2, 20)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    model = road(folder)
    assert (model(ids).logits - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@torch.no_grad()
@pytest.mark.parametrize("road", ROADS)
def test_an_export_has_the_same_head_for_every_reader(tied, tools, road, tmp_path):
    folder, weights = tied
    write(folder, weights | {HEAD: own_head(weights)})
    model, ids = road(folder), tools.random_ids(1, 20)
    export(model, tmp_path / "export")
    for read in (*ROADS, AutoModelForCausalLM.from_pretrained):
        again = read(tmp_path / "export")
        assert torch.equal(again.lm_head.weight, own_head(weights))
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("stored", [{EMBEDDING, HEAD}, {EMBEDDING}, {HEAD}])
def test_equal_heads_are_one_weight_under_whichever_name_it_is_stored(tied, road, stored):
    folder, weights = tied
    embedding = weights.pop(EMBEDDING)
    write(folder, weights | {name: embedding.clone() for name in stored})
    model = road(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding) and model.config.tie_word_embeddings


@pytest.mark.parametrize("road", [from_folder, training_start])
def test_without_tying_a_head_that_is_not_stored_is_missing(tied, road):
    folder, _ = tied
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert complaint(road, folder) == "checkpoint does not fit: missing ['lm_head.weight']"


def test_estimates_count_the_head_of_the_files(tied):
    folder, weights = tied
    arguments = ModelArgs(path=str(folder), layout="dense"), folder
    assert model_config(*arguments)[0].tie_word_embeddings
    write(folder, weights | {HEAD: own_head(weights)})
    assert not model_config(*arguments)[0].tie_word_embeddings


@torch.no_grad()
@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_what_an_adapter_saved_beside_its_layers_stays_apart_once_merged(tools, tmp_path, saved):
    stock = tools.make_stock("llama-tied-biased-llama3", dtype=torch.float32)
    adapted = get_peft_model(stock, LoraConfig(target_modules=["q_proj"], modules_to_save=saved))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    merged, ids = adapted.merge_and_unload(), tools.random_ids(1, 20)
    expected = merged(ids).logits
    merged.save_pretrained(tmp_path / "merged")
    tolerance = 2e-5 * expected.abs().max()
    for model in (pod.load_model(merged), *(road(tmp_path / "merged") for road in ROADS)):
        assert (model(ids).logits - expected).abs().max() <= tolerance


@torch.no_grad()
def test_two_names_of_one_tensor_are_two_weights_where_nothing_is_tied(tools):
    stock = tools.make_stock(dtype=torch.float32)
    stock.lm_head.weight = stock.model.embed_tokens.weight
    model = pod.load_model(stock)
    model.lm_head.weight.zero_()
    assert stock.model.embed_tokens.weight.abs().sum() > 0


# -- other weights --------------------------------------------------------------------------


@pytest.mark.parametrize("road", [from_folder, training_start])
def test_files_and_configuration_that_do_not_fit_are_refused_by_name(tools, tmp_path, road):
    stock = tools.make_stock("qwen3", dtype=torch.float32)
    stock.save_pretrained(tmp_path)
    weights, own = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    bias = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(96) for layer in range(5)}
    norms = {name: weight for name, weight in weights.items() if "q_norm" not in name}
    layers = own["num_hidden_layers"]
    cases = [
        (weights | bias, {}, "unexpected ['model.layers.0.self_attn.q_proj.bias'"),
        (weights, {"attention_bias": True}, "missing ['model.layers.0.self_attn.k_proj.bias'"),
        (norms, {}, "missing ['model.layers.0.self_attn.q_norm.weight'"),
        (weights, {"num_hidden_layers": layers - 1, "layer_types": None}, "unexpected ['model.layers.4."),
        (weights, {"num_hidden_layers": layers + 1, "layer_types": None}, "missing ['model.layers.5."),
        (weights, {"vocab_size": own["vocab_size"] + 1}, "lm_head.weight"),
        (weights, {"intermediate_size": own["intermediate_size"] * 2}, "mlp.down_proj.weight"),
    ]
    for files, changes, says in cases:
        write(tmp_path, files)
        (tmp_path / "config.json").write_text(json.dumps(own | changes))
        said = complaint(road, tmp_path)
        assert said.startswith("checkpoint does not fit: ") and says in said
    as_llama = own | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    write(tmp_path, weights)
    (tmp_path / "config.json").write_text(json.dumps(as_llama))
    assert "unexpected ['model.layers.0.self_attn.k_norm.weight'" in complaint(road, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("road", [from_folder, training_start])
def test_shards_that_contradict_each_other_are_refused(tied, tools, road):
    folder, weights = tied
    first = {name: weight for name, weight in weights.items() if "layers.0" in name}
    rest = {name: weight for name, weight in weights.items() if name not in first}
    ids = tools.random_ids(1, 9)
    expected = from_folder(folder)(ids).logits
    twice = {name: weight.clone() for name, weight in first.items() if "q_proj.weight" in name}
    shard(folder, [first, rest | twice])  # a wrong total and equal copies harm nobody
    assert torch.equal(road(folder)(ids).logits, expected)
    shard(folder, [first, rest | {name: weight + 1 for name, weight in twice.items()}])
    said = complaint(road, folder)
    assert (
        "q_proj.weight stands in model-1-of-2.safetensors and model-2-of-2.safetensors with different" in said
    )
    (folder / "model-2-of-2.safetensors").unlink()
    said = complaint(road, folder)
    assert said.endswith("named by the checkpoint's index and is not there: copy or download it again")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "is no index of weights" in complaint(road, folder)


@torch.no_grad()
@pytest.mark.parametrize("road", [from_folder, training_start])
def test_a_whole_file_beside_old_shards_is_what_transformers_reads(tied, tools, road):
    folder, weights = tied
    shard(folder, [{name: weight + 1 for name, weight in weights.items()}])
    write(folder, weights)
    assert torch.equal(road(folder).model.embed_tokens.weight, weights[EMBEDDING])


@pytest.mark.parametrize("road", [from_folder, training_start])
def test_weights_that_are_no_floating_point_numbers_are_refused(tied, road):
    folder, weights = tied
    name = "model.layers.1.mlp.up_proj.weight"
    write(folder, weights | {name: weights[name].to(torch.int8)})
    said = complaint(road, folder)
    assert said.startswith(name) and "is quantized, load the one that it was made from" in said


@pytest.mark.parametrize("road", [from_folder, training_start])
def test_types_that_differ_between_weights_become_one(tied, road):
    folder, weights = tied
    mixed = {name: weight.bfloat16() if "mlp" in name else weight for name, weight in weights.items()}
    write(folder, mixed)
    model = road(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[name], weights[name])


@torch.no_grad()
@pytest.mark.parametrize(
    ("road", "prefix"),
    [
        (from_folder, ""),
        *((training_start, prefix) for prefix in ("", "language_model.model.", "model.language_model.")),
    ],
)
def test_other_prefixes_of_the_same_weights(tied, tools, road, prefix):
    """As the decoder without its head is saved, and as models that also see have their text part."""
    folder, weights = tied
    ids = tools.random_ids(1, 9)
    expected = from_folder(folder)(ids).logits
    write(folder, {prefix + name.removeprefix("model."): weight for name, weight in weights.items()})
    assert torch.equal(road(folder)(ids).logits, expected)


# -- use_cache ------------------------------------------------------------------------------


def forbid_caching(folder, with_generation_config):
    """As training with activation checkpointing leaves it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if with_generation_config:
        GenerationConfig(use_cache=False, eos_token_id=-1).save_pretrained(folder)


def widths_of(model, ids, **options):
    """The tokens, and how many are fed per step."""
    widths = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, given: widths.append(given[0].shape[1])
    )
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=-1, **options)
    hook.remove()
    return tokens, widths


@torch.no_grad()
@pytest.mark.parametrize("with_generation_config", [True, False])
def test_a_checkpoint_that_says_not_to_cache_caches(tied, tools, tmp_path, with_generation_config):
    folder, _ = tied
    ids, cached = tools.random_ids(1, 30), [30, 1, 1, 1]
    expected, widths = widths_of(from_folder(folder), ids)
    assert widths == cached
    forbid_caching(folder, with_generation_config)
    for road in ROADS:
        model = road(folder)
        for options in ({}, {"past_key_values": pod.make_cache(model, "full")}):
            tokens, widths = widths_of(model, ids, **options)
            assert torch.equal(tokens, expected) and widths == cached
    stock = AutoModelForCausalLM.from_pretrained(folder)
    export(stock, tmp_path / "export")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "export" / name).read_text())["use_cache"] is True
    assert not stock.generation_config.use_cache, "the model that is exported stays as it is"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert widths_of(again, ids)[1] == cached


@torch.no_grad()
def test_a_cache_in_hand_is_used_and_saved_folders_cache(tools, tmp_path):
    """Trainers set `use_cache` to False on the model itself."""
    model, ids = tools.make_pod(dtype=torch.float32), tools.random_ids(1, 30)
    expected, _ = widths_of(model, ids)
    model.config.use_cache = model.generation_config.use_cache = False
    cache = pod.make_cache(model)
    tokens, widths = widths_of(model, ids, past_key_values=cache)
    assert torch.equal(tokens, expected) and widths == [30, 1, 1, 1]
    assert cache.get_seq_length() == 33
    given = GenerationConfig(use_cache=False)
    assert widths_of(model, ids, past_key_values=pod.make_cache(model), generation_config=given)[1] == [
        30,
        1,
        1,
        1,
    ]
    said = complaint(model.generate, ids, past_key_values=pod.make_cache(model), use_cache=False)
    assert said.startswith("generate() got past_key_values and use_cache=False: leave one of both out")
    assert widths_of(model, ids, use_cache=False)[1] == [30, 31, 32, 33]
    model.save_pretrained(tmp_path)
    assert not model.config.use_cache and not model.generation_config.use_cache
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["use_cache"] is True


# -- names of transformers ------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "backend"),
    [({}, "auto"), ({"attn_implementation": "sdpa"}, "auto"), ({"attn_implementation": "eager"}, "reference"),
     ({"attn_implementation": "flash_attention_2"}, "flash"),
     ({"attn_implementation": "eager", "attention_backend": "reference"}, "reference")],
)  # fmt: skip
def test_names_of_transformers_mean_what_they_mean_there(tied, tools, given, backend):
    folder, _ = tied
    usual = {
        "torch_dtype": "bfloat16",
        "trust_remote_code": True,
        "low_cpu_mem_usage": True,
        "device_map": "auto",
    }
    model = pod.load_model(folder, **usual, **given)
    assert model.dtype == torch.bfloat16 and model.config.attention_backend == backend
    assert model.model.context(torch.zeros(1, 1, 1), torch.zeros(1, 1)).backend == backend
    in_memory = pod.load_model(tools.make_stock(), device_map="cpu", torch_dtype=torch.float32, **given)
    assert in_memory.dtype == torch.float32 and in_memory.config.attention_backend == backend


def test_what_is_said_twice_must_agree_and_what_is_not_known_is_named(tied):
    folder, _ = tied
    for options, says in (
        ({"dtype": "float32", "torch_dtype": "bfloat16"},
         "dtype = torch.float32 and torch_dtype = 'torch.bfloat16'"),
        ({"device": "cpu", "device_map": "meta"},
         "device = 'cpu' and device_map = 'meta' are the same setting"),
        ({"attention_backend": "flash", "attn_implementation": "eager"}, "give only one of them"),
        ({"attn_implementation": "paged|eager"},
         "not supported, allowed are eager, flash_attention_2, sdpa: use"),
        ({"torch_dtype": "int8"}, "torch_dtype = 'int8' is not a floating-point dtype"),
        ({"device_map": "gpu"},
         "device_map = 'gpu' is no device: use a device, for example 'cuda:0', one of auto, balanced, seque"),
        ({"device_map": {}}, "device_map = {} names no device"),
        ({"device_map": {"": "disk"}}, "device_map names disk: nothing is offloaded to host memory or disk"),
        ({"device_map": "cpu", "max_memory": {"cpu": "1KiB"}}, "max_memory is for device_map = 'auto', "),
        ({"device": "gpu"}, "device = 'gpu' is no device: use a device, for example 'cuda:0' ("),
        ({"device": "cuda:7"}, "device names cuda:7, but this machine has "),
        ({"device_map": "cuda:7"}, "device_map names cuda:7, but this machine has "),
        ({"device_map": "auto", "max_memory": {"cuda:7": "1GB"}}, "device_map names cuda:7, but this"),
        ({"device": "cpu", "device_map": "auto"},
         "device = 'cpu' and device_map = 'auto' are the same setting"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "device_map names disk: nothing is offloaded"),
        ({"max_memory": {0: "1GB"}}, "max_memory is for device_map = 'auto', 'balanced' or 'sequential'"),
        ({"attn_implementaton": "sdpa"}, "did you mean attn_implementation?"),
        ({"num_sinks": 4}, "did you mean num_sink_tokens?"),
        ({"load_in_4bit": True}, "'pod+int4' packs the cache"),
        ({"subfolder": "a"}, "give the path of that folder"),
    ):  # fmt: skip
        assert says in complaint(pod.load_model, folder, **options)


def test_code_of_a_checkpoint_is_never_run(tied):
    folder, _ = tied
    (folder / "own.py").write_text("raise SystemExit('run')")
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for trusting in ({}, {"trust_remote_code": True}):
        said = complaint(pod.load_model, folder, **trusting)
        assert (
            "it needs custom code, which is never run here; supported are the families gemma3_text, " in said
        )
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    assert "model type `own`" in complaint(pod.load_model, folder)
