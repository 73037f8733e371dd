"""`shared_qk`: the queries and keys that a lead hands on.

It is exact under checkpointing and compilation, and no larger than promised.
"""

import pytest
import torch

from pod.modeling.model.attend import take_heads
from pod.modeling.model.decoder_layer import next_shared_qk


def loss_and_gradients(model, ids, doc_ids=None):
    model.zero_grad()
    loss = model(ids, labels=ids, doc_ids=doc_ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama-linear-mha", "mistral", "qwen2-tied", "qwen3-g3"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_is_exact(tools, family, reentrant, packed):
    model = tools.make_pod(family).train()
    ids = tools.random_ids(2, 60)
    doc_ids = torch.tensor([0] * 40 + [1] * 18 + [-1] * 2).expand(2, -1) if packed else None
    loss, grads = loss_and_gradients(model, ids, doc_ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, checkpointed = loss_and_gradients(model, ids, doc_ids)
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        torch.testing.assert_close(checkpointed[name], grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("backend", ["flash", "reference"])
def test_gradients_equal_finite_differences(tools, backend):
    """Gradients equal finite differences through the whole model.

    They are those of a parameter that acts on other layers only by `shared_qk` (k_proj of a lead).
    """
    model = tools.make_pod("llama", backend=backend).train()
    ids = tools.random_ids(1, 40)
    _, grads = loss_and_gradients(model, ids)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(sign * 1e-6 * direction)
                values.append(model(ids, labels=ids).loss)
                parameter.sub_(sign * 1e-6 * direction)
        slope = (values[0] - values[1]) / 2e-6
        assert (slope - (grads[name] * direction).sum()).abs() <= 1e-6 * slope.abs().clamp(min=1e-2)


@pytest.mark.slow
def test_compiles_without_graph_breaks(tools):
    model = tools.make_pod("llama", backend="reference").eval()
    ids = tools.random_ids(1, 50)
    with torch.no_grad():
        compiled = torch.compile(model.model, fullgraph=True, backend="eager")
        out = compiled(input_ids=ids, use_cache=False).last_hidden_state
        assert (out - model.model(input_ids=ids).last_hidden_state).abs().max() <= 1e-12


def test_shared_qk_holds_only_used_leads(tools):
    """Clones of single heads, dropped after the block's last user (storage bytes, not views)."""
    lead, n, d, groups = tools.lead, 32, 8, 3
    shared_qk = (None,) * 4
    for layer, used in enumerate([1, 2, 2, 0, 0]):
        q, k = torch.randn(1, 2 * groups, n, d), torch.randn(1, 2, n, d)
        shared_qk = next_shared_qk(q, k, lead, layer, shared_qk)
        tensors = [x for x in shared_qk if x is not None]
        assert len(tensors) == 2 * used
        assert sum(x.untyped_storage().nbytes() for x in tensors) == used * (groups + 1) * d * n * 4


def test_take_heads_views_neighbours_and_copies_others():
    x = torch.arange(24.0).view(1, 6, 2, 2)
    assert take_heads(x, [1, 2], groups=2).data_ptr() == x[:, 2].data_ptr()
    assert torch.equal(take_heads(x, [0, 2], groups=2), x[:, [0, 1, 4, 5]])
