"""The measured loss of a plan is that of a model with it."""

from dataclasses import replace

import pytest
import torch

import pod
from pod.modeling.model.sharing import SharingPlan
from pod.plan.choose import plan_loss

PLANS = {
    "mixed": SharingPlan(lead=[[0, 0], [0, 1], [2, None], [2, 1], [4, 1]]),
    "windows": SharingPlan(lead=[[0, None], [None, 1], [2, None], [3, None], [None, 4]]),
    "dense": SharingPlan.dense(5, 2),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    windows = {"num_sink_tokens": 2, "num_recent_tokens": 5, "initializer_range": 0.3}
    return pod.PodForCausalLM(pod.PodConfig(**sizes, **heads, **windows)).double().eval()


@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_models_with_the_plan(model, name):
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, 61, (length,), generator=generator) for length in (40, 33, 40)]
    config = pod.PodConfig(**(model.config.to_dict() | {"lead": [list(row) for row in PLANS[name].lead]}))
    shared = pod.PodForCausalLM(config).double().eval()
    shared.load_state_dict(model.state_dict())
    with torch.no_grad():
        losses = [shared(x[None], labels=x[None]).loss * (len(x) - 1) for x in sequences]
    expected = float(sum(losses)) / sum(len(x) - 1 for x in sequences)
    assert plan_loss(model, PLANS[name], sequences) == pytest.approx(expected, rel=1e-12)
    assert model.config.sharing_plan.is_dense, "the model is left as it was"


@pytest.mark.parametrize("residual", [0, 32, 60])
@torch.no_grad()
def test_packed_tokens_are_read_as_in_decoding(model, residual):
    """First tokens and any residual shift the places at which tokens are packed."""
    plan = replace(
        PLANS["windows"], bits=[4] * 5, residual=residual, num_sink_tokens=3, num_recent_tokens=110
    )
    longer = {"max_position_embeddings": 256, "num_sink_tokens": 3, "num_recent_tokens": 110}
    long = pod.PodForCausalLM(pod.PodConfig(**(model.config.to_dict() | longer))).double().eval()
    long.load_state_dict(model.state_dict())
    ids = torch.randint(0, 61, (190,), generator=torch.Generator().manual_seed(4))
    planned = pod.load_model(long, plan=plan)
    cache, losses = pod.make_cache(planned), []
    for position in range(len(ids) - 1):
        logits = planned(ids[None, position : position + 1], past_key_values=cache).logits[0, -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[position + 1]))
    assert plan_loss(long, plan, [ids]) == pytest.approx(float(sum(losses)) / len(losses), rel=1e-9)
