"""Window attention, StreamingLLM and LM-Infinite: hold and attend to only the first tokens and recent ones.

Recent tokens are in a ring. The mask is the same while a prompt is fed and when tokens are decoded, so a
result does not depend on chunks or turns. Up to ``n_s + n_r`` tokens it hides nothing.

Keys are stored before RoPE. In each pass they are rotated at *places*: positions that are counted anew, so
that the newest token before the pass is at most at place ``n_s + n_r``. So angles do not grow with the number
of tokens seen, and with sinks the input may be unbounded.
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
    """A copy of a configuration, in which every head keeps a window of so many first and last tokens."""
    lead = SharingPlan.windows(config.num_hidden_layers, config.num_key_value_heads).lead
    changes = {"lead": lead, "num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
    changes["sinks"] = None  # the number of first tokens decides
    return PodConfig(**(config.to_dict() | changes))


class SinkLayer(PodCacheLayer):
    """A layer with sinks and a ring of recent tokens.

    A query sees every token at its true distance, except *far* sinks, which it sees nearer than they are.

    Attributes:
        limit: ``n_s + n_r``, in tokens. The query of a decoded token, and every query in its attention to far
            sinks, is rotated at this place.
        lag: when a sink becomes far. Sink ``s`` is far for queries at position ``limit + lag · s`` and later.
            Subclasses set it. With 0, all sinks become far at once, and each is then seen at its index in the
            cache. With 1, a sink becomes far when its distance reaches ``limit``, and stays at that distance.
    """

    lag: ClassVar[int]

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.num_sink_tokens = request.below_budget("num_sink_tokens")
        self.limit = request.budget
        windows = self.num_sink_tokens, self.limit - self.num_sink_tokens
        super().__init__(with_windows(config, *windows), layer_idx, request.quantizer)

    @property
    def far_places(self) -> range:
        """The place at which each far sink is rotated; with a lag of 1, one place for all of them."""
        return range(1) if self.lag else range(1, self.num_sink_tokens + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if step.num_new == 1 and step.all_real:
            return self._attend_one(q, k, v, step)
        return self._attend_many(q, k, v, step)

    # -- one token: every slot is seen, in whatever order the ring has them ----------------------------------

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        self._append_near(k, v, step)
        keys = self.near_keys.read(step.max_length)
        values = self.near_values.read(step.max_length)
        rope, name = step.ropes[self.layer_idx], (SinkLayer._attend_one, *step.rows)
        q = rope.turn(q, range(self.limit, self.limit + 1))
        keys = rope.turn_at(keys, name, lambda: self._places(step))
        held = None if step.uniform_past is not None else step.lengths
        return attend_slots(q, keys, values, self.scale, held)[0]

    def _places(self, step: Step) -> Tensor:
        """The place ``[B, slots]`` at which each slot's key is rotated, for a query at place ``limit``."""
        positions = self._positions(step.lengths, step.max_length)
        newest = step.lengths[:, None] - 1
        places = self.limit - (newest - positions)
        sinks = torch.arange(min(self.num_sink_tokens, positions.shape[1]), device=positions.device)
        far = torch.tensor(self.far_places, device=positions.device)[: len(sinks)]
        is_far = newest >= self.limit + self.lag * sinks
        places[:, : len(sinks)] = torch.where(is_far, far, places[:, : len(sinks)])
        return _once(places, step)

    def _positions(self, lengths: Tensor, longest: int) -> Tensor:
        """The position ``[B, slots]`` of each slot's token, when rows have ``lengths`` ``[B]`` tokens.

        For empty slots it is any number. ``longest`` is the largest of ``lengths``.
        """
        slots = torch.arange(min(longest, self.limit), device=lengths.device)
        newest = lengths[:, None] - 1
        recent = newest - (newest - slots) % self.num_recent_tokens
        return torch.where(slots < self.num_sink_tokens, slots, recent)

    # -- a chunk ---------------------------------------------------------------------------------------------

    def _attend_many(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of a chunk, as parts of one softmax: tokens at their true distance, and far sinks."""
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
        """All tokens but far sinks, and the queries, rotated at positions less a number for each row.

        The number is how many tokens had left a window of ``limit`` tokens before the pass.
        """
        rope, name = step.ropes[self.layer_idx], (SinkLayer._own_tokens, *step.rows)
        start = (step.past - self.limit).clamp(min=0)[:, None]

        def new_places() -> Tensor:
            return _once(step.positions - start, step)

        q = rope.turn_at(q, name, new_places)
        k = rope.turn_at(k, name, new_places)
        if step.is_fresh:
            return Tokens(k, v), q
        keys = Recent(self.near_keys, k, step.rows)
        values = Recent(self.near_values, v, step.rows)
        if keys.held is not None:
            places = self._positions(step.past, max(keys.past)) - start
            keys.held = rope.turn_at(keys.held, ("held", *name), lambda: _once(places, step))
        return Tokens(keys, values), q

    def _segments(self, step: Step) -> tuple[Segments, Segments, Segments]:
        """Three sets of segments, for three calls of attention whose results are merged.

        * Queries without far sinks, with all tokens up to their own; and queries for which only some sinks
          are far, with the other sinks.
        * Queries with far sinks, with their recent tokens.
        * Queries with far sinks, with these sinks.
        """
        if step.max_length <= self.limit:
            nothing = Segments([])
            return step.segments, nothing, nothing
        return step.segments.derived((SinkLayer, self.limit, self.num_sink_tokens), lambda: self._cut(step))

    def _cut(self, step: Step) -> tuple[Segments, Segments, Segments]:
        """Compute the result of ``_segments``, for rows with more than ``limit`` tokens."""
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
    """``positions`` ``[B, n]``, or its first row ``[1, n]`` if all rows are of one length."""
    return positions if step.uniform_past is None else positions[:1]


class StreamingLayer(SinkLayer):
    """StreamingLLM: keys are rotated at their index *in the cache*, not at their position in the text.

    When the window is full, every query sees the sinks as if it were at the cache's last index.
    """

    lag = 0


class LambdaLayer(SinkLayer):
    """LM-Infinite: a query sees a sink at its true distance, but at most at the distance ``n_s + n_r``."""

    lag = 1


def _window_layer(config: PodConfig, layer_idx: int, request: Request) -> PodCacheLayer:
    return PodCacheLayer(with_windows(config, 0, request.budget), layer_idx, request.quantizer)


BUILDERS = {
    "streamingllm": Builder(build=cache_of(StreamingLayer, takes_any_rows=True)),
    "lm_infinite": Builder(build=cache_of(LambdaLayer, takes_any_rows=True)),
    "wa": Builder(build=cache_of(_window_layer, takes_any_rows=True)),
}
