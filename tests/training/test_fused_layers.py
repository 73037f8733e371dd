"""Compiled norms, rotation and gates: loss and every gradient as near to fp64 as without them."""

import copy

import pytest
import torch
from tiny import VOCAB, make_model

from pod.training.run.fused_layers import fuse_layers


def loss_and_gradients(model, input_ids, doc_ids):
    loss = model(input_ids, doc_ids=doc_ids, labels=input_ids).loss
    loss.backward()
    return loss.item(), {name: one.grad.double() for name, one in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_layers_change_rounding_only(dtype, checkpointing):
    plain = make_model(dtype=dtype).train()
    if checkpointing:
        plain.gradient_checkpointing_enable()
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    fuse_layers(fused)
    input_ids = torch.randint(0, VOCAB, (2, 37))
    doc_ids = (torch.arange(37) >= 20).long().expand(2, -1)
    (true, right), (expected, wanted), (loss, found) = (
        loss_and_gradients(model, input_ids, doc_ids) for model in (exact, plain, fused)
    )
    rounding = torch.finfo(dtype).eps
    assert abs(loss - true) <= 2 * (abs(expected - true) + rounding * true)
    for name, gradient in right.items():
        allowed = 2 * ((wanted[name] - gradient).norm() + rounding * gradient.norm())
        assert (found[name] - gradient).norm() <= allowed, name


def test_every_kind_of_layer_is_fused():
    model = make_model()
    names = [
        *(
            f"model.layers.{i}.{norm}"
            for i in range(4)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
        "model.norm",
    ]
    before = {name: model.get_submodule(name).norm for name in names}
    gates = [layer.mlp.gate for layer in model.model.layers]
    turned = model.model.rotate
    fuse_layers(model)
    assert all(model.get_submodule(name).norm is not before[name] for name in names)
    assert all(layer.mlp.gate is not gate for layer, gate in zip(model.model.layers, gates, strict=True))
    assert model.model.rotate is not turned
