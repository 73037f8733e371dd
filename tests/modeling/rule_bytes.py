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
        return sum(store_nbytes(store, count) for _, store, count in layer._held(length))
    if isinstance(layer, MemoryLayer):
        return sum(store_nbytes(store, layer.held) for store in layer.tokens)
    if isinstance(layer, SlidingLayer):
        return sliding_nbytes(layer.tokens)
    if isinstance(layer, RazorLayer):
        mean = sum(x.nbytes for x in layer.compensation.tensors())
        return sliding_nbytes(layer.everything) + sliding_nbytes(layer.near) + mean
    held = dict.fromkeys(layer.stores(), length)
    statistics = 0
    if isinstance(layer, AccumulatingLayer):
        held, statistics = dict.fromkeys(held, layer.held), sum(x.nbytes for x in layer.statistics.values())
    if isinstance(layer, QuestLayer):
        held["pages"] = ceil(length / layer.page_size)
    if isinstance(layer, PairLayer):
        merged, apart = layer.merged_tokens, layer.num_apart
        counts = {"directions": merged, "norms": merged, "apart": apart, "positions": apart}
        held = {name: counts.get(name.rpartition("_")[2], length - merged) for name in held}
    return statistics + sum(store_nbytes(store, held[name]) for name, store in layer.stores().items())


def sliding_nbytes(tokens) -> int:
    window = tokens.window or ()
    beside = sum(store_nbytes(store, tokens.num_beside) for store in tokens.beside)
    return sum(store_nbytes(store, tokens.entered) for store in window) + beside


def store_nbytes(store, length: int) -> int:
    """Bytes of a store of ``length`` tokens per row.

    In packed stores as many tokens are packed as the residual window says, and slots are reserved for
    ``residual + group_size`` native ones.
    """
    if store.is_empty:
        return 0
    batch, heads, _, head_dim = store.shape
    if isinstance(store, ThinKeys):
        whole = batch * heads * (length - store.num_thin) * head_dim * store.dtype.itemsize
        return whole + (store_nbytes(store.thin, store.num_thin) if store.num_thin else 0)
    token, packing = head_dim * store.dtype.itemsize, getattr(store, "packing", None)
    if packing is None:
        return batch * heads * store.used_slots(length) * token
    if isinstance(store, PackedTokens) and store.is_static:
        return sum(tensor.nbytes for tensor in store.tensors())
    room = store.newest.room
    if isinstance(store, QuantizedWindow):
        sinks, packed = min(length, store.num_sink_tokens), min(store.num_packed(length), store.ring)
        native = sinks + (room if packed else length - sinks)
    elif store.newest.pending is not None:
        packed, native = store.packed_stop, length - store.newest.first
    else:
        packed = max(store.num_packed(length), store.packed_stop)
        native = room if packed else length
    group = packing.group_size if packing.per_channel else packing.channels(head_dim)
    packed_token = head_dim * packing.bits / 8 + 4 * head_dim / group  # fp16 zero and scale of a group
    return int(batch * heads * (packed * packed_token + native * token))
