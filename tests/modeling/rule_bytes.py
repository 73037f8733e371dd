"""Bytes that the rule of a cache's method needs for the tokens seen.

They are without bookkeeping and growth slack. Where content decides what stays, they are for the tokens held
now.
"""

from math import ceil

from pod.modeling.methods.h2o import AccumulatingLayer
from pod.modeling.methods.imdc import MemoryLayer
from pod.modeling.methods.minicache import PairLayer
from pod.modeling.methods.quest import QuestLayer
from pod.modeling.methods.razor import RazorLayer
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.methods.sliding import SlidingLayer
from pod.modeling.methods.think import ThinKeys
from pod.modeling.model.quantized import PackedTokens, QuantizedWindow


def rule_nbytes(cache) -> int:
    lengths = cache.lengths.tolist()
    return sum(layer_nbytes(layer, max(lengths[i] for i in rows)) for layer, rows in cache._holders())


def layer_nbytes(layer, length: int) -> int:
    """Of rows of ``length`` tokens."""
    if isinstance(layer, SharedSelectionLayer):
        return sum(buffer_nbytes(buffer, count) for _, buffer, count in layer._held(length))
    if isinstance(layer, MemoryLayer):
        return sum(buffer_nbytes(buffer, layer.held) for buffer in layer.tokens)
    if isinstance(layer, SlidingLayer):
        return sliding_nbytes(layer.tokens)
    if isinstance(layer, RazorLayer):
        mean = sum(x.nbytes for x in layer.compensation.tensors())
        return sliding_nbytes(layer.everything) + sliding_nbytes(layer.near) + mean
    held = dict.fromkeys(layer.kv_buffers(), length)
    statistics = 0
    if isinstance(layer, AccumulatingLayer):
        held, statistics = dict.fromkeys(held, layer.held), sum(x.nbytes for x in layer.statistics.values())
    if isinstance(layer, QuestLayer):
        held["pages"] = ceil(length / layer.page_size)
    if isinstance(layer, PairLayer):
        merged, apart = layer.merged_tokens, layer.num_apart
        counts = {"directions": merged, "norms": merged, "apart": apart, "positions": apart}
        held = {name: counts.get(name.rpartition("_")[2], length - merged) for name in held}
    return statistics + sum(buffer_nbytes(buffer, held[name]) for name, buffer in layer.kv_buffers().items())


def sliding_nbytes(tokens) -> int:
    window = tokens.window or ()
    beside = sum(buffer_nbytes(buffer, tokens.num_beside) for buffer in tokens.beside)
    return sum(buffer_nbytes(buffer, tokens.entered) for buffer in window) + beside


def buffer_nbytes(buffer, length: int) -> int:
    """Bytes of a buffer of ``length`` tokens per row.

    In packed buffers as many tokens are packed as the residual window says, and slots are reserved for
    ``residual + group_size`` native ones.
    """
    if buffer.is_empty:
        return 0
    batch, heads, _, head_dim = buffer.shape
    if isinstance(buffer, ThinKeys):
        whole = batch * heads * (length - buffer.num_thin) * head_dim * buffer.dtype.itemsize
        return whole + (buffer_nbytes(buffer.thin, buffer.num_thin) if buffer.num_thin else 0)
    token, packing = head_dim * buffer.dtype.itemsize, getattr(buffer, "packing", None)
    if packing is None:
        return batch * heads * buffer.used_slots(length) * token
    if isinstance(buffer, PackedTokens) and buffer.is_static:
        return sum(tensor.nbytes for tensor in buffer.tensors())
    room = buffer.newest.room
    if isinstance(buffer, QuantizedWindow):
        sinks, packed = min(length, buffer.num_sink_tokens), min(buffer.num_packed(length), buffer.ring)
        native = sinks + (room if packed else length - sinks)
    elif buffer.newest.pending is not None:
        packed, native = buffer.packed_stop, length - buffer.newest.first
    else:
        packed = max(buffer.num_packed(length), buffer.packed_stop)
        native = room if packed else length
    group = packing.group_size if packing.per_channel else packing.channels(head_dim)
    packed_token = head_dim * packing.bits / 8 + 4 * head_dim / group  # fp16 zero and scale of a group
    return int(batch * heads * (packed * packed_token + native * token))
