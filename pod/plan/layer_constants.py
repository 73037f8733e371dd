"""The constants that stand for the first tokens in the windows of one layer."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pod.modeling.model.sinks import Sink

TENSORS = ("sink_logits", "sink_values", "sink_keys")
"""Names of the constants of all layers among measured tensors: those of ``LayerConstants``, stacked."""


class LayerConstants(NamedTuple):
    """The constants of one layer. Heads are in the original order.

    Attributes:
        logits: ``[Hq]``, a scaled logit per query head.
        values: ``[H, d]``, a value per KV head.
        keys: ``[H, d]``, a key per KV head, see ``pod.modeling.model.sinks``. None = there are none.
    """

    logits: Tensor
    values: Tensor
    keys: Tensor | None = None

    @property
    def sink(self) -> Sink:
        """What joins the softmax of a window whose keys are relative to ``keys``."""
        return Sink(self.logits, self.values)

    def cpu(self) -> "LayerConstants":
        keys = None if self.keys is None else self.keys.cpu()
        return LayerConstants(self.logits.cpu(), self.values.cpu(), keys)

    def are_finite(self) -> bool:
        return all(x is None or bool(x.isfinite().all()) for x in self)


def stacked(constants: list[LayerConstants]) -> dict[str, Tensor]:
    """The constants of all layers as measured tensors, by name. Keys are of all layers, or of none."""
    found = {
        "sink_logits": torch.stack([one.logits for one in constants]),
        "sink_values": torch.stack([one.values for one in constants]),
    }
    keys = [one.keys for one in constants if one.keys is not None]
    if keys:
        found["sink_keys"] = torch.stack(keys)
    return found


def measured_constants(tensors: Mapping[str, Tensor]) -> list[LayerConstants] | None:
    """The constants of each layer among measured tensors (see ``MeasuredCosts``); None = there are none."""
    if TENSORS[0] not in tensors:
        return None
    present = [tensors[name] for name in TENSORS if name in tensors]
    return [LayerConstants(*one) for one in zip(*present, strict=True)]
