"""A weight that is multiplied in parts gives what ``nn.Linear`` gives."""

import pytest
import torch
from torch.nn import functional as F

from pod.modeling.model import decoder_layer
from pod.modeling.model.decoder_layer import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 24), (24,), (2, 1, 24), (1, 3, 24)])
@pytest.mark.parametrize("outputs", [1, 7, 24, 128, 192])
def test_parts_of_a_weight_equal_the_whole(outputs, shape, bias, monkeypatch):
    monkeypatch.setattr(decoder_layer, "_LARGE", 1)
    generator = torch.Generator().manual_seed(outputs)
    linear = Linear(24, outputs, bias=bias).double()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        found = linear(x)
    expected = F.linear(x, linear.weight, linear.bias)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-14


def test_one_row_runs_in_parts_and_no_other_pass_does(monkeypatch):
    monkeypatch.setattr(decoder_layer, "_LARGE", 1)
    called = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *factors: called.append(len(factors[0])) or product(*factors))
    linear = Linear(8, 96, bias=False)
    with torch.no_grad():
        linear(torch.ones(1, 2, 8)), linear.bfloat16()(torch.ones(1, 1, 8).bfloat16())
    linear.float()(torch.ones(1, 1, 8)).sum().backward()
    assert called == [] and linear.weight.grad is not None
    with torch.no_grad():
        linear(torch.ones(1, 1, 8))
    assert called == [32]
