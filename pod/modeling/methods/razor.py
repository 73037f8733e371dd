"""RazorAttention (§3.2, Algorithm 1): a few retrieval heads hold every token, the others what is near and a mean.

When a prompt ends, a head that is no retrieval head keeps its first ``num_sink_tokens`` and its last
``L_h = max(num_recent_tokens, seen / compression)`` tokens. All tokens that it ever dropped live on in one *compensation
token*: the means of their rotated keys and of their values, which counts as often as there are dropped tokens (eqs. 4,
5). While decoding, the window slides and a leaving token enters the mean before the new one attends.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.sliding import (
    Column,
    Pair,
    SlidingTokens,
    Tokens,
    attend_columns,
    causal,
    everything,
)
from pod.modeling.retrieval_heads import Heads, protected_heads
from pod.modeling.shipped.attend import attend, merge_heads, take_heads
from pod.modeling.shipped.blocked import Source, blocked_attention
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import NATIVE, Codec
from pod.modeling.shipped.strips import strip_attention


class CompensationToken:
    """Mean of all tokens that left, with how many they were (eq. 4). Sums run in at least fp32."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tokens | None = None  # [b, h, 1, d]

    def add(self, tokens: Tokens) -> None:
        """Take in tokens ``[b, h, c, d]`` that leave: ``k̂ += (k - k̂) c / N_d``."""
        new = tokens.keys.shape[2]
        self.count += new
        compute = torch.promote_types(tokens.keys.dtype, torch.float32)
        means = [x.mean(2, keepdim=True, dtype=compute) for x in tokens]
        if self.mean is not None:
            means = [old.lerp(x, new / self.count) for old, x in zip(self.mean, means, strict=True)]
        self.mean = Tokens(*means)

    def column(self, dtype: torch.dtype) -> list[Column]:
        """What a decoded query sees: nothing while no token has left."""
        return [] if self.mean is None else [Column(self._as(dtype), bias=math.log(self.count))]

    def source(self, queries: Tensor) -> list[Source]:
        """What the queries ``[b, h, G, m, d]`` of a later prompt see."""
        if self.mean is None:
            return []
        tokens = self._as(queries.dtype)
        bias = torch.full_like(self.mean.keys[..., 0], math.log(self.count))
        return [Source(queries, *tokens, visible=everything, bias=bias)]

    def _as(self, dtype: torch.dtype) -> Tokens:
        assert self.mean is not None
        return Tokens(*(x.to(dtype) for x in self.mean))

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
        self.everything = Pair(self.codec.tokens("keys"), self.codec.tokens("values"))
        self.near = SlidingTokens(self.codec, self.num_sink_tokens)
        self.compensation = CompensationToken()

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("keys", tensor) for tensor in self.everything.keys.tensors())
        yield from (("values", tensor) for tensor in self.everything.values.tensors())
        yield from self.near.parts()
        yield from (("compensation", tensor) for tensor in self.compensation.tensors())

    def select_rows(self, index: Tensor) -> None:
        for part in (self.everything, self.near, self.compensation):
            part.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        """Full heads hold ``length`` tokens, the others what ``near`` holds and one compensation token."""
        extra = sum(x.numel() * x.element_size() for x in self.compensation.tensors())
        return self.everything.predicted_nbytes(length) + self.near.predicted_nbytes() + extra

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope(q), step.rope(k)
        assert step.uniform_past is not None
        if step.uniform_past == 0 and not step.is_decode and step.backend != "reference":
            self._hold_first(k, v)
            return attend(q, Tokens(k, v), backend=step.backend)[0]
        parts = []
        for heads, run in ((self.full, self._attend_full), (self.others, self._attend_near)):
            if heads:
                new = Tokens(take_heads(k, heads), take_heads(v, heads))
                parts.append((heads, run(take_heads(q, heads, self.groups), new, step)))
        return merge_heads(parts, self.groups)

    def _hold_first(self, k: Tensor, v: Tensor) -> None:
        """The first chunk of a first prompt, in which all heads attend alike."""
        if self.full:
            self.everything.append(Tokens(take_heads(k, self.full), take_heads(v, self.full)), 0)
        if self.others:
            self.near.append(Tokens(take_heads(k, self.others), take_heads(v, self.others)))

    def _attend_full(self, q: Tensor, new: Tokens, step: Step) -> Tensor:
        assert step.uniform_past is not None
        length = step.uniform_past + step.num_new
        self.everything.append(new, step.uniform_past)
        tokens = self.everything.read(length)
        queries = q.unflatten(1, (len(self.full), self.groups))
        if step.num_new == 1:
            return attend_columns(queries.squeeze(3) * self.scale, [Column(tokens)])[0]
        if step.backend != "reference":
            return strip_attention(q, *tokens, self.scale)
        source = Source(queries, *tokens, visible=causal(length))
        return blocked_attention([source], step.positions, self.scale)

    def _attend_near(self, q: Tensor, new: Tokens, step: Step) -> Tensor:
        if not step.is_decode:
            queries = q.unflatten(1, (len(self.others), self.groups))
            return self.near.attend_prompt(q, new, step, self.scale, self.compensation.source(queries))

        def leave(token: Tokens | None) -> list[Column]:
            self._compensate([] if token is None else [token])
            return self.compensation.column(q.dtype)

        return self.near.attend_decode(q, new, self.scale, leave)[0]

    def _compensate(self, dropped: list[Tokens]) -> None:
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
