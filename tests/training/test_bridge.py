"""DeepSpeed behind one file: nothing else touches it, another version is named, steps lie where the weights are."""

import re
from pathlib import Path

import pytest
import torch

import pod
from pod.training import deepspeed_bridge as bridge

BRIDGE = Path(bridge.__file__)
PRIVATE = re.compile(
    r"^\s*(from|import) deepspeed|\bds_(id|status|tensor|shape|numel)\b|_hp_mapping|fp32_partitioned|checkpoint_engine"
    r"|_copy_recovery_script|optimizer\.optimizer|optimizer\.overflow|parallel_state_sp|__compatible_ops__|global_steps"
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
        ("deepspeed.runtime.engine:DeepSpeedEngine._gone", (), r"DeepSpeedEngine\._gone is missing"),
        ("deepspeed.no_such_module:thing", (), r"deepspeed\.no_such_module\.thing is missing"),
        ("deepspeed:initialize", ("model", "modell"), r"deepspeed\.initialize does not take modell;"),
    ],
)
def test_another_version_is_named_in_one_line(part, names, says):
    with pytest.raises(ValueError, match=says) as refused:
        bridge.check_parts({part: names})
    assert f"tested with {bridge.TESTED}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_loaded_steps_lie_on_the_device_of_their_weights():
    """A fused AdamW refuses others. The meta device stands for a GPU, the steps come from a file, one for all weights."""
    weights = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in ("meta", "meta", "cpu")]
    optimizer = torch.optim.AdamW(weights, fused=None)
    step = torch.tensor(7.0)
    for weight in weights:
        optimizer.state[weight]["step"] = step
    bridge.place_steps(optimizer)
    steps = [optimizer.state[weight]["step"] for weight in weights]
    assert [each.device.type for each in steps] == ["meta", "meta", "cpu"]
    assert len({id(each) for each in steps}) == 3
    assert steps[2] == 7 and steps[2] is not step
