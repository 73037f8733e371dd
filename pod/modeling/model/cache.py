"""Key-value caches whose layers compute attention, because who stores tokens knows what can be attended to.

``PodCache`` is a ``Cache`` of transformers. A forward pass calls ``begin_step``, hands every layer's q, k, v,
not rotated, to ``cache.layers[i].attend(q, k, v, step)``, and calls ``end_step``. Layers never see padding:
rows are left-aligned real tokens, so the token at position ``p`` of a row is at slot ``p`` of a full buffer.
*Columns* are counted as the caller feeds them, padding included. *Tokens* are real ones.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_state import SCHEMA, CacheState, Reader, Writer, check_objects, fields_of
from .config import PodConfig
from .layout import LAYOUT_LAYERS
from .step import CacheLayer, Compaction, Step, check_positions, compaction_of


class PodCache(Cache):
    """The cache of a PoD (or dense) model, and the base of every other method.

    Args:
        config: the model's configuration.
        make_layer: ``(config, layer_idx) -> CacheLayer``. None = the layers of the model's layout and plan.
        spec: name of the cache's method, shown in reports and errors. None = the model's own.

    Attributes:
        made_with: the budget and the parameters given to ``pod.make_cache``. The budget is a number of
            tokens, a list with that of every row, a text such as ``25%``, or None.
        make_layer: the argument, or the layout's.
        engine: a ``pod.engine.StaticEngine``, which decodes one token per row instead of the layer-by-layer
            pass. None = there is none.
        made_by_generate: whether ``generate()`` made the cache because it was given none.
        attach_engine: ``(cache, prompt columns, most columns)``: may give an engine to a cache that
            ``generate()`` made. ``pod.engine`` sets it; None in an exported checkpoint.
    """

    engine: Any = None
    made_by_generate = False
    made_with: tuple[int | str | list[int] | None, dict[str, Any]] = (None, {})
    configuration = frozenset({"config", "spec", "made_with", "engine", "make_layer"})
    """Attributes that ``state`` leaves out, because a new cache of the same spec already has them."""
    attach_engine: ClassVar[Callable[["PodCache", int, int], None] | None] = None

    def __init__(
        self, config: PodConfig, make_layer: Callable[..., CacheLayer] | None = None, spec: str | None = None
    ):
        self.make_layer = make_layer or LAYOUT_LAYERS[config.layout]
        layers = [self.make_layer(config, i) for i in range(config.num_hidden_layers)]
        super().__init__(layers=list(layers))
        self.layers: list[CacheLayer] = layers  # type: ignore[assignment]
        self.config = config
        self.spec = spec or config.own_method
        self._forget()

    def _forget(self) -> None:
        self._columns = 0
        self._lengths: Tensor | None = None
        self._longest: Tensor | None = None  # [B] the most tokens each row ever had. None = no crop so far
        self._seen_mask: Tensor | None = None  # bool [B, columns]. None = no padding so far
        self._seen_ids: list[Tensor] | None = []  # int32 [B, …] of each pass. None after inputs_embeds
        self._prompt_columns_left = 0  # columns of the announced prompt that were not fed yet
        self._pending: tuple | None = None  # arguments for _count, while a pass is in progress

    def __repr__(self) -> str:
        """Spec, budget, tokens, bytes, and the bytes of a dense cache of these tokens. For example:

        ``<pod cache snapkv, budget 512: 2,000 tokens in 1 row, 12,582,912 bytes of 49.15 MB dense (26 %)>``.
        """
        budget = self.made_with[0]
        # a spec may say its budget itself, as `snapkv@25%`
        named = self.spec if budget is None or "@" in self.spec else f"{self.spec}, budget {budget}"
        if self._lengths is None:
            return f"<pod cache {named}: empty>"
        lengths = self._lengths.tolist()
        low, high = min(lengths), max(lengths)
        tokens = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        rows = "1 row" if len(lengths) == 1 else f"each of {len(lengths)} rows"
        failed = ", the last pass failed: call reset()" if self._pending is not None else ""
        held = self.nbytes
        dense = self._dense_bytes(sum(lengths))
        share = f" of {dense / 1e6:,.2f} MB dense ({100 * held / dense:.0f} %)" if dense else ""
        return f"<pod cache {named}: {tokens} tokens in {rows}, {held:,} bytes{share}{failed}>"

    def _dense_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens in the model's dtype. 0 if no buffer has a dtype."""
        config = self.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        buffers = (buffer for layer, _ in self._holders() for buffer in layer.kv_buffers().values())
        size = next((buffer.dtype.itemsize for buffer in buffers if not buffer.is_empty), 0)
        return tokens * numbers * size

    # -- what the model calls --------------------------------------------------------------------------------

    def begin_prompt(self, num_columns: int) -> None:
        """Announce that the next ``num_columns`` columns are one prompt, in however many passes they come.

        Methods that choose tokens at the end of a prompt then do so once, when all columns were fed. Without
        an announcement, every forward pass of more than one column is a prompt of its own.

        Raises:
            ValueError: ``num_columns`` is negative.
        """
        if num_columns < 0:
            raise ValueError(f"a prompt has at least 0 columns, not {num_columns}: is it in the cache?")
        self._prompt_columns_left = num_columns

    def begin_step(
        self,
        config: PodConfig,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> tuple[Step, Compaction | None]:
        """Begin a pass: check that the inputs continue this cache, and describe the pass for the layers.

        Inputs are those of ``PodModel.forward``; ``hidden_states`` are ``[B, n, hidden]``. The new tokens
        count only when ``end_step`` is called. If the pass fails before, the cache refuses every later pass
        until ``reset()``.

        Returns:
            The step, and how to squeeze padding out of the columns (None = there is none).

        Raises:
            ValueError: the cache is for another model, its last pass failed, or batch, mask or positions do
                not continue it.
        """
        batch, n = hidden_states.shape[:2]
        self.check_fits(config)
        self._check_no_pass_failed()
        past = self._lengths
        if past is None:
            past = torch.zeros(batch, dtype=torch.long, device=hidden_states.device)
        else:
            self._check_batch(batch)
        self._check_mask(attention_mask)
        compaction = None if attention_mask is None else compaction_of(attention_mask, n)
        counts = torch.full_like(past, n) if compaction is None else compaction.counts
        announced = self._prompt_columns_left > 0
        left = max(self._prompt_columns_left - n, 0)
        step = Step(
            layers=self.layers,
            past=past,
            counts=counts,
            num_new=n if compaction is None else compaction.index.shape[1],
            columns=n,
            uniform_past=self._uniform_past(compaction),
            ends_prompt=left == 0,
            is_decode=n == 1 and self._columns > 0 and not announced,
            all_real=compaction is None,
        )
        if position_ids is not None:
            expected = step.positions if compaction is None else compaction.padded_positions(past)
            check_positions(position_ids, expected, attention_mask)
        is_padded = compaction is not None or self._seen_mask is not None
        self._pending = n, attention_mask if is_padded else None, input_ids, left
        return step, compaction

    def begin_decoding(self, batch: int) -> int:
        """Let an engine feed tokens to ``batch`` rows, outside of any pass. They count at ``end_decoding``.

        Returns:
            The number of tokens that each row has.

        Raises:
            ValueError: the cache is empty, rows have padding, the prompt is not complete, or the batch is
                another one.
        """
        self._check_no_pass_failed()
        if not self._columns or self._seen_mask is not None or self._prompt_columns_left:
            raise ValueError("an engine goes on behind a complete prompt without padding: feed one first")
        self._check_batch(batch)
        self._pending = ()
        return self._columns

    def end_decoding(self, ids: Tensor) -> None:
        """Count the tokens ``ids`` ``[B, m]`` that an engine has fed since ``begin_decoding``."""
        self._count(self.lengths + ids.shape[1], ids.shape[1], None, ids, 0)

    def end_step(self, step: Step) -> None:
        """End the pass that ``begin_step`` described: count its tokens as seen."""
        assert self._pending is not None, "begin_step comes first"
        self._count(step.lengths, *self._pending)

    def _count(self, lengths: Tensor, n: int, mask: Tensor | None, ids: Tensor | None, left: int) -> None:
        """Record a pass of ``n`` columns. Rows have ``lengths`` tokens now, ``left`` columns are to come."""
        self._pending, self._prompt_columns_left, self._lengths = None, left, lengths
        self._columns += n
        if self._longest is not None:
            self._longest = torch.maximum(self._longest, lengths)
        if mask is not None:
            self._seen_mask = mask.bool().clone()
        if ids is None:
            self._seen_ids = None
        elif self._seen_ids is not None:
            self._seen_ids.append(ids.to(torch.int32, copy=True))

    def prefill_chunks(self, step: Step) -> Iterator[Step]:
        """Cut the pass into chunks. A chunk must pass all layers before the next one is asked for.

        Here there is one chunk, the pass itself. Methods that compress while a prompt is fed yield several,
        each with the ``starts`` of its columns.
        """
        yield step

    def rereadings(self) -> Iterator[tuple[Tensor, Tensor, "PodCache"]]:
        """Inputs that the model reads again before it goes on (KVzip): ids, mask, cache. Here: none."""
        yield from ()

    def _uniform_past(self, compaction: Compaction | None) -> int | None:
        """Tokens of each row before the pass, if rows are alike and the pass has no padding. Else None."""
        if compaction is not None:
            return None
        if self._seen_mask is None:
            return self._columns
        lengths = set(self.lengths.tolist())  # one read of the device
        return lengths.pop() if len(lengths) == 1 else None

    def reserve(self, capacity: int) -> None:
        """Let each ``PodCacheLayer`` allocate ``capacity`` slots per row, so that tensors stay in place."""
        for layer in self.layers:
            layer.reserve(capacity)  # type: ignore[attr-defined]

    def check_fits(self, config: PodConfig) -> None:
        """Check that the cache was made for a model of this shape, plan and windows.

        Raises:
            ValueError: it was made for another one.
        """
        if config is not self.config and _signature(config) != _signature(self.config):
            raise ValueError("the cache was made for a model of another shape, plan or windows: make another")

    def _check_no_pass_failed(self) -> None:
        if self._pending is not None:
            raise ValueError(
                "the last pass over this cache failed half-way: call reset() and feed it all again"
            )

    def _check_batch(self, batch: int) -> None:
        if batch != self.batch_size:
            raise ValueError(
                f"the cache holds {self.batch_size} rows, the batch has {batch}: a filled cache cannot be "
                "used with num_beams, num_return_sequences or another batch; call reset() or make a new cache"
            )

    def _check_mask(self, attention_mask: Tensor | None) -> None:
        if attention_mask is None:
            if self._seen_mask is not None:
                raise ValueError("the cache holds padding: pass the attention_mask of seen and new columns")
            return
        seen = attention_mask[:, : self._columns].bool()
        known = self._seen_mask
        if not (seen.all() if known is None else torch.equal(seen, known.to(seen.device))):
            raise ValueError(
                "attention_mask marks tokens that are already in the cache differently than when they were "
                "fed (rows that ended early are fed padding as real tokens): repeat the same mask, or start "
                "an empty cache"
            )

    def check_continues(self, input_ids: Tensor, columns: int, has_embeds: bool) -> None:
        """Refuse a ``generate()`` call that would feed tokens of a filled cache again, or leave some out.

        Args:
            input_ids: ``[B, …]`` as given to ``generate()``: the whole conversation, or only the new tokens.
            columns: width of the whole attention mask (or of the inputs without one).
            has_embeds: whether ``inputs_embeds`` were given, whose tokens cannot be compared.
        """
        self._check_batch(input_ids.shape[0])
        new = columns - self._columns
        if new < 1:
            raise ValueError(
                f"the cache already holds {self._columns} columns and the mask has {columns}: pass at least "
                "one new token, and an attention_mask over seen and new tokens; for another prompt call "
                "reset() or make a new cache"
            )
        if has_embeds or self._seen_ids is None or input_ids.shape[1] == new:
            return
        seen = torch.cat(self._seen_ids, dim=1)
        given = input_ids[:, : self._columns]
        is_equal = input_ids.shape[1] == columns and given.shape == seen.shape
        if is_equal:
            equal = given.to(seen) == seen
            is_equal = (equal if self._seen_mask is None else equal | ~self._seen_mask).all()
        if not is_equal:
            raise ValueError(
                f"input_ids do not start with the {self._columns} columns in the cache: pass the whole "
                f"conversation, or only the {new} new tokens with an attention_mask of {columns} columns; "
                "for another prompt call reset() or make a new cache"
            )

    # -- what is held, as tensors and facts ------------------------------------------------------------------

    def state(self) -> CacheState:
        """Everything that the cache holds. The tensors are not copied, so read them before the next pass.

        Raises:
            ValueError: the last pass failed half-way.
        """
        self._check_no_pass_failed()
        writer, fields = self._written()
        facts = {"schema": SCHEMA, "spec": self.spec, "model": _signature(self.config), "fields": fields}
        return CacheState(writer.tensors, facts)

    def from_state(self, state: CacheState) -> None:
        """Replace everything that the cache holds by ``state``, whose tensors it uses without a copy.

        No other cache may use these tensors. They must be on the device of this cache's model.

        Raises:
            ValueError: the state has another schema or spec, or its model another shape, plan or windows.
        """
        facts = state.facts
        if (found := facts.get("schema")) != SCHEMA:
            raise ValueError(f"the state has schema {found!r}, this version reads {SCHEMA}: make it anew")
        if (spec := facts["spec"]) != self.spec:
            raise ValueError(f"the state is that of a {spec} cache, this is a {self.spec} cache: make one")
        if facts["model"] != _signature(self.config):
            raise ValueError("the model had another shape, plan or windows: load it, or make the cache anew")
        self.reset()
        vars(self).update(Reader(self, state.tensors).fields(facts["fields"]))

    def new_layer(self, layer_idx: int) -> CacheLayer:
        """An empty layer for index ``layer_idx``, which ``from_state`` fills."""
        return self.layers[layer_idx]

    def _written(self) -> tuple[Writer, dict[str, Any]]:
        """A writer that has written all attributes but ``configuration``, and their facts."""
        writer = Writer(self)
        held = {name: value for name, value in fields_of(self).items() if name not in self.configuration}
        return writer, writer.fields(held)

    def check_integrity(self) -> None:
        """Compute anew every number that is recorded in two ways, and compare. Tests call it often.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        self._check_no_pass_failed()
        self._check_bookkeeping()
        writer, _ = self._written()
        check_objects(writer.met, writer.tensors)
        parts = {tensor.untyped_storage().data_ptr() for _, tensor, _ in self._all_parts()}
        for path, tensor in writer.tensors.items():
            place = tensor.untyped_storage().data_ptr()
            assert place in parts or path.endswith(".table"), f"{path} is not in nbytes"
        lengths = None if self._lengths is None else self._lengths.cpu()
        for number, (layer, rows) in enumerate(self._holders()):
            where = f"layer {number % len(self.layers)}, rows {rows}"
            layer.check_integrity(where, None if lengths is None else lengths[rows])
        if self.engine is not None:
            self.engine.check_integrity()

    def _check_bookkeeping(self) -> None:
        mask, ids, columns = self._seen_mask, self._seen_ids, self._columns
        if self._lengths is None:
            assert not (columns or ids) and mask is None, f"empty, with {columns} columns, mask or ids"
            return
        lengths = self._lengths.tolist()
        shape, counted = (len(lengths), columns), [columns] * len(lengths)
        if mask is not None:
            assert mask.shape == shape and mask.dtype == torch.bool, f"mask: {mask.dtype} {list(mask.shape)}"
            assert not mask.all(), "a mask without padding is kept"
            counted = mask.sum(1).tolist()
        assert lengths == counted, f"lengths {lengths}, not {counted}"
        if ids is not None:
            seen = {x.shape[0] for x in ids}, sum(x.shape[1] for x in ids)
            assert seen == ({shape[0]}, columns), f"ids of {seen} for {list(shape)}"

    def _holders(self) -> Iterator[tuple[CacheLayer, list[int]]]:
        """Every layer that holds tokens, with the rows of the batch whose tokens it holds."""
        rows = list(range(max(self.batch_size, 0)))
        yield from ((layer, rows) for layer in self.layers)

    # -- bytes -----------------------------------------------------------------------------------------------

    def _all_parts(self) -> Iterator[tuple[str, Tensor, list[int]]]:
        """Every tensor held: name of its part, the tensor, and the rows of the batch whose data it has."""
        for layer, rows in self._holders():
            yield from ((name, tensor, rows) for name, tensor in layer.parts())
        everyone = list(range(max(self.batch_size, 0)))
        if self.engine is not None:
            yield from (("decode_buffers", tensor, everyone) for tensor in self.engine.tensors())
        bookkeeping = [self._lengths, self._longest, self._seen_mask, *(self._seen_ids or ())]
        yield from (("bookkeeping", tensor, everyone) for tensor in bookkeeping if tensor is not None)

    def _storages(self) -> Iterator[tuple[str, torch.device, int, list[int]]]:
        """Part, device, bytes and rows of every storage, each once and whole, whatever views of it exist."""
        seen: set[int] = set()
        for name, tensor, rows in self._all_parts():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield name, tensor.device, storage.nbytes(), rows

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes held, by part (``keys``, ``values``, ``bookkeeping``, …). Every storage counts once."""
        totals: dict[str, int] = {}
        for name, _, size, _ in self._storages():
            totals[name] = totals.get(name, 0) + size
        return totals

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes held on each device, by names such as ``cuda:0``. Every storage counts once.

        Each layer's tokens lie on its layer's device.
        """
        totals: dict[str, int] = {}
        for _, device, size, _ in self._storages():
            totals[str(device)] = totals.get(str(device), 0) + size
        return totals

    def nbytes_by_row(self) -> list[int]:
        """Bytes held for each row of the batch.

        A tensor of several rows counts in equal parts for each of them, even if one is longer than another.
        """
        totals = [0.0] * max(self.batch_size, 0)
        for _, _, size, rows in self._storages():
            for row in rows:
                totals[row] += size / len(rows)
        return [round(total) for total in totals]

    @property
    def nbytes(self) -> int:
        """All bytes that the cache holds, in tensors of every part. Every storage counts once."""
        return sum(self.nbytes_by_part().values())

    # -- what transformers calls -----------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included: the width of the part of an attention mask that was fed already."""
        return self._columns

    @property
    def lengths(self) -> Tensor:
        """``[B]``, the real tokens seen per row. ``ValueError`` for an empty cache."""
        if self._lengths is None:
            raise ValueError("the cache is empty: feed a prompt first")
        return self._lengths

    @property
    def is_initialized(self) -> bool:
        return self._lengths is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch. -1 while the cache is empty."""
        return -1 if self._lengths is None else self._lengths.shape[0]

    def reset(self) -> None:
        """Forget all tokens. An engine stays attached."""
        if self.engine is not None:
            self.engine.release()
        for layer in self.layers:
            layer.clear()
        self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch: row ``i`` becomes what row ``indices[i]`` was."""
        if self._lengths is None:
            return
        for layer in self.layers:
            layer.select_rows(indices)
        index = indices.to(self._lengths.device)
        self._lengths = self._lengths[index]
        self._longest = None if self._longest is None else self._longest[index]
        if self._seen_mask is not None:
            self._seen_mask = self._seen_mask[index]
            if self._seen_mask.all():
                self._seen_mask = None
        if self._seen_ids:
            self._seen_ids = [torch.cat(self._seen_ids, dim=1)[index]]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._lengths is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    # -- taking tokens back ----------------------------------------------------------------------------------

    @property
    def num_croppable(self) -> int:
        """How many of the last columns ``crop`` can take back now."""
        if self._lengths is None:
            return 0
        lengths = self.lengths.tolist()
        longest = lengths if self._longest is None else self._longest.tolist()
        most = list(lengths)
        for layer, rows in self._holders():
            for row in rows:
                most[row] = min(most[row], layer.most_croppable(lengths[row], longest[row]))
        if self._seen_mask is None:
            return min(most)
        tokens = self._seen_mask.cpu().flip(1).cumsum(1)
        return int((tokens <= torch.tensor(most)[:, None]).all(0).sum())

    @property
    def num_ahead(self) -> int:
        """How many tokens behind the next one can be fed in a pass and taken back without a trace."""
        lengths = self.lengths.tolist()
        pairs = {(layer, lengths[row]) for layer, rows in self._holders() for row in rows}
        return max(0, min(layer.most_ahead(length) for layer, length in pairs))

    def check_assisted(self, longest: int) -> None:
        """Check that candidates of assisted decoding can be taken back, in rows of up to ``longest`` tokens.

        Raises:
            ValueError: they cannot.
        """
        layers = [self.new_layer(layer_idx) for layer_idx in range(self.config.num_hidden_layers)]
        if not all(layer.is_croppable for layer in layers):
            raise ValueError(
                f"assisted decoding is not supported by the {self.spec} cache: what it drops for a candidate "
                "does not come back; use full, pod with extra_slots, or int4, or decode without assistance"
            )
        if any(layer.most_ahead(longest) < 0 for layer in layers):
            raise ValueError(
                f"assisted decoding needs room behind the windows of the {self.spec} cache: pass none, or "
                "one with extra_slots for the most candidates of a step (a trained window has none)"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns, as if they had not been fed.

        A prompt that was announced with ``begin_prompt`` still ends at the same column.

        Args:
            tokens_to_remove: how many columns, padding included, as a negative number. 0 does nothing.

        Raises:
            ValueError: the number is positive, or there are more columns than ``num_croppable``.
        """
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(
                f"crop({-count}) of this {self.spec} cache takes a negative number of columns: crop({count})"
            )
        if not count:
            return
        self._check_no_pass_failed()
        most = self.num_croppable
        if count > most:
            raise ValueError(
                f"crop({tokens_to_remove}) is not possible: this {self.spec} cache can take back {most} of "
                f"its {self._columns} columns, as what it dropped, packed or overwrote does not come back; "
                "crop less, reset() and feed again" + self._room_to_crop(count)
            )
        left = self._prompt_columns_left
        if count == self._columns:
            self.reset()
        else:
            self._crop(count)
        self._prompt_columns_left = left + count if left else 0

    def _room_to_crop(self, count: int) -> str:
        """The end of an error message: how to make a cache that can take back ``count`` columns.

        It is empty unless only the windows' rings stand in the way, which ``extra_slots`` makes larger.
        """
        config = self.config
        if self.spec != "pod" or config.layer_windows is not None or config.kv_bits is not None:
            return ""
        return f", or make the cache with extra_slots={count}, which keeps what left the windows"

    def _crop(self, count: int) -> None:
        counts = torch.full_like(self.lengths, count)
        if self._seen_mask is not None:
            counts = self._seen_mask[:, -count:].sum(1)
            rest = self._seen_mask[:, :-count]
            self._seen_mask = None if rest.all() else rest.clone()
        self._longest = self.lengths if self._longest is None else self._longest
        self._lengths = self.lengths - counts
        self._columns -= count
        self._crop_layers(counts)
        if self._seen_ids:
            self._seen_ids = [torch.cat(self._seen_ids, dim=1)[:, :-count]]

    def _crop_layers(self, counts: Tensor) -> None:
        """Take back ``counts`` ``[B]`` tokens in the layers. ``lengths`` already are those afterwards."""
        for layer in self.layers:
            layer.crop(int(self.lengths.max()))


def _signature(config: PodConfig) -> str:
    """Shape, plan and windows of a model, as text that two models must share to use the same cache.

    Windows count only for layouts that have them. The order of heads counts because keys are stored in it.
    """
    windows = config.num_sink_tokens, config.num_recent_tokens, *(config.layer_windows or ())
    if config.sinks == "constant":
        windows += ("constant sinks", *(["keys"] if config.sink_keys else []))
    windowed = config.own_method in ("pod", "window")
    sizes = config.num_attention_heads, config.head_dim, config.head_order
    return str((config.own_method, config.sharing_plan.lead, windows if windowed else None, *sizes))
