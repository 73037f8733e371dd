"""The fused step of the decode engine.

Its launches are counted, its logits compared; it leaves the layers to their modules when it must. What needs
the Triton kernels runs in another process with Triton's interpreter: this file, started as a script.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import pod
from pod.modeling.model.decoder_layer import RMSNorm

_TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(_TESTS / "kernels"))
import interpreter  # noqa: E402
from interpreter import needs_triton  # noqa: E402

LIMIT = 15  # launches per layer
LEAD = [[0, 0], [0, 0], [2, 0]]
ROLES = [[0, None], [None, 1], [0, 1]]
WINDOWS = [[None, None]] * 3
PACKING = {"group_size": 8, "residual": 3}
CASES = [  # family, changes, plan, spec, tau
    ("qwen3-g3", {"head_dim": 20}, None, "full", None),
    ("qwen3", {}, LEAD, "pod", 0.3),
    ("llama-tied-biased-llama3", {}, LEAD, "pod", None),
    ("qwen2-yarn", {"num_attention_heads": 8, "num_key_value_heads": 1}, LEAD, "pod", None),
    ("llama-linear-mha", {"head_dim": 32}, LEAD, "pod+int4", None),
    ("qwen3", {"head_dim": 32}, LEAD, "pod+int4", 0.3),
    ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2}, ROLES, "pod", 0.3),
    (
        "llama-linear-mha",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
        ROLES,
        "pod",
        None,
    ),
    ("llama", {}, WINDOWS, "pod", None),
    ("llama", {"head_dim": 32}, ROLES, "pod+int4", None),
]
_FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "_unsafe_view",
    "promote_types",
}  # no arithmetic


class Launches(TorchDispatchMode):
    """Names of the operations that would be one launch each on CUDA, in order.

    Those of Triton come by their kernel.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        self.names: list[str] = []
        from pod.kernels import triton_launch

        run = triton_launch.run
        patch.setattr(triton_launch, "run", lambda *args, **options: self.launch(run, *args, **options))

    def launch(self, run, kernel, *args, **options):
        self.names.append(kernel.fn.__name__)
        with _disable_current_modes():
            run(kernel, *args, **options)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def layers(self) -> list[list[str]]:
        """Those of each layer, which begins with a norm and has another one before its feed-forward."""
        norms = [i for i, name in enumerate(self.names) if name == "add_norm_kernel"]
        return [self.names[i:j] for i, j in zip(norms[:-1:2], norms[2::2], strict=True)]


def load_tools():
    spec = importlib.util.spec_from_file_location("modeling_conftest", _TESTS / "modeling" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def feed(model, cache, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def case_answers(tools, family, changes, plan, spec, tau) -> dict:
    """The largest difference of the logits to the ordinary pass, and the launches of one token.

    The difference is relative to the largest logit.
    """
    windows = (4, 11) if "int4" in spec else (2, 5)
    stock = tools.make_stock(family, torch.float32, num_hidden_layers=3, **changes)
    heads = range(stock.config.num_key_value_heads)
    model = pod.load_model(
        stock,
        plan=pod.SharingPlan([[row[head % 2] for head in heads] for row in plan]) if plan else None,
        num_sink_tokens=windows[0],
        num_recent_tokens=windows[1],
    )
    options = ({} if tau is None else {"tau": tau}) | (PACKING if "int4" in spec else {})
    plain, ours = (pod.make_cache(model, spec, **options, **room) for room in ({}, {"capacity": 48}))
    ours.engine.backend = "triton"
    ids, mask = tools.random_ids(2, 16), torch.ones(2, 16, dtype=torch.long)
    if "int4" not in spec:
        mask[0, :9] = mask[1, :2] = 0
    for cache in (plain, ours):
        feed(model, cache, ids[:, :14], mask[:, :14])
    worst, tokens, patch = 0.0, 2, pytest.MonkeyPatch()
    for column in range(14, 14 + tokens):
        part = ids[:, column : column + 1], mask[:, : column + 1]
        expected = feed(model, plain, *part)
        if column == 13 + tokens:
            with Launches(patch) as counted:
                found = feed(model, ours, *part)
            patch.undo()
        else:
            found = feed(model, ours, *part)
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    assert (ours.engine.steps, ours.engine.unfused) == (tokens, None)
    return {"error": worst, "layers": counted.layers(), "all": len(counted.names)}


def interpret() -> dict:
    tools = load_tools()
    return interpreter.broken() or {"cases": [case_answers(tools, *case) for case in CASES]}


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.answers(__file__)


@pytest.mark.nightly
@needs_triton
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_logits_of_the_kernels_are_those_of_the_ordinary_pass(interpreted, index):
    assert interpreted["cases"][index]["error"] < 2e-5


@pytest.mark.nightly
@needs_triton
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_launches_per_layer(interpreted, index):
    found = interpreted["cases"][index]["layers"]
    products = {"mm", "addmm"}
    assert len(found) == len(LEAD)
    for names in found:
        assert len(names) <= LIMIT, names
        assert sum(name in products for name in names) == 7
        assert all(name in products or name.endswith("_kernel") for name in names), names


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, as adapters wrap them."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.to(base.weight.dtype)

    def forward(self, x):
        assert x.dim() == 3
        return self.base(x) + self.up(self.down(x))


class OtherNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) + 0.5


def other_norm(layer):
    layer.input_layernorm = OtherNorm(48, 1e-5).double()


def adapters(layer):
    layer.self_attn.k_proj, layer.mlp.down_proj = (
        Adapted(layer.self_attn.k_proj),
        Adapted(layer.mlp.down_proj),
    )
    layer.self_attn.q_proj.register_forward_hook(lambda module, inputs, out: out * 0.5)


def own_forward(layer):
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 2


def other_gate(layer):
    layer.mlp.act_fn = nn.ReLU()


CHANGES = [
    (adapters, None),
    (other_norm, "OtherNorm in place of RMSNorm"),
    (own_forward, "a hook on a PodMLP"),
    (other_gate, "ReLU in place of"),
    (
        lambda layer: layer.register_forward_hook(lambda m, i, out: (out[0] * 2, *out[1:])),
        "a hook on a PodDecoderLayer",
    ),
    (
        lambda layer: layer.self_attn.register_forward_pre_hook(lambda m, i: (i[0] * 2, *i[1:])),
        "a hook on a PodAttention",
    ),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_what_a_model_carries_counts(tools, change, reason):
    """Adapters and hooks on linear layers are called.

    For other ones the layers run as they are, and the engine says why.
    """
    model = tools.make_pod("qwen3-g3", windows=(2, 5))
    ids, mask = tools.random_ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    bare = feed(model, None, ids, mask)
    change(model.model.layers[2])
    cache = pod.make_cache(model, "pod", capacity=32)
    feed(model, cache, ids[:, :20], mask[:, :20])
    found = [feed(model, cache, ids[:, n : n + 1], mask[:, : n + 1]) for n in range(20, 30)]
    expected = feed(model, None, ids, mask)
    assert (torch.cat(found, dim=1) - expected[:, 20:]).abs().max() < 1e-11
    assert (expected - bare).abs().max() > 1e-3, "the change must show"
    assert cache.engine.steps == 10
    assert (cache.engine.unfused is None) if reason is None else (reason in cache.engine.unfused)


if __name__ == "__main__":
    print(json.dumps(interpret()))
