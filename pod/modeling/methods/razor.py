"""RazorAttention (§3.2, Algorithm 1): a few retrieval heads hold every token, the others what is near and a mean.

When a prompt ends, a head that is no retrieval head keeps its first ``num_sink_tokens`` and its last
``L_h = max(num_recent_tokens, seen / compression)`` tokens. All tokens that it ever dropped live on in one *compensation
token*: the means of their rotated keys and of their values, which counts as often as there are dropped tokens (eqs. 4,
5). While decoding, the window slides and a leaving token enters the mean before the new one attends.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.sliding import Biased, Pair, SlidingTokens
from pod.modeling.retrieval_heads import Heads, protected_heads
from pod.modeling.shipped.attend import Tokens, attend, compute_dtype, merge_heads, take_heads
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import NATIVE, Codec


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

    Args:
        full: KV heads of this layer that hold everything.
        num_sink_tokens, num_recent_tokens, compression, compensation: see the method's parameters.
    """

    def __init__(
        self,
        config: PodConfig,
        full: tuple[int, ...],
        num_sink_tokens: int,
        num_recent_tokens: int,
        compression: float,
        compensation: bool,
        codec: Codec = NATIVE,
    ):
        super().__init__()
        self.full = list(full)
        self.others = [head for head in range(config.num_key_value_heads) if head not in full]
        self.groups = config.num_key_value_groups
        self.scale = config.head_dim**-0.5
        self.num_sink_tokens, self.num_recent_tokens = num_sink_tokens, num_recent_tokens
        self.compression, self.compensates, self.codec = compression, compensation, codec
        self.clear()

    def clear(self) -> None:
        self.everything = Pair.of(self.codec)
        self.near = SlidingTokens(self.codec, self.num_sink_tokens)
        self.compensation = CompensationToken()

    def stores(self) -> dict[str, Any]:
        full = {f"full_{name}": store for name, store in self.everything._asdict().items()}
        return full | self.near.stores() | {"compensation": self.compensation}

    def predicted_nbytes(self, length: int) -> int:
        """Full heads hold ``length`` tokens, the others what ``near`` holds and one compensation token."""
        extra = sum(x.numel() * x.element_size() for x in self.compensation.tensors())
        return self.everything.predicted_nbytes(length) + self.near.predicted_nbytes() + extra

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        parts = []
        for heads, run in ((self.full, self._attend_full), (self.others, self._attend_near)):
            if heads:
                new = Tokens(take_heads(k, heads), take_heads(v, heads))
                parts.append((heads, run(take_heads(q, heads, self.groups), new, step)))
        return merge_heads(parts, self.groups)

    def _attend_full(self, q: Tensor, new: Tokens[Tensor], step: Step) -> Tensor:
        assert step.uniform_past is not None
        self.everything.append(new, step.uniform_past)
        if step.is_decode:
            return self.everything.attend_decode(q, step.max_length, self.scale)[0]
        tokens = new if step.is_fresh else self.everything.read(step.max_length)
        return attend(q, tokens, backend=step.chunk_backend)[0]

    def _attend_near(self, q: Tensor, new: Tokens[Tensor], step: Step) -> Tensor:
        if not step.is_decode:
            return self.near.attend_prompt(q, new, step, self.compensation.seen(q.dtype))

        def leave(token: Tokens[Tensor] | None) -> Sequence[Biased]:
            self._compensate([] if token is None else [token])
            return self.compensation.seen(compute_dtype(q.dtype))

        return self.near.attend_decode(q, new, self.scale, leave)[0]

    def _compensate(self, dropped: list[Tokens[Tensor]]) -> None:
        if self.compensates:
            for tokens in dropped:
                self.compensation.add(tokens)

    def settle(self, step: Step) -> None:
        """At the end of a prompt: ``L_h`` from all tokens seen, which only grows, and the rest into the mean."""
        if not (step.ends_prompt or step.is_decode):
            return
        assert step.uniform_past is not None
        seen = step.uniform_past + step.num_new
        if self.others and not step.is_decode:
            self._compensate(self.near.trim(max(self.num_recent_tokens, int(seen / self.compression))))
        self.near.settle()
        if self.full:
            self.everything.settle(seen)


def _build(config: PodConfig, request: Request) -> PodCache:
    values = dict(request.params)
    heads: Heads = protected_heads(values["heads"], config)
    if values["num_sink_tokens"] < 0 or values["num_recent_tokens"] < 1:
        raise ValueError(
            f"{request.spec}: num_sink_tokens = {values['num_sink_tokens']} and num_recent_tokens = "
            f"{values['num_recent_tokens']}; allowed are at least 0 and 1"
        )
    if not isinstance(values["compression"], int | float) or not values["compression"] >= 1:
        raise ValueError(
            f"{request.spec}: compression = {values['compression']!r} must be a number of at least 1"
        )
    names = ("num_sink_tokens", "num_recent_tokens", "compression", "compensation")
    options = {name: values[name] for name in names}

    def make_layer(config: PodConfig, layer_idx: int) -> RazorLayer:
        return RazorLayer(config, heads[layer_idx], codec=request.codec, **options)

    return GroupedCache(config, make_layer, request.spec)


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
        "num_sink_tokens": (4, "first tokens that the other heads hold (tokens)"),
        "num_recent_tokens": (4000, "recent tokens that the other heads hold at least (tokens)"),
        "compression": (
            5.0,
            "the other heads hold at least 1/compression of the tokens seen when a prompt ends",
        ),
        "compensation": (True, "whether dropped tokens live on in one mean token"),
    },
    refuses={"pod": _SHARED, "cla": _SHARED},
)
