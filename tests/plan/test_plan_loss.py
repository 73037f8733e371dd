"""The measured loss of a plan is that of a model with it."""

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
