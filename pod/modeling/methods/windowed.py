"""Window attention, StreamingLLM and LM-Infinite: hold and attend to only the first tokens and recent ones.

Recent tokens lie in a ring. The mask is the same while a prompt is read and when tokens are decoded, so a
result does not depend on chunks or turns. Up to ``n_s + n_r`` tokens it hides nothing. Keys are stored before
RoPE and rotated at places counted from the start of the ring. So no angle grows with what was seen before a
pass, and with sinks the input may be unbounded.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.model.attend import (
    CAUSAL,
    EVERYTHING,
    Segment,
    Segments,
    Tokens,
    Visibility,
    attend,
    merge,
)
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import attend_slots
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.step import Step
from pod.modeling.model.window_buffer import Recent


def with_windows(config: PodConfig, num_sink_tokens: int, num_recent_tokens: int) -> PodConfig:
    """The configuration of the same model, with a window of this size in every head."""
    lead = SharingPlan.windows(config.num_hidden_layers, config.num_key_value_heads).lead
    changes = {"lead": lead, "num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
    changes["sinks"] = None  # the number of first tokens decides
    return PodConfig(**(config.to_dict() | changes))


class SinkLayer(PodCacheLayer):
    """A layer with sinks and a ring of recent tokens. All are seen at their own distance, except *far* sinks.

    Attributes:
        limit: ``n_s + n_r``. A query is put at this place, and keys as far behind it as they should be.
        lag: decides when sinks are far: sink ``s`` is far for queries from position ``limit + lag · s`` on. A
            method sets it. With 0, all sinks become far at once, and each is then at its index in the cache.
            With 1, a sink becomes far when its distance is the limit, and stays at that distance.
    """

    lag: ClassVar[int]

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.num_sink_tokens = request.below_budget("num_sink_tokens")
        self.limit = request.budget
        windows = self.num_sink_tokens, self.limit - self.num_sink_tokens
        super().__init__(with_windows(config, *windows), layer_idx, request.quantizer)

    @property
    def far_places(self) -> range:
        """The place of each far sink, or one place for all of them."""
        return range(1) if self.lag else range(1, self.num_sink_tokens + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if step.num_new == 1 and step.all_real:
            return self._attend_one(q, k, v, step)
        return self._attend_many(q, k, v, step)

    # -- one token: every slot is seen, in whatever order the ring has them ----------------------------------

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        self._append_near(k, v, step)
        keys, values = (buffer.read(step.max_length) for buffer in self.kv_buffers().values())
        rope, name = step.ropes[self.layer_idx], (SinkLayer._attend_one, *step.rows)
        q = rope.turn(q, range(self.limit, self.limit + 1))
        keys = rope.turn_at(keys, name, lambda: self._places(step))
        held = None if step.uniform_past is not None else step.lengths
        return attend_slots(q, keys, values, self.scale, held)[0]

    def _places(self, step: Step) -> Tensor:
        """The place ``[B, slots]`` of each slot's key for a query at ``limit``."""
        positions = self._positions(step.lengths, step.max_length)
        newest = step.lengths[:, None] - 1
        places = self.limit - (newest - positions)
        sinks = torch.arange(min(self.num_sink_tokens, positions.shape[1]), device=positions.device)
        far = torch.tensor(self.far_places, device=positions.device)[: len(sinks)]
        is_far = newest >= self.limit + self.lag * sinks
        places[:, : len(sinks)] = torch.where(is_far, far, places[:, : len(sinks)])
        return _once(places, step)

    def _positions(self, lengths: Tensor, longest: int) -> Tensor:
        """The position ``[B, slots]`` of each slot's token after ``lengths`` ``[B]`` tokens; any if empty."""
        slots = torch.arange(min(longest, self.limit), device=lengths.device)
        newest = lengths[:, None] - 1
        recent = newest - (newest - slots) % self.num_recent_tokens
        return torch.where(slots < self.num_sink_tokens, slots, recent)

    # -- a chunk ---------------------------------------------------------------------------------------------

    def _attend_many(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention in parts of one softmax: tokens at their own distance, and far sinks."""
        own, recent, far = self._segments(step)
        tokens, turned = self._own_tokens(q, k, v, step)
        if own is step.segments:
            out, _ = attend(turned, tokens, segments=own, backend=step.chunk_backend)
            self._append_near(k, v, step)
            return out
        backend = step.merging_backend(q, k, v)
        see = Visibility(num_recent_tokens=self.num_recent_tokens)
        parts = [
            attend(turned, tokens, None, visibility, segments, backend=backend)
            for visibility, segments in ((CAUSAL, own), (see, recent))
            if segments.all
        ]
        self._append_near(k, v, step)
        if far.all:
            held = (buffer.read(step.max_length) for buffer in self.kv_buffers().values())
            sinks = [x[:, :, : self.num_sink_tokens] for x in held]
            rope = step.ropes[self.layer_idx]
            sinks[0] = rope.turn(sinks[0], self.far_places)
            q = rope.turn(q, range(self.limit, self.limit + 1))
            parts.append(attend(q, Tokens(*sinks), None, EVERYTHING, far, backend=backend))
        return merge(parts)[0]

    def _own_tokens(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> tuple[Tokens, Tensor]:
        """Tokens before and in the chunk, and queries, rotated at positions counted from the ring's start."""
        rope, name = step.ropes[self.layer_idx], (SinkLayer._own_tokens, *step.rows)
        start = (step.past - self.limit).clamp(min=0)[:, None]
        q, k = (rope.turn_at(x, name, lambda: _once(step.positions - start, step)) for x in (q, k))
        if step.is_fresh:
            return Tokens(k, v), q
        keys, values = Recent(self.near_keys, k, step.rows), Recent(self.near_values, v, step.rows)
        if keys.held is not None:
            places = self._positions(step.past, max(keys.past)) - start
            keys.held = rope.turn_at(keys.held, ("held", *name), lambda: _once(places, step))
        return Tokens(keys, values), q

    def _segments(self, step: Step) -> tuple[Segments, Segments, Segments]:
        """The queries of every row in three sets, by what they see.

        They see tokens up to their own (or near sinks), the ring, and far sinks.
        """
        if step.max_length <= self.limit:
            nothing = Segments([])
            return step.segments, nothing, nothing
        return step.segments.derived((SinkLayer, self.limit, self.num_sink_tokens), lambda: self._cut(step))

    def _cut(self, step: Step) -> tuple[Segments, Segments, Segments]:
        own, recent, far = [], [], []
        alike = step.uniform_past is not None
        for row, (past, count) in enumerate(step.rows[:1] if alike else step.rows):
            rows = (0, len(step.rows)) if alike else (row, row + 1)
            first = min(max(self.limit - past, 0), count)  # the first query with far sinks
            if first:
                own.append(Segment(rows, (0, first), (0, past + first)))
            if first < count:
                start = max(past + first - self.num_recent_tokens, 0)
                recent.append(Segment(rows, (first, count), (start, past + count)))
            while first < count and past + first < self.limit + self.lag * (self.num_sink_tokens - 1):
                num_far = past + first - self.limit + 1
                own.append(Segment(rows, (first, first + 1), (num_far, self.num_sink_tokens)))
                far.append(Segment(rows, (first, first + 1), (0, num_far)))
                first += 1
            if first < count and self.num_sink_tokens:
                far.append(Segment(rows, (first, count), (0, self.num_sink_tokens)))
        return tuple(Segments(found) for found in (own, recent, far))  # type: ignore


def _once(positions: Tensor, step: Step) -> Tensor:
    """Positions ``[B, n]``, or ``[1, n]`` where rows are alike."""
    return positions if step.uniform_past is None else positions[:1]


class StreamingLayer(SinkLayer):
    """StreamingLLM: keys are rotated at their index *in the cache*.

    Behind a full window, every query stands at the cache's last index as seen from the sinks.
    """

    lag = 0


class LambdaLayer(SinkLayer):
    """LM-Infinite: a sink is at its own distance up to ``n_s + n_r``, and at this limit ever after."""

    lag = 1


def _window_layer(config: PodConfig, layer_idx: int, request: Request) -> PodCacheLayer:
    return PodCacheLayer(with_windows(config, 0, request.budget), layer_idx, request.quantizer)


BUILDERS = {
    "streamingllm": Builder(build=cache_of(StreamingLayer, takes_any_rows=True)),
    "lm_infinite": Builder(build=cache_of(LambdaLayer, takes_any_rows=True)),
    "wa": Builder(build=cache_of(_window_layer, takes_any_rows=True)),
}
