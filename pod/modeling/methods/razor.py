"""RazorAttention (§3.2, Algorithm 1): a few retrieval heads hold every token, the others what is near and a mean.

When a prompt ends, a head that is no retrieval head keeps its first ``num_sink_tokens`` and its last
``L_h = max(num_recent_tokens, seen / compression)`` tokens. All tokens that it ever dropped live on in one *compensation
token*: the means of their rotated keys and of their values, which counts as often as there are dropped tokens (eqs. 4,
5). While decoding, the window slides and a leaving token enters the mean before the new one attends.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.sliding import Biased, SlidingTokens
from pod.modeling.methods.streaming import cache_of
from pod.modeling.retrieval_heads import protected_heads
from pod.modeling.shipped.attend import Tokens, compute_dtype, merge_heads, take_heads
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import CacheLayer, Step


class CompensationToken:
    """Mean of all tokens that left, with how many they were (eq. 4). Sums run in at least fp32."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tokens[Tensor] | None = None  # [b, h, 1, d]

    def add(self, tokens: Tokens[Tensor]) -> None:
        """Take in tokens ``[b, h, c, d]`` that leave: ``k̂ += (k - k̂) c / N_d``."""
        new = tokens.keys.shape[2]
        self.count += new
        compute = compute_dtype(tokens.keys.dtype)
        means = [x.to(compute) if new == 1 else x.mean(2, keepdim=True, dtype=compute) for x in tokens]
        if self.mean is not None:
            means = [old.lerp(x, new / self.count) for old, x in zip(self.mean, means, strict=True)]
        elif new == 1:
            means = [x.clone() for x in means]
        self.mean = Tokens(*means)

    def seen(self, dtype: torch.dtype) -> list[Biased]:
        """What a query sees: nothing while no token has left."""
        return (
            [] if self.mean is None else [(Tokens(*(x.to(dtype) for x in self.mean)), math.log(self.count))]
        )

    def tensors(self) -> list[Tensor]:
        return [] if self.mean is None else list(self.mean)

    def select_rows(self, index: Tensor) -> None:
        if self.mean is not None:
            self.mean = Tokens(*(x.index_select(0, index.to(x.device)) for x in self.mean))


class RazorLayer(CacheLayer):
    """Sees rows that are alike.

    Attributes:
        full: KV heads of this layer that hold everything; ``others`` hold what is near.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__()
        names = "num_sink_tokens", "num_recent_tokens", "compression", "compensation"
        self.num_sink_tokens, self.num_recent_tokens, self.compression, self.compensates = (
            request.params[name] for name in names
        )
        self.full = list(request.params["heads"][layer_idx])
        self.others = [head for head in range(config.num_key_value_heads) if head not in self.full]
        self.groups, self.scale = config.num_key_value_groups, config.head_dim**-0.5
        self.codec = request.codec
        self.clear()

    def clear(self) -> None:
        self.everything = SlidingTokens(self.codec, 0)
        self.near = SlidingTokens(self.codec, self.num_sink_tokens)
        self.compensation = CompensationToken()

    def stores(self) -> dict[str, Any]:
        full = {f"full_{name}": store for name, store in self.everything.stores().items()}
        return full | self.near.stores() | {"compensation": self.compensation}

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now, and one compensation token; ``length`` tokens were seen."""
        extra = sum(x.numel() * x.element_size() for x in self.compensation.tensors())
        return self.everything.predicted_nbytes() + self.near.predicted_nbytes() + extra

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        parts = []
        for heads, run in ((self.full, self.everything.attend), (self.others, self._attend_near)):
            if heads:
                new = Tokens(take_heads(k, heads), take_heads(v, heads))
                parts.append((heads, run(take_heads(q, heads, self.groups), new, step, self.scale)))
        return merge_heads(parts, self.groups)

    def _attend_near(self, q: Tensor, new: Tokens[Tensor], step: Step, scale: float) -> Tensor:
        if not step.is_decode:
            return self.near.attend_prompt(q, new, step, self.compensation.seen(q.dtype))

        def leave(token: Tokens[Tensor] | None) -> Sequence[Biased]:
            self._compensate([] if token is None else [token])
            return self.compensation.seen(compute_dtype(q.dtype))

        return self.near.attend_decode(q, new, scale, leave)[0]

    def _compensate(self, dropped: list[Tokens[Tensor]]) -> None:
        if self.compensates:
            for tokens in dropped:
                self.compensation.add(tokens)

    def settle(self, step: Step) -> None:
        """At the end of a prompt: ``L_h`` from all tokens seen, which only grows, and the rest into the mean."""
        if not (step.ends_prompt or step.is_decode):
            return
        if self.others and not step.is_decode:
            self._compensate(
                self.near.trim(max(self.num_recent_tokens, int(step.max_length / self.compression)))
            )
        self.near.settle()
        self.everything.settle()


def _build(config: PodConfig, request: Request) -> PodCache:
    heads = protected_heads(request.params["heads"], config)
    return cache_of(RazorLayer)(config, replace(request, params=request.params | {"heads": heads}))


_SHARED = (
    "heads that follow a lead have no keys of their own far back, so there is nothing to keep or to average"
)
METHOD = Method(
    name="razor",
    paper="RazorAttention (2024), §3.2, Algorithm 1, eqs. 4 and 5",
    frees="tokens between the first and the last ones in KV heads without a retrieval head; grows with the prompt by 1/compression",
    axis="selection",
    build=_build,
    parameters={
        "heads": (
            None,
            "file that launch/explore.py --heads writes, or per layer a list of KV heads that hold everything",
        ),
        "num_sink_tokens": (4, "first tokens that the other heads hold (tokens)", 0),
        "num_recent_tokens": (4000, "recent tokens that the other heads hold at least (tokens)", 1),
        "compression": (
            5.0,
            "the other heads hold at least 1/compression of the tokens seen when a prompt ends",
            1,
        ),
        "compensation": (True, "whether dropped tokens live on in one mean token"),
    },
    refuses={"pod": _SHARED, "cla": _SHARED},
)
