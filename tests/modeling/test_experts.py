"""A mixture of experts: equal to one expert after the other, and the host never asks what goes where."""

from types import SimpleNamespace

import pytest
import torch
from host_reads import none_allowed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import pod
from pod.modeling.model import experts as module
from pod.modeling.model.decoder_layer import PodMoE
from pod.modeling.model.experts import PodExperts, takes_grouped_mm

HIDDEN, INNER = 16, 24
CASES = [(1, 6, 3), (3, 9, 2), (5, 4, 2), (80, 5, 2), (301, 3, 1), (700, 7, 7)]
"""Tokens, experts, experts of a token."""


def make(experts, dtype=torch.float64, per_token=1):
    config = pod.PodConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        moe_intermediate_size=INNER,
        num_experts=experts,
        num_experts_per_tok=per_token,
        initializer_range=0.3,
    )
    torch.manual_seed(experts)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return PodMoE(config) if per_token > 1 else PodExperts(config)
    finally:
        torch.set_default_dtype(before)


def make_inputs(tokens, experts, per_token, dtype=torch.float64, favourite=False):
    """Hidden states, each token's experts, their weights; favourite: all tokens go to the last experts."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    if favourite:
        logits += torch.arange(experts) * 100
    weights, chosen = logits.softmax(-1).topk(per_token)
    return x, chosen, weights.to(torch.promote_types(dtype, torch.float32))


def one_after_the_other(experts, x, chosen, weights):
    """The definition, an expert and all of its tokens at a time."""
    out = torch.zeros_like(x, dtype=weights.dtype)
    for number, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        token, place = (chosen == number).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up).chunk(2, dim=-1)
        fed = F.linear(experts.act_fn(gate) * up, down)
        out = out.index_add(0, token, fed * weights[token, place, None])
    return out.to(x.dtype)


def results(function, experts, x, chosen, weights):
    """Output, and gradients of both parameters, the tokens and the weights."""
    inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = function(inputs[0], chosen, inputs[1])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = experts.gate_up_proj, experts.down_proj, *inputs
    return out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))


def relative(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("favourite", [False, True], ids=["spread", "all to the same"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gathered", [1 << 28, 2 * HIDDEN * INNER * 2], ids=["at once", "in parts"])
def test_output_and_gradients_in_fp64(case, favourite, gathered, monkeypatch):
    monkeypatch.setattr(module, "_GATHERED", gathered)
    experts, inputs = make(case[1]), make_inputs(*case, favourite=favourite)
    expected = results(lambda *given: one_after_the_other(experts, *given), experts, *inputs)
    with none_allowed():
        found = results(experts, experts, *inputs)
    for one, exact in zip(found, expected, strict=True):
        assert (one - exact).abs().max() <= 1e-13 * exact.abs().max()


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped product", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_exact_as_one_after_the_other(case, dtype, grouped, monkeypatch):
    experts, inputs = make(case[1], dtype), make_inputs(*case, dtype)
    assert takes_grouped_mm(inputs[0], experts.gate_up_proj, is_step=False)
    wide = make(case[1])
    wide.load_state_dict(experts.state_dict())
    given = inputs[0].double(), inputs[1], inputs[2].double()
    exact = results(lambda *given: one_after_the_other(wide, *given), wide, *given)
    plain = results(lambda *given: one_after_the_other(experts, *given), experts, *inputs)
    if not grouped:
        monkeypatch.setattr(module, "takes_grouped_mm", lambda *arguments: False)
    with none_allowed():
        found = results(experts, experts, *inputs)
    for one, simple, truth in zip(found, plain, exact, strict=True):
        assert one.dtype == simple.dtype
        assert relative(one, truth) <= 2 * (relative(simple, truth) + torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_host_is_never_asked(shape, dtype):
    """The router included. What a CUDA graph records must read no values: a replay reads none again."""
    layer = make(8, dtype, per_token=3).eval()
    x = torch.randn(*shape, HIDDEN, dtype=dtype)
    with none_allowed(), torch.no_grad():
        together = layer(x)
    alone = torch.cat([layer(row[None, None]) for row in x.flatten(0, 1)]).view_as(x)
    assert relative(together, alone) <= 4 * torch.finfo(dtype).eps


def test_a_part_without_tokens_has_gradients():
    """Under ZeRO-3 all ranks cut their tokens into as many parts, also one that has fewer tokens."""
    experts, inputs = make(4, torch.float32), make_inputs(0, 4, 2, torch.float32)
    out, *gradients = results(experts, experts, *inputs)
    assert out.shape == (0, HIDDEN)
    assert all(not gradient.any() for gradient in gradients)
    assert gradients[0].shape == experts.gate_up_proj.shape


class OnCuda(SimpleNamespace):
    """The attributes of a tensor on CUDA that the choice of a product reads."""

    def __len__(self):
        return self.shape[0]


def on_cuda(*shape, dtype, offset=0):
    device = torch.device("cuda", 0)
    return OnCuda(shape=shape, dtype=dtype, device=device, storage_offset=lambda: offset)


@pytest.mark.parametrize(
    ("dtype", "capability", "is_step", "takes"),
    [
        (torch.bfloat16, (9, 0), True, True),
        (torch.bfloat16, (10, 0), True, True),
        (torch.bfloat16, (8, 0), True, False),
        (torch.bfloat16, (8, 0), False, True),
        (torch.bfloat16, (12, 0), True, False),
        (torch.float32, (9, 0), True, False),
        (torch.float32, (9, 0), False, True),
        (torch.float64, (9, 0), False, False),
    ],
    ids=str,
)
def test_which_product_runs_on_cuda(dtype, capability, is_step, takes, monkeypatch):
    """PyTorch's grouped product reads the groups on the host but for bfloat16 on Hopper and Blackwell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows, weight = on_cuda(6, HIDDEN, dtype=dtype), on_cuda(4, INNER, HIDDEN, dtype=dtype)
    assert takes_grouped_mm(rows, weight, is_step) == takes
    assert not takes_grouped_mm(rows, on_cuda(4, INNER, HIDDEN, dtype=dtype, offset=1), is_step)
    assert not takes_grouped_mm(on_cuda(6, 15, dtype=dtype), on_cuda(4, INNER, 15, dtype=dtype), is_step)
    assert not takes_grouped_mm(on_cuda(6, 24, dtype=dtype), on_cuda(4, 15, 24, dtype=dtype), is_step)
    assert not takes_grouped_mm(on_cuda(0, HIDDEN, dtype=dtype), weight, is_step)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped product", "blocks"])
@pytest.mark.parametrize("shape", [(1, 1), (64, 1), (2, 40)], ids=str)
def test_shapes_depend_on_no_value(shape, grouped, monkeypatch):
    """Fake tensors have no values: they refuse to be read, and mixed devices. `meta` stands for a GPU."""
    monkeypatch.setattr(module, "takes_grouped_mm", lambda *arguments: grouped)
    with FakeTensorMode(), torch.device("meta"):
        layer = make(8, torch.bfloat16, per_token=2)
        out = layer(torch.empty(*shape, HIDDEN, dtype=torch.bfloat16))
        assert (out.shape, out.dtype, out.device.type) == ((*shape, HIDDEN), torch.bfloat16, "meta")
        out.sum().backward()
        for weight in layer.parameters():
            assert weight.grad.shape == weight.shape
