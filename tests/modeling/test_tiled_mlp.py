"""Feed-forward tiles in training.

Gradients are those of the whole, and there is no activation of [tokens, intermediate_size].
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pod
from pod.modeling.model.decoder_layer import PodMLP

HIDDEN, INNER = 16, 40
CONFIG = {
    "vocab_size": 31,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "mlp_bias": True,
}


def make_mlp(tiles):
    torch.manual_seed(0)
    mlp = PodMLP(pod.PodConfig(**CONFIG)).double()
    mlp.train_tiles = tiles
    return mlp


def close(got, expected):
    assert torch.linalg.vector_norm(got - expected) <= 1e-12 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(("tokens", "tiles"), [(23, 2), (23, 5), (24, 24), (3, 4), (1, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_output_and_gradients_equal_one_piece(tokens, tiles, rows):
    """Output and gradients equal one piece.

    Ragged tiles, tiles of one token, and more tiles than tokens, as the shortest slice of a group can have.
    """
    x = torch.randn(rows, tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction = torch.randn_like(x)
    results = []
    for count in (1, tiles):
        mlp, leaf = make_mlp(count), x.clone().requires_grad_()
        out = mlp(leaf)
        (out * direction).sum().backward()
        results.append([out.detach(), leaf.grad, *(parameter.grad for parameter in mlp.parameters())])
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected)


class WidestActivation(TorchDispatchMode):
    """Most tokens of a tensor [..., tokens, intermediate_size] that an operation returned.

    Also most tokens of all such tensors that lived at a time.
    """

    def __init__(self):
        super().__init__()
        self.tokens = self.live_tokens = 0
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 3 and leaf.shape[-1] == INNER:
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), leaf.numel() // INNER
                self.tokens = max(self.tokens, leaf.numel() // INNER)
        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        self.live_tokens = max(self.live_tokens, sum(tokens for _, tokens in self.seen.values()))
        return result


def widest(tiles, checkpointing, tokens=330):
    torch.manual_seed(0)
    model = pod.PodForCausalLM(pod.PodConfig(**CONFIG)).train()
    for layer in model.model.layers:
        layer.mlp.train_tiles = tiles
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 31, (1, tokens), generator=torch.Generator().manual_seed(2))
    with WidestActivation() as forward:
        loss = model(ids, labels=ids).loss
    with WidestActivation() as backward:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (forward.tokens, backward.tokens), (forward.live_tokens, backward.live_tokens), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_whole_activation_exists_in_forward_or_backward(checkpointing):
    whole, whole_live, expected = widest(1, checkpointing)
    tiled, tiled_live, got = widest(5, checkpointing)
    assert whole == (330, 330)
    assert tiled == (66, 66)
    assert all(live <= 6 * 66 for live in tiled_live), "several tiles lived at a time"
    assert min(whole_live) > 6 * 66
    for name, gradient in expected.items():
        assert torch.linalg.vector_norm(got[name] - gradient) <= 1e-5 * torch.linalg.vector_norm(gradient), (
            name
        )


@pytest.mark.parametrize(("tiles", "parts"), [(1, 1), (4, 4), (12, 12), (None, 1)])
def test_without_gradients_as_many_parts_are_computed(tiles, parts, monkeypatch):
    """Every part gathers the weights under ZeRO-3: ranks with fewer tokens than parts compute empty ones."""
    x, calls = torch.randn(1, 9, HIDDEN, dtype=torch.float64), []
    whole = make_mlp(1)
    mlp = make_mlp(tiles)
    whole = mlp.whole
    monkeypatch.setattr(mlp, "whole", lambda part: calls.append(part) or whole(part))
    with torch.no_grad():
        close(mlp(x), whole(x))
    assert len(calls) == parts
