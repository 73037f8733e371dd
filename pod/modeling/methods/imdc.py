"""IMDC (Zeng et al., "Memorize Step by Step"): prompts are read in chunks over a compressed memory, so inputs may be unbounded.

A chunk attends to the memory and to itself; then a pruner compresses both into the next memory. ``fm`` keeps a memory of
``budget`` tokens throughout, ``im`` lets it grow to that, ``imdc`` shrinks the chunks as it grows (``imdc_schedule``); without
``update`` the memory itself stays, and what the pruner leaves of each chunk is appended (the fixed memory of appendix B.4). Keys
are stored before RoPE, and positions count memory, chunk and decoded tokens anew at every step. Decoded tokens are
appended; the next prompt starts from what is held.
"""

from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Parameter, Request
from pod.modeling.methods.imdc_schedule import FUNCTIONS, Settings, share_by_retention
from pod.modeling.methods.ranking import EndAttention, LastQueries, best_slots, ranking_parameters
from pod.modeling.methods.sliding import Pair
from pod.modeling.shipped.attend import Tokens, attend
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.rows import GroupedCache, Schedule
from pod.modeling.shipped.step import CacheLayer, Step


class MemoryLayer(CacheLayer):
    """Memory, running chunk and decoded tokens of one layer, for rows that are alike; keys before RoPE, slots in order of age.

    Attributes:
        ranks: whether the pruner is SnapKV, else StreamingLLM.
        held: slots in use; the first ``memory`` of them were there before the running chunk.
        retention: share of the memory that was memory before the last compression (eq. 2), over all KV heads.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__()
        params, ranks = request.params, request.inner == "snapkv"
        self.layer_idx, self.codec = layer_idx, request.codec
        self.adaptive, self.updates = params.get("function") == "adaptive", params.get("update", True)
        self.num_sink_tokens = params["num_sink_tokens"]
        self.observer = lambda: EndAttention(config, request) if ranks else LastQueries(1)
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        self.tokens = Pair.of(self.codec, evicts=True)
        self.held = self.memory = 0
        self.retention = Fraction(0)
        self.queries = self.observer()  # of the running chunk
        self.rotated: Tensor | None = None  # keys, from the end of a chunk to its compression

    def stores(self) -> dict[str, Any]:
        return self.tokens._asdict() | {"bookkeeping": self.queries}

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now; ``length`` tokens were seen."""
        return self.tokens.predicted_nbytes(self.held)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        before = self.held
        self.tokens.append(Tokens(k, v), before)
        self.held += step.num_new
        q = step.rope.turn(q, range(before, self.held))
        keys, values = self.tokens.read(self.held)
        keys = step.rope.turn(keys, range(self.held))
        if step.is_decode:
            self.memory = self.held
        else:
            self.queries.observe(q, step)
            self.rotated = keys if step.ends_prompt else None
        return attend(q, Tokens(keys, values), backend=step.chunk_backend)[0]

    @property
    def num_fixed(self) -> int:
        """Slots of the memory that no compression drops."""
        return 0 if self.updates else self.memory

    # -- compression -----------------------------------------------------------------------------------------

    def settle(self, step: Step) -> None:
        keys, self.rotated = self.rotated, None
        if step.ends_prompt:
            if step.schedule.memory is not None and self.queries.observed is not None:
                size = max(self._next_size(step.schedule, step), self.num_fixed)
                if size < self.held:
                    assert keys is not None, "a chunk ends with a token"
                    self._keep(self.choose(keys, size, step))
                else:
                    self.retention = Fraction(self.memory, self.held)
            self.queries, self.memory = self.observer(), self.held
        if step.ends_prompt or step.is_decode:
            self.tokens.settle(self.held)

    def _next_size(self, schedule: Schedule, step: Step) -> int:
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
        self.tokens.keep(index, self.held)
        self.held = index.shape[2]

    def choose(self, keys: Tensor, size: int, step: Step) -> Tensor:
        """The pruner: slots ``[B, H, size]`` to keep, ascending, of keys that are rotated at their slots: those of a fixed memory, and of
        the slots behind it the pruner's.

        StreamingLLM keeps the first slots and the last ones, SnapKV ranks with the end of the chunk as observation window; where
        no more than that fits, the last slots.
        """
        assert self.queries.observed is not None
        fixed, n = self.num_fixed, keys.shape[2]
        if self.ranks and size - fixed > self.queries.observed.shape[2]:
            scores = self.queries.scores(keys, keys, step)
            scores[..., :fixed] = torch.inf
            return best_slots(scores, size)
        slots = torch.arange(n, device=keys.device)
        first = fixed if self.ranks else min(fixed + self.num_sink_tokens, size)
        return torch.cat((slots[:first], slots[n - size + first :])).expand(*keys.shape[:2], -1)


def _build(variant: str, config: PodConfig, request: Request) -> PodCache:
    params = request.params
    MemoryLayer(config, 0, request)  # which checks the request
    function = params.get("function", FUNCTIONS[0])
    settings = Settings(variant, function, request.budget, params["chunk_size"], config.num_hidden_layers)
    make_layer, rowwise = partial(MemoryLayer, request=request), function == "adaptive"
    return GroupedCache(config, make_layer, request.spec, rowwise, chunks=settings)


_PARAMETERS = {
    "chunk_size": (1024, "largest mean chunk (tokens)", 1),
    **ranking_parameters(window=32, kernel=5, pool="avg"),
    "num_sink_tokens": (4, "first slots that the streamingllm pruner keeps (tokens)", 0),
}
_FUNCTION = {
    "function": Parameter(FUNCTIONS[0], f"growth of the memory: {', '.join(FUNCTIONS)}", choices=FUNCTIONS),
    "update": (
        True,
        "whether memory and chunk are compressed together; else the chunk is, and appended (B.4)",
    ),
}


METHODS = tuple(
    Method(
        name=name,
        paper='IMDC, "Memorize Step by Step" (Zeng et al., 2024)',
        frees=f"what a pruner drops after each chunk of a prompt; memories {growth}",
        axis="selection",
        build=partial(_build, name),
        parameters=_PARAMETERS | function,
        takes_budget=True,
        inner=("snapkv", "streamingllm"),
        refuses={
            "pod": "each layer counts positions over its own memory, so that a block has no common distant keys"
        },
    )
    for name, growth, function in (
        ("imdc", "grow to the budget as chunks shrink", _FUNCTION),
        ("im", "grow to the budget", _FUNCTION),
        ("fm", "are of one size", {}),
    )
)
