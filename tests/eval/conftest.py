"""Tiny models for evaluation tests: dense, and the same weights under a plan.

Under the plan half of the KV heads follow.
"""

import pytest
import torch

import pod

WINDOWS = {"num_sink_tokens": 4, "num_recent_tokens": 12}
PLAN = pod.SharingPlan(lead=[[0, 0], [0, 1], [0, 1], [3, 1]])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 1024,
}


def build(plan: pod.SharingPlan | None, dtype: torch.dtype = torch.float64) -> pod.PodForCausalLM:
    """A random model in evaluation mode; the weights are the same for every plan."""
    lead = None if plan is None else [list(row) for row in plan.lead]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return pod.PodForCausalLM(pod.PodConfig(**SIZES, **WINDOWS, lead=lead)).to(dtype).eval()


@pytest.fixture(scope="session")
def dense_model():
    return build(None)


@pytest.fixture(scope="session")
def pod_model():
    return build(PLAN)


@pytest.fixture(scope="session")
def text():
    """[3, 64] tokens."""
    return torch.randint(SIZES["vocab_size"], (3, 64), generator=torch.Generator().manual_seed(5))
