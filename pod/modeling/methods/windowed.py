"""What methods with a fixed window share: the first tokens, a ring of recent ones, and attention over just those.

The mask is the same while a prompt is read and when tokens are decoded, so a result does not depend on chunks or turns. Up
to ``n_s + n_r`` tokens it hides nothing. Behind them a chunk costs its length times the window.
"""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from pod.modeling.methods.base import Request
from pod.modeling.methods.rows import Chunks, GroupedCache
from pod.modeling.shipped.attend import Tokens, attend
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.rope import rotate
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import Codec
from pod.modeling.shipped.strips import Aside, strip_attention

_SMALLEST_CHUNK = 64
WINDOW_REFUSES_POD = {"pod": "a window has no distant token whose keys a block could share"}


class WindowedLayer(CacheLayer):
    """Sinks and a ring of recent tokens of one layer, for rows that are alike.

    A method that stores keys before RoPE says in ``sink_distances`` and ``sink_logits`` how far sinks are; recent tokens
    are at their own distance, counted within the window, so that no angle grows with the input.

    Attributes:
        rotates_keys: whether keys are stored rotated at their position (then there must be no sinks).
    """

    rotates_keys: ClassVar[bool] = False

    def __init__(
        self, config: PodConfig, layer_idx: int, codec: Codec, num_sink_tokens: int, num_recent_tokens: int
    ):
        super().__init__()
        self.codec = codec
        self.num_sink_tokens, self.num_recent_tokens = num_sink_tokens, num_recent_tokens
        self.limit = num_sink_tokens + num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.clear()

    def clear(self) -> None:
        self.keys_store, self.values_store = (
            self.codec.window(part, self.num_sink_tokens, self.num_recent_tokens)
            for part in ("keys", "values")
        )

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("keys", tensor) for tensor in self.keys_store.tensors())
        yield from (("values", tensor) for tensor in self.values_store.tensors())

    def select_rows(self, index: Tensor) -> None:
        self.keys_store.select_rows(index)
        self.values_store.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        return sum(
            store.predicted_nbytes(length)
            for store in (self.keys_store, self.values_store)
            if not store.is_empty
        )

    def settle(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            assert step.uniform_past is not None
            for store in (self.keys_store, self.values_store):
                store.settle(step.uniform_past + step.num_new)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        assert step.uniform_past is not None
        if self.rotates_keys:
            q, k = step.rope(q), step.rope(k)
        past, outputs = step.uniform_past, []
        while q.shape[2]:
            width = self.limit - past if past < self.limit else max(self.num_recent_tokens, _SMALLEST_CHUNK)
            outputs.append(self._attend_chunk(q[:, :, :width], k[:, :, :width], v[:, :, :width], past, step))
            q, k, v = (x[:, :, width:] for x in (q, k, v))
            past += width
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, past: int, step: Step) -> Tensor:
        if past < self.limit:
            return self._attend_all(q, k, v, past, step)
        if q.shape[2] == 1:
            return self._attend_one(q, k, v, past, step)
        (sink_keys, keys), (sink_values, values) = (
            self._in_order(s, past) for s in (self.keys_store, self.values_store)
        )
        keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        aside = None
        if self.num_sink_tokens:
            logits = self.sink_logits(q, sink_keys, past, partial(self._turn, step))
            aside = _reduce(logits, sink_values)
        if not self.rotates_keys:
            keys = self._turn(step, keys, range(keys.shape[2]))
            q = self._turn(step, q, range(self.num_recent_tokens, keys.shape[2]))
        out = strip_attention(q, keys, values, self.scale, self.num_recent_tokens, aside)
        self._append(k, v, past)
        return out

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, past: int, step: Step) -> Tensor:
        """Nothing has left the window after this chunk: slots are positions."""
        self._append(k, v, past)
        length = past + q.shape[2]
        keys, values = self.keys_store.read(length), self.values_store.read(length)
        if not self.rotates_keys:
            q, keys = self._turn(step, q, range(past, length)), self._turn(step, keys, range(length))
        if past == 0 and length > 1:
            return attend(q, Tokens(keys, values), backend=step.backend)[0]
        return strip_attention(q, keys, values, self.scale)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, past: int, step: Step) -> Tensor:
        """One token behind a full window: every slot is visible, in whatever order the ring has them."""
        self._append(k, v, past)
        keys, values = self.keys_store.read(past + 1), self.values_store.read(past + 1)
        if not self.rotates_keys:
            q = self._turn(step, q, range(self.limit, self.limit + 1))
            if "places" not in step.shared:
                step.shared["places"] = self._places(past, q.device)
            keys = self._turn(step, keys, step.shared["places"])
        return strip_attention(q, keys, values, self.scale)

    def _places(self, past: int, device: torch.device) -> Tensor:
        """``[limit]`` where each slot's key is rotated to, so that it has its distance from a query at ``limit``."""
        recent = torch.arange(self.num_recent_tokens, device=device)
        newest = (past - self.num_sink_tokens) % self.num_recent_tokens
        behind = (newest - recent) % self.num_recent_tokens
        sinks = self.sink_distances(torch.tensor([past], device=device))[0]
        return self.limit - torch.cat((sinks, behind))

    def _in_order(self, store, past: int) -> tuple[Tensor, Tensor]:
        """Sinks, and the recent tokens of a full window from the oldest to the newest."""
        held = store.read(past)
        wrap = self.num_sink_tokens + (past - self.num_sink_tokens) % self.num_recent_tokens
        recent = torch.cat((held[:, :, wrap:], held[:, :, self.num_sink_tokens : wrap]), dim=2)
        return held[:, :, : self.num_sink_tokens], recent

    def _append(self, k: Tensor, v: Tensor, past: int) -> None:
        self.keys_store.append(k, past)
        self.values_store.append(v, past)

    @staticmethod
    def _turn(step: Step, x: Tensor, positions: range | Tensor) -> Tensor:
        """Rotate at these positions, with tables that all layers of a pass share."""
        name = positions if isinstance(positions, range) else "places of slots"
        if name not in step.shared:
            if isinstance(positions, range):
                positions = torch.arange(positions.start, positions.stop, device=x.device)
            step.shared[name] = step.rope.tables(positions[None])
        return rotate(x, step.shared[name])

    # -- what a method with sinks decides ----------------------------------------------------------------------

    def sink_distances(self, positions: Tensor) -> Tensor:
        """Distance ``[m, n_s]`` at which queries at ``positions`` ``[m]`` behind a full window see each sink."""
        return torch.zeros(positions.shape[0], 0, dtype=torch.long, device=positions.device)

    def sink_logits(self, q: Tensor, keys: Tensor, past: int, turn) -> Tensor:
        """Scaled logits ``[B, Hq, m, n_s]`` of un-rotated queries from position ``past`` on, and un-rotated sinks.

        ``turn(x, positions)`` rotates.
        """
        raise NotImplementedError

    def products(self, q: Tensor, keys: Tensor) -> Tensor:
        """Scaled logits ``[B, Hq, m, n]`` of ``[B, Hq, m, d]`` and ``[B, H, n, d]``, at least fp32."""
        grouped = q.unflatten(1, (keys.shape[1], -1)) * self.scale
        logits = grouped.flatten(2, 3) @ keys.transpose(2, 3)
        return logits.to(torch.promote_types(q.dtype, torch.float32)).view(*q.shape[:3], keys.shape[2])


def _reduce(logits: Tensor, values: Tensor) -> Aside:
    """Softmax part of ``[B, Hq, m, n_s]`` logits over values ``[B, H, n_s, d]``."""
    weights = logits.softmax(-1).to(values.dtype).unflatten(1, (values.shape[1], -1))
    out = (weights.flatten(2, 3) @ values).view(*logits.shape[:3], values.shape[3])
    return Aside(logits.logsumexp(-1), out)


def sinks_and_recents(request: Request, smallest_sinks: int = 0) -> tuple[int, int]:
    """``n_s`` and ``n_r`` of a request's budget.

    Raises:
        ValueError: no recent token is left.
    """
    sinks = request.params["num_sink_tokens"]
    if sinks < smallest_sinks or request.tokens <= sinks:
        raise ValueError(
            f"{request.spec}: budget = {request.tokens} must exceed num_sink_tokens = {sinks} >= {smallest_sinks}: "
            "raise the budget"
        )
    return sinks, request.tokens - sinks


def windowed_cache(
    layer_class: type[WindowedLayer],
    config: PodConfig,
    request: Request,
    sinks: int,
    recent: int,
    chunks: Chunks | None = None,
) -> PodCache:
    """A cache of these layers, which see the end of every one of these chunks as the end of a prompt."""

    def make_layer(config: PodConfig, layer_idx: int) -> WindowedLayer:
        return layer_class(config, layer_idx, request.codec, sinks, recent)

    return GroupedCache(config, make_layer, request.spec, chunks=chunks)
