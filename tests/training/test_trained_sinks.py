"""Constant sinks as weights of a run: where they start, what trains them, and where they end."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.export import export_adapter
from pod.export import folder as export_folder
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.model.sinks import PARAMETERS
from pod.modeling.sink_weights import with_trained_constants
from pod.models import ModelArgs
from pod.training.args import TrainArgs
from pod.training.checkpoint import checkpoint_files
from pod.training.checkpoint.checkpoint_files import restore_model
from pod.training.checkpoint.run_identity import TrainState, start_identity_of
from pod.training.predict.shapes import Shapes
from pod.training.run.lora import add_lora, lora_settings
from pod.training.run.optimization import make_optimizer
from pod.training.run.start_model import hollow_start_model, load_start_model, model_config

LEAD = [[0, None], [0, 1], [None, None]]
IDS = torch.arange(60).reshape(2, 30) % 37
SINK_NAMES = {f"model.layers.{i}.{x}" for i in (0, 2) for x in PARAMETERS}
SETTINGS = lora_settings(TrainArgs(method="lora", lora_rank=3))


def make_stock():
    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def make_plan():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, generator=generator)
    values, keys = torch.randn(2, 3, 2, 6, generator=generator)
    tables = ((one[0].tolist(), None, one[2].tolist()) for one in (logits, values, keys))
    constants = SinkConstants(*tables)
    fields = {"num_sink_tokens": 0, "num_recent_tokens": 4, "sinks": "constant", "sink_constants": constants}
    return SharingPlan(LEAD, **fields)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A stock checkpoint with a plan beside it."""
    folder = tmp_path_factory.mktemp("start")
    make_stock().save_pretrained(folder)
    make_plan().save(folder / "plan.json")
    return folder


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_a_run_starts_from_the_constants_of_the_plan(start):
    model = load_start_model(ModelArgs(path=str(start)), start / "plan.json")
    assert {name for name, _ in model.named_parameters() if "sink" in name} == SINK_NAMES
    assert torch.equal(logits_of(model), logits_of(pod.load_model(start, plan=start / "plan.json")))
    constants = make_plan().sink_constants
    assert model.model.layers[2].self_attn.sinks.tolist() == list(constants.logits[2])


def test_a_run_starts_from_the_constants_of_a_checkpoint(start, tmp_path):
    trained = pod.load_model(start, plan=make_plan())
    with torch.no_grad():
        trained.model.layers[2].self_attn.sinks.add_(1.0)
    trained.save_pretrained(tmp_path)
    args = ModelArgs(path=str(tmp_path))
    assert torch.equal(logits_of(load_start_model(args, None)), logits_of(trained))
    with pytest.warns(
        UserWarning, match="its own constants stay"
    ):  # the plan's are where its training started
        second_stage = load_start_model(args, start / "plan.json")
    assert torch.equal(logits_of(second_stage), logits_of(trained))


def test_trained_weights_without_values_are_refused_by_name(start):
    weights = {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(ValueError, match="logits or values only in layer 0"):
        with_trained_constants(make_plan(), weights)


def test_constants_that_no_plan_has_are_one_line(start):
    bare = dataclasses.replace(make_plan(), sink_constants=None)
    with pytest.raises(ValueError, match="'constant' needs constants, which neither the plan nor") as said:
        load_start_model(ModelArgs(path=str(start)), bare)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("settings", "kind", "tokens"),
    [({}, "constant", 0), ({"sinks": "tokens"}, "tokens", 16), ({"sinks": "none"}, "none", 0)],
)
@pytest.mark.filterwarnings("ignore:sinks = :UserWarning")
def test_recipes_choose_the_sinks(start, settings, kind, tokens):
    args = ModelArgs(path=str(start), plan=str(start / "plan.json"), **settings)
    config, _ = model_config(args, start)
    assert (config.sinks, config.num_sink_tokens, config.num_recent_tokens) == (kind, tokens, 4)
    assert args.windows(make_plan()) == {"num_sink_tokens": tokens, "num_recent_tokens": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sinks": "constant", "num_sink_tokens": 4}, "sinks=constant stores no first tokens: set"),
        ({"sinks": "tokens", "num_sink_tokens": 0}, "sinks=tokens stores some"),
        ({"sinks": "constant", "layout": "window"}, "layout=window has no plan that gives them"),
    ],
)
def test_recipes_that_contradict_themselves(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelArgs(**settings)


def test_constants_have_no_weight_decay(start):
    model = pod.load_model(start, plan=make_plan())
    decay, others = make_optimizer(model, TrainArgs(weight_decay=0.1)).param_groups
    names = {id(one): name for name, one in model.named_parameters()}
    assert (decay["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    without = {names[id(one)] for one in others["params"]}
    assert without >= SINK_NAMES
    assert {name for name in without - SINK_NAMES if "norm" not in name} == set()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_estimates_count_the_constants_and_no_slot(start, method):
    model = pod.load_model(start, plan=make_plan())
    shapes, args = Shapes.from_config(model.config), TrainArgs(method=method, lora_rank=3)
    assert shapes.parameters == sum(one.numel() for one in model.parameters())
    assert shapes.windows == (0, 4) and shapes.sink_parameters == 2 * (4 + 2 * 12)
    without = Shapes.from_config(pod.load_model(start, plan=pod.SharingPlan(LEAD)).config)
    small = 100_000
    assert shapes.persistent_parameters(small) - without.persistent_parameters(small) == 2 * (4 + 24)
    trained = add_lora(model, SETTINGS) if method == "lora" else model
    counted = sum(one.numel() for one in trained.parameters() if one.requires_grad)
    assert shapes.trained_parameters(args) == counted


# -- LoRA -----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(start, tmp_path, monkeypatch):
    """A checkpoint of LoRA without the engine's files: adapters and constants that have moved."""
    model, weights = hollow_start_model(ModelArgs(path=str(start)), start / "plan.json")
    weights.open()
    for parameter in model.parameters():
        parameter.data = weights(parameter).clone()
    folder = tmp_path / "checkpoint"
    model.config.save_pretrained(folder)
    model.config.sharing_plan.save(folder / "plan.json")
    state = TrainState(
        identity={"dtype": "float32", **start_identity_of(model.config, weights.samples)}, lora=SETTINGS
    )
    adapted = add_lora(model, SETTINGS).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (one for one in adapted.parameters() if one.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    weights = {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}
    monkeypatch.setattr(export_folder, "read_state", lambda folder: state)
    for module in (export_folder, checkpoint_files):
        monkeypatch.setattr(module, "trained_weights", lambda folder: weights)
    return folder, adapted, state


def test_constants_are_trained_in_full_beside_adapters(checkpoint, start):
    _, adapted, _ = checkpoint
    trained = {
        name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad
    }
    assert {name for name in trained if "lora_" not in name} == SINK_NAMES
    before, _ = pod.load_model(start, plan=make_plan()), adapted.train()
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    for name, parameter in adapted.named_parameters():
        if name.removeprefix("base_model.model.") in SINK_NAMES:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert (logits_of(before) - logits_of(adapted.eval())).abs().max() > 0.1


def test_a_checkpoint_of_adapters_brings_its_constants(checkpoint, start):
    """The start model gets the trained constants, and is recognised although they have moved."""
    folder, adapted, state = checkpoint
    args = ModelArgs(path=str(start))
    merged = restore_model(folder, state, lambda plan: load_start_model(args, plan))
    expected = logits_of(adapted)
    assert (logits_of(merged) - expected).abs().max() <= 2e-5 * expected.abs().max()
    weights = merged.model.layers[2].self_attn.sinks
    assert torch.equal(weights, adapted.get_base_model().model.layers[2].self_attn.sinks)


@pytest.mark.filterwarnings("error:.*its own constants stay:UserWarning")
def test_trained_constants_win_over_those_of_the_start_model(checkpoint, start, tmp_path):
    """A second stage of training starts from an export that has constants under the same plan."""
    folder, adapted, state = checkpoint
    pod.load_model(start, plan=make_plan()).save_pretrained(tmp_path / "base")
    args = ModelArgs(path=str(tmp_path / "base"))
    merged = restore_model(folder, state, lambda plan: load_start_model(args, plan))
    trained = adapted.get_base_model().model.layers[2].self_attn
    assert torch.equal(merged.model.layers[2].self_attn.sinks, trained.sinks)
    export_adapter(folder, tmp_path / "adapter", str(start))
    loaded = pod.load_adapter(tmp_path / "adapter", tmp_path / "base").eval()
    assert torch.equal(logits_of(loaded), logits_of(adapted))


def test_an_adapter_brings_its_constants(checkpoint, start, tmp_path):
    folder, adapted, _ = checkpoint
    export_adapter(folder, tmp_path / "adapter", str(start))
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name for name in stored if "lora_" not in name} == {f"base_model.model.{x}" for x in SINK_NAMES}
    loaded = pod.load_adapter(tmp_path / "adapter").eval()
    assert torch.equal(logits_of(loaded), logits_of(adapted))
    merged = pod.load_model(tmp_path / "adapter")
    expected = logits_of(adapted)
    assert (logits_of(merged) - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert merged.config.sinks == "constant"
