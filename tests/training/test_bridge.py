"""DeepSpeed behind one file.

Nothing else touches it, another version is named, and steps lie where the weights are.
"""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_reads import none_allowed
from torch.nn import functional as F

import pod
from pod.training import deepspeed_bridge as bridge

BRIDGE = Path(bridge.__file__)
PRIVATE = re.compile(
    r"^\s*(from|import) deepspeed|\bds_(id|status|tensor|shape|numel)\b"
    r"|_hp_mapping|fp32_partitioned|single_partition|grad_position"
    r"|optimizer\.optimizer|optimizer\.overflow|parallel_state_sp|__compatible_ops__"
    r"|build_shm_op|TorchBackend"
    r"|norm_for_param_grads|_do_optimizer_sanity_check",
    re.MULTILINE,
)


def test_nothing_else_in_the_package_touches_deepspeed():
    found = {
        str(file.name): match.group()
        for file in Path(pod.__file__).parent.rglob("*.py")
        if file != BRIDGE and (match := PRIVATE.search(file.read_text(encoding="utf-8")))
    }
    assert not found
    assert PRIVATE.search(BRIDGE.read_text(encoding="utf-8")), "the pattern must find what is there"


def test_all_parts_are_in_the_installed_version():
    bridge.check_parts()


@pytest.mark.parametrize(
    ("part", "names", "says"),
    [
        ("deepspeed.runtime.engine:DeepSpeedEngine._gone", "", r"DeepSpeedEngine\._gone is missing"),
        ("deepspeed.no_such_module:thing", "", r"deepspeed\.no_such_module\.thing is missing"),
        ("deepspeed:initialize", "model modell", r"deepspeed\.initialize does not take modell\."),
    ],
)
def test_another_version_is_named_in_one_line(part, names, says):
    with pytest.raises(ValueError, match=says) as refused:
        bridge.check_parts({part: names})
    assert f"pip install deepspeed=={bridge.TESTED}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_joining_ranks_asks_for_no_compiled_operation(monkeypatch):
    """Each of them starts compilers and queries GPUs to say whether it can be compiled, on every rank."""
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    built = []
    for owner, name in ((backend, "build_shm_op"), (backend.TorchBackend, "new_group")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be restored
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(
        deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("asks for all operations")
    )
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: built.append(backend.build_shm_op()))
    bridge.join_ranks(60.0)
    assert built == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 60])
def test_the_loss_waits_for_nothing_and_has_the_gradients_of_deepspeeds_own(rows, dtype):
    """To the last bit, and those of plain PyTorch. Labels are in all parts of the vocabulary."""
    stock = importlib.import_module("deepspeed.sequence.linear_cross_entropy")
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(2, 15, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 23, (2, 15), generator=generator)
    labels[0, 3:7] = labels[1, -1] = -100
    with none_allowed():
        loss = bridge.linear_cross_entropy(hidden, weight, labels, -100, rows)
        found = torch.autograd.grad(loss * 0.3, (hidden, weight))
    given = hidden.flatten(0, 1), weight, None, labels.flatten(), None, 0, 23, -100, rows, dtype
    expected = stock._VocabParallelLinearCrossEntropy.apply(*given).sum()
    assert torch.equal(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected * 0.3, (hidden, weight)), strict=True):
        assert torch.equal(one, other)
    plain = F.cross_entropy(
        (hidden.double() @ weight.double().T).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    for one, exact in zip(found, torch.autograd.grad(plain * 0.3, (hidden, weight)), strict=True):
        assert (one.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.double().norm()


def test_loaded_steps_lie_on_the_device_of_their_weights():
    """A fused AdamW refuses others. The meta device stands for a GPU."""
    weights = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in ("meta", "meta", "cpu")]
    optimizer = torch.optim.AdamW(weights, fused=None)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=optimizer, fp32_partitioned_groups_flat=weights)
    )
    bridge.set_updates(engine, 7)
    states = [optimizer.state[weight] for weight in weights]
    assert [each["step"].device.type for each in states] == ["meta", "meta", "cpu"]
    assert len({id(each["step"]) for each in states}) == 3
    assert states[2]["step"] == 7 and states[2]["exp_avg"].tolist() == [0, 0, 0]
    kept = states[2]["exp_avg"]
    bridge.set_updates(engine, 8)
    assert states[2]["exp_avg"] is kept and states[2]["step"] == 8
    bridge.set_updates(engine, 0)
    assert not any(optimizer.state[weight] for weight in weights)
