"""Distillation of attention: each layer of the model under its plan learns the output of the dense layer.

The divergence of `distillation.py` says only at the end of the model what a window has changed. Here the
error of attention in every layer is part of the loss too. The error of a token is the mean over layers of

    ‖o - o*‖² / ‖o*‖²

where o is the layer's output of attention, after the output projection, and o* is the dense model's. This is
after the attention transfer of LoLCATs (Zhang et al., 2024). Here a layer reads the states of the model under
its plan, not those of the dense model, so it also answers for the errors of the layers below.

Outputs are read by hooks. So the model needs no code for it, and a layer that is computed again for its
backward (activation checkpointing) reads them in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pod.data.rows.loader import IGNORED_LABEL


class AttentionMatching:
    """Compares each layer's output of attention with that of the dense model.

    Use, for each micro-batch:

        with matching.teaching():
            ...                                 # the dense model reads the tokens
        with matching.learning(labels):
            ...                                 # the model under its plan reads them
        error = matching.error()                # with gradients

    A target is freed after its last use. Nothing else may run the model between `learning` and the end of the
    backward pass.

    Args:
        model: a PodForCausalLM. Hooks stay on its layers.
    """

    def __init__(self, model: Any):
        self._decoder = model.model
        self._targets: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}
        self._counted: Tensor | None = None
        self._mode = "off"
        for index, layer in enumerate(self._decoder.layers):
            # with its adapters; ZeRO-3 must be able to take the hooks of `layer.self_attn` itself away
            layer.self_attn.o_proj.register_forward_hook(partial(self._read, index))

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Keep what attention gives in each layer, as what is to be learnt."""
        self._mode = "teach"
        try:
            yield
        finally:
            self._mode = "off"

    @contextmanager
    def learning(self, labels: Tensor) -> Iterator[None]:
        """Compare what attention gives in each layer with what was taught.

        Layers that are computed again in the backward pass are compared again, after this context has ended:
        checkpointing needs the same operations both times.

        Args:
            labels: ``[B, n]``. Tokens without a label (-100) do not count.
        """
        self._counted = labels != IGNORED_LABEL
        self._mode = "learn"
        try:
            yield
        finally:
            self._mode = "again"  # for layers whose targets are still here

    def error(self) -> Tensor:
        """The sum over the labelled tokens of their error, a scalar in fp32. Call it once per micro-batch."""
        errors, self._errors = self._errors, {}
        assert len(errors) == len(self._decoder.layers), "every layer was taught, and has learnt"
        return torch.stack(list(errors.values())).mean()

    def _read(self, index: int, _module: Any, _inputs: Any, out: Tensor) -> None:
        """The hook of a layer."""
        if self._mode == "teach":
            self._targets[index] = out.detach()
        if self._mode not in ("learn", "again") or index not in self._targets:
            return  # for example an evaluation after the backward pass, when no target is left
        assert self._counted is not None, "labels are known while a model learns"
        is_last = self._mode == "again" or not self._decoder.gradient_checkpointing
        target = self._targets.pop(index) if is_last else self._targets[index]
        error: Any = _RelativeError.apply(out, target, self._counted)
        if self._mode == "learn":
            self._errors[index] = error


class _RelativeError(torch.autograd.Function):
    """apply(out, target, counted) → Σ ‖out - target‖² / ‖target‖² over counted tokens, a scalar in fp32.

    Args are ``[B, n, hidden]`` twice and ``[B, n]``. A target of zeros, or one so small that dividing by its
    square overflows, counts nothing. Only ``out`` has gradients; ``out`` and ``target`` are kept for them.
    """

    @staticmethod
    def forward(ctx, out, target, counted):
        size = _squared_norm(target)
        counted = counted & (size > 4 / torch.finfo(size.dtype).max)
        error = _squared_norm(out - target) / size
        ctx.save_for_backward(out, target, size, counted)
        return torch.where(counted, error, 0.0).sum()

    @staticmethod
    def backward(ctx, *grad_outputs):
        out, target, size, counted = ctx.saved_tensors
        factor = torch.where(counted, 2.0 / size, 0.0)[..., None] * grad_outputs[0]
        change = torch.where(counted[..., None], out - target, 0.0)
        return (change * factor).to(out.dtype), None, None


def _squared_norm(x: Tensor) -> Tensor:
    """``Σ x²`` over the last dimension, in fp32 (fp64 for fp64)."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.square().sum(-1)
