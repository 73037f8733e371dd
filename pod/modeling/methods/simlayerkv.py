"""SimLayerKV (Zhang et al., 2024): layers that attend only to the first and latest tokens keep only those.

A layer is *lazy* for a sequence if the share of its attention that goes to the first ``num_sink_tokens`` and
the last ``num_recent_tokens`` tokens, averaged over its query heads, exceeds ``threshold``. There are two
detectors. ``prefill`` takes the mean over the prompt's last queries, each with its own window (eq. 1).
``decode`` takes the first generated token (eq. 2; the paper's experiments). From then on a lazy layer holds
``num_sink_tokens + num_recent_tokens`` tokens, and every other layer holds all. For comparison, a caller may
name the lazy layers instead: as a list, or as a number of layers to draw at random (Figures 3 and 6).
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pod.kernels.statistics import attention_rows
from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import LastQueries
from pod.modeling.methods.sliding import SlidingLayer
from pod.modeling.model.attend import Tokens, take_heads
from pod.modeling.model.config import PodConfig
from pod.modeling.model.step import Step


class SimLayer(SlidingLayer):
    """A layer for a single row, because a layer may be lazy for one sequence and not for another.

    Attributes:
        is_given: whether the parameters say if the layer is lazy. No detector judges it then.
        is_lazy: whether only the first and the last tokens are held. Once lazy, a layer stays lazy.
        mass: the share of attention by which the layer was judged last; None = not judged yet.
        judges_next: whether the next decoded token is the first of an answer, by which the ``decode``
            detector judges.
        measured: the mass of that token, on the device, from ``attend`` until ``judge_layers``; else None.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        params = request.params
        self.threshold = params["threshold"]
        self.detector = params["detector"]
        self.num_last_queries = params["num_last_queries"]
        given = given_layers(request, config.num_hidden_layers)
        is_exempt = params["exempt_last_layer"] and layer_idx == config.num_hidden_layers - 1
        self.is_given = given is not None or is_exempt
        self.starts_lazy = layer_idx in (given or ())
        if params["prefill"] == "streaming" and self.detector == "decode" and given is None:
            raise ValueError(
                f"{request.spec}: prefill = 'streaming' compresses before a token is generated; choose "
                "detector='prefill' with it"
            )
        sizes = params["num_sink_tokens"], params["num_recent_tokens"]
        super().__init__(config, layer_idx, *sizes, request.quantizer)

    def clear(self) -> None:
        super().clear()
        self.is_lazy, self.judges_next, self.mass = self.starts_lazy, False, None
        self.measured: Tensor | None = None
        self.queries = LastQueries(self.num_last_queries)

    def kv_buffers(self) -> dict[str, Any]:
        return super().kv_buffers() | {"bookkeeping": self.queries}

    def decisions(self, row: int) -> dict[str, float | None]:
        """Whether the layer is lazy (1.0 or 0.0), and its ``mass``. ``row`` is ignored: there is one only."""
        return {"lazy": float(self.is_lazy), "mass": self.mass}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.ropes[self.layer_idx].pair(q, k)
        assert q.shape[0] == 1, "one row at a time: its layers are judged by what it attends to"
        new = Tokens(k, v)
        can_change = not (self.is_lazy or self.is_given)
        if step.is_decode:
            out, weights = self.tokens.attend_decode(q, new, self.scale)
            if self.judges_next and can_change:
                self.measured = self._mass([weights.flatten(1, 2).unsqueeze(2)])
            self.judges_next = False
            return out
        out = self.tokens.attend_prompt(q, new, step)
        if self.detector == "prefill" and can_change:
            self.queries.observe(q, step)
        return out

    def _mass(self, parts: Iterable[Tensor]) -> Tensor:
        """The share of attention that goes to the first and the latest tokens, from 0 to 1.

        Args:
            parts: attention ``[1, heads, w, n]`` of the last queries; each part has equally many heads.
        """
        sizes = self.num_sink_tokens, self.num_recent_tokens
        return torch.stack([lazy_mass(rows, *sizes) for rows in parts]).mean()

    def judge(self, mass: float) -> None:
        """Decide whether the layer is lazy, given the share of attention to its first and latest tokens."""
        self.mass = mass
        self.is_lazy = mass > self.threshold

    def _prompt_rows(self, queries: Tensor) -> Iterator[Tensor]:
        """Attention ``[1, G, w, n]`` of the prompt's last queries, for one KV head after the other."""
        keys = self.tokens.beside.keys.read(self.tokens.num_beside)
        for head in range(keys.shape[1]):
            own = take_heads(queries, [head], queries.shape[1] // keys.shape[1])
            yield attention_rows(own, keys[:, head : head + 1], scale=self.scale)

    def flush(self, step: Step) -> None:
        """When a prompt ends, judge the layer by its last queries, and trim it if it is lazy.

        After a decoded token by which the layer is judged, ``judge_layers`` does this.
        """
        if not (step.ends_prompt or step.is_decode):
            return
        if not step.is_decode:
            if self.queries.observed is not None:
                self.judge(float(self._mass(self._prompt_rows(self.queries.observed))))
            self.queries = LastQueries(self.num_last_queries)
            self.judges_next = self.detector == "decode" and not self.is_given
        if self.measured is None:
            self.rest()

    def adopt(self, other: "SimLayer") -> None:
        """Take over the decision of ``other``, a copy of this layer that saw the first generated token."""
        self.is_lazy, self.mass, self.judges_next = other.is_lazy, other.mass, False
        self.rest()

    def rest(self) -> None:
        """Trim the layer if it is lazy, and flush its buffers."""
        if self.is_lazy:
            self.tokens.trim(self.num_recent_tokens)
        # a layer that is judged next may be trimmed then: its tokens would be packed a second time
        if self.is_lazy or not self.judges_next:
            self.tokens.flush()


def judge_layers(layers: Sequence[SimLayer], step: Step, label: None) -> None:
    """Judge the layers that measured their mass with the first token of an answer.

    It runs when the token has passed all layers, so that the masses are read from the device at once.
    """
    measured = [(layer, layer.measured) for layer in layers if layer.measured is not None]
    if not measured:
        return
    device = measured[0][1].device  # layers may lie on several devices
    masses = torch.stack([mass.to(device) for _, mass in measured]).tolist()
    for (layer, _), mass in zip(measured, masses, strict=True):
        layer.measured = None
        layer.judge(mass)
        layer.rest()


def given_layers(request: Request, num_layers: int) -> set[int] | None:
    """The layers that the parameters make lazy: listed, or drawn at random. None = a detector decides.

    Raises:
        ValueError: the list does not hold different layers of the model, it has fewer layers than are to be
            drawn from it, or ``exempt_last_layer`` was set although no detector decides.
    """
    listed = request.params["lazy_layers"]
    count = request.params["num_lazy_layers"]
    seed = request.params["seed"]
    exempts = request.params["exempt_last_layer"]
    if listed is None and count is None:
        return None
    layers = list(range(num_layers)) if listed is None else listed
    are_whole = isinstance(layers, list) and {type(layer) for layer in layers} <= {int}
    known = are_whole and set(layers) <= set(range(num_layers))
    if not known or len(set(layers)) < max(len(layers), count or 0) or exempts:
        raise ValueError(
            f"{request.spec}: lazy_layers = {listed!r} must be a list of different layers from 0 to "
            f"{num_layers - 1}, at least num_lazy_layers = {count!r} of them, and "
            f"exempt_last_layer = {exempts} needs a detector"
        )
    draw = random.Random(seed)
    return set(sorted(sorted(layers), key=lambda layer: draw.random())[:count])


def lazy_mass(rows: Tensor, num_sink_tokens: int, num_recent_tokens: int) -> Tensor:
    """The share of attention to the first ``num_sink_tokens`` and the last ``num_recent_tokens`` (eq. 1).

    The last tokens are counted from each query, itself included.

    Args:
        rows: attention ``[B, Hq, w, n]`` of the queries at the last ``w`` of ``n`` positions.

    Returns:
        The mean over queries, heads and batch: a number from 0 to 1.
    """
    n, device = rows.shape[-1], rows.device
    query = torch.arange(n - rows.shape[2], n, device=device)[:, None]
    key = torch.arange(n, device=device)
    near = (key < num_sink_tokens) | (query - key < num_recent_tokens)
    return (rows * near).sum(-1).mean()


BUILDERS = {"simlayerkv": Builder(build=cache_of(SimLayer, rowwise=True, after_layers=judge_layers))}
