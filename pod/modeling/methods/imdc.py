"""IMDC (Zeng et al., "Memorize Step by Step"): prompts are read in chunks over a compressed memory, so inputs may be unbounded.

A chunk attends to the memory and to itself; then a pruner compresses both into the next memory. ``fm`` keeps a memory of
``budget`` tokens throughout, ``im`` lets it grow to that, ``imdc`` shrinks the chunks as it grows (``imdc_schedule``). Keys
are stored before RoPE, and positions count memory, chunk and decoded tokens anew at every step. Decoded tokens are
appended; the next prompt starts from what is held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.imdc_schedule import (
    FUNCTIONS,
    PromptSchedule,
    Settings,
    prompt_schedule,
    share_by_retention,
)
from pod.modeling.methods.ranking import LastQueries, check_ranking, ranking_parameters, snapkv_slots
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.shipped.attend import Tokens, attend
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import attend_slots
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import Codec

Pruner = Callable[[Tensor, Tensor, int], Tensor]
"""``(queries [B, Hq, o, d], keys [B, H, n, d], m) -> slots [B, H, m]`` to keep, ascending; both rotated at their slots."""


@dataclass(frozen=True)
class MemoryChunks:
    """Makes the schedule of each prompt from what the layers hold when it starts."""

    settings: Settings

    def start_prompt(self, length: int, past: int, layers: list["MemoryLayer"]) -> PromptSchedule:
        return prompt_schedule(self.settings, length, sum(layer.held for layer in layers) // len(layers))


class MemoryLayer(CacheLayer):
    """Memory, running chunk and decoded tokens of one layer, for rows that are alike; keys before RoPE, slots in order of age.

    Attributes:
        held: slots in use; the first ``memory`` of them were there before the running chunk.
        retention: share of the memory that was memory before the last compression (eq. 2), over all KV heads.
    """

    def __init__(
        self, config: PodConfig, layer_idx: int, codec: Codec, prune: Pruner, window: int, adaptive: bool
    ):
        super().__init__()
        self.layer_idx, self.codec, self.prune, self.window = layer_idx, codec, prune, window
        self.adaptive = adaptive
        self.scale = config.head_dim**-0.5
        self.clear()

    def clear(self) -> None:
        self.keys_store, self.values_store = (
            self.codec.tokens(part, evicts=True) for part in ("keys", "values")
        )
        self.held = self.memory = 0
        self.retention = Fraction(0)
        self.queries = LastQueries(self.window)  # of the running chunk
        self.rotated: Tensor | None = None  # keys, from the end of a chunk to its compression

    def stores(self) -> dict[str, Any]:
        return {"keys": self.keys_store, "values": self.values_store, "bookkeeping": self.queries}

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now; ``length`` tokens were seen."""
        stores = self.keys_store, self.values_store
        return sum(store.predicted_nbytes(self.held) for store in stores if not store.is_empty)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        before = self.held
        self.keys_store.append(k, before)
        self.values_store.append(v, before)
        self.held += step.num_new
        q = step.rope.turn(q, range(before, self.held))
        keys = step.rope.turn(self.keys_store.read(self.held), range(self.held))
        values = self.values_store.read(self.held)
        if step.is_decode:
            self.memory = self.held
            return attend_slots(q, keys, values, self.scale)[0]
        self.queries.add(q)
        self.rotated = keys if step.ends_prompt else None
        return attend(q, Tokens(keys, values), backend=step.chunk_backend)[0]

    # -- compression -----------------------------------------------------------------------------------------

    def settle(self, step: Step) -> None:
        keys, self.rotated = self.rotated, None
        if step.ends_prompt:
            schedule, queries = step.schedule, self.queries.take()
            if schedule.memory is not None and queries is not None:
                size = self._next_size(schedule, step)
                if size < self.held:
                    assert keys is not None, "a chunk ends with a token"
                    self._keep(self.prune(queries, keys, size))
                else:
                    self.retention = Fraction(self.memory, self.held)
            self.memory = self.held
        if step.ends_prompt or step.is_decode:
            self.keys_store.settle(self.held)
            self.values_store.settle(self.held)

    def _next_size(self, schedule: PromptSchedule, step: Step) -> int:
        """Tokens to keep after this chunk: as planned, or this layer's share of what all layers planned (eq. 3)."""
        assert schedule.memory is not None
        planned = schedule.memory[self.layer_idx][step.chunk_index]
        if not self.adaptive or step.chunk_index < 2:
            return planned
        if step.sizes is None:  # the first layer to get here decides for all, from their last retention
            ratios = [layer.retention for layer in step.layers]
            there = [layer.memory + self.held - self.memory for layer in step.layers]
            total, lowest = planned * len(there), schedule.memory[0][0]
            equal = [planned] * len(there)
            step.sizes = share_by_retention(total, ratios, there, lowest) if any(ratios) else equal
        return step.sizes[self.layer_idx]

    def _keep(self, index: Tensor) -> None:
        """Hold only the slots ``index`` ``[B, H, m]``."""
        if self.adaptive:  # whose rows are alone
            self.retention = Fraction(int((index < self.memory).sum()), index.numel())
        self.keys_store.keep(index, self.held)
        self.values_store.keep(index, self.held)
        self.held = index.shape[2]


def ends_pruner(num_sink_tokens: int) -> Pruner:
    """StreamingLLM's choice: the first slots and the last ones."""

    def prune(queries: Tensor, keys: Tensor, size: int) -> Tensor:
        slots = torch.arange(keys.shape[2], device=keys.device)
        sinks = min(num_sink_tokens, size)
        kept = torch.cat((slots[:sinks], slots[keys.shape[2] - size + sinks :]))
        return kept.expand(*keys.shape[:2], -1)

    return prune


def snapkv_pruner(kernel: int, pool: str, scale: float) -> Pruner:
    """SnapKV's choice, with the end of the chunk as observation window; a memory no larger than that is the last slots."""

    def prune(queries: Tensor, keys: Tensor, size: int) -> Tensor:
        if size <= queries.shape[2]:
            return ends_pruner(0)(queries, keys, size)
        return snapkv_slots(queries, keys, size, kernel, pool, scale)

    return prune


def _make_pruner(config: PodConfig, request: Request) -> Pruner:
    params = request.params
    if request.inner == "streamingllm":
        if params["num_sink_tokens"] < 0:
            raise ValueError(
                f"{request.spec}: num_sink_tokens = {params['num_sink_tokens']} must not be negative"
            )
        return ends_pruner(params["num_sink_tokens"])
    check_ranking(request.spec, request.tokens, params["window"], params["kernel"], params["pool"])
    return snapkv_pruner(params["kernel"], params["pool"], config.head_dim**-0.5)


def _build(variant: str, config: PodConfig, request: Request) -> PodCache:
    function, chunk_size = request.params.get("function", "linear"), request.params["chunk_size"]
    if function not in FUNCTIONS:
        raise ValueError(f"{request.spec}: function = {function!r}; choose one of {', '.join(FUNCTIONS)}")
    if chunk_size < 1:
        raise ValueError(f"{request.spec}: chunk_size = {chunk_size} must be at least 1 token")
    prune, adaptive = _make_pruner(config, request), function == "adaptive"
    window = request.params["window"] if request.inner == "snapkv" else 1
    settings = Settings(variant, function, request.tokens, chunk_size, config.num_hidden_layers)

    def make_layer(config: PodConfig, layer_idx: int) -> MemoryLayer:
        return MemoryLayer(config, layer_idx, request.codec, prune, window, adaptive)

    return GroupedCache(config, make_layer, request.spec, rowwise=adaptive, chunks=MemoryChunks(settings))


_PARAMETERS = {
    "chunk_size": (1024, "largest mean chunk (tokens)"),
    **ranking_parameters(window=32, kernel=5, pool="avg"),
    "num_sink_tokens": (4, "first slots that the streamingllm pruner keeps (tokens)"),
}
_FUNCTION = {"function": ("linear", f"growth of the memory: {', '.join(FUNCTIONS)}")}


def _method(name: str, frees: str, parameters: dict) -> Method:
    return Method(
        name=name,
        paper='IMDC, "Memorize Step by Step" (Zeng et al., 2024)',
        frees=frees,
        axis="selection",
        build=partial(_build, name),
        parameters=parameters,
        takes_budget=True,
        inner=("snapkv", "streamingllm"),
        refuses={
            "pod": "each layer counts positions over its own memory, so that a block has no common distant keys"
        },
    )


METHODS = (
    _method(
        "imdc",
        "what a pruner drops after each chunk of a prompt; memories grow to the budget as chunks shrink",
        _PARAMETERS | _FUNCTION,
    ),
    _method(
        "im",
        "what a pruner drops after each chunk of a prompt; memories grow to the budget",
        _PARAMETERS | _FUNCTION,
    ),
    _method("fm", "what a pruner drops after each chunk of a prompt; memories are of one size", _PARAMETERS),
)
