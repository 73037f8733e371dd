"""FlexAttention on the CPU, unfused and with gradients: for tests of what is computed, not of the kernels.

PyTorch refuses gradients on the CPU. Its unfused form, which it would compile anew for every call, has a
backward all the same: here it runs as it stands.
"""

from torch.nn.attention import flex_attention as torch_flex

from pod.modeling.model.attend import IMPLEMENTATIONS


def install(monkeypatch):
    """Let ``attend(…, backend="flex")`` run here."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    runs_here = IMPLEMENTATIONS["flex"]._replace(unsupported=lambda call: None)
    monkeypatch.setitem(IMPLEMENTATIONS, "flex", runs_here)
