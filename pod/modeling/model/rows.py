"""``GroupedCache``: a cache whose layers see only rows of equal lengths.

It handles padding, ragged batches and reordering, so that methods need not. A batch is split into *groups of
rows* with equally many tokens seen, equally many new tokens and the same chunks. Each group has its own
*child layers*, whose tensors are ``[b, …]`` over the group's rows, with no padding inside. So a method is
written for rows of one length, and a row in a padded batch gets exactly the result that it gets alone.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cache import PodCache
from .config import PodConfig
from .step import Agreed, CacheLayer, Step


@dataclass(frozen=True)
class Schedule:
    """The chunks of one prompt.

    Attributes:
        boundaries: for each chunk, how many tokens of the prompt are fed at its end. The last one is the
            prompt's length.
        memory: for IMDC, per layer, the planned ``m_0 … m_{n-1}``. None when nothing is compressed.
    """

    boundaries: tuple[int, ...]
    memory: tuple[tuple[int, ...], ...] | None = None

    def next_boundary(self, done: int) -> int:
        """The end of the chunk that the next token belongs to, after ``done`` tokens of the prompt."""
        return next(end for end in self.boundaries if end > done)


@dataclass(frozen=True)
class FixedChunks:
    """Chunks of ``size`` tokens, for the ``streaming`` variant of methods that rank by attention."""

    size: int

    def start_prompt(self, length: int, past: int, layers: list) -> Schedule:
        """The schedule of a prompt for these child layers.

        Args:
            length: tokens of the prompt.
            past: tokens seen before it.
            layers: the child layers.
        """
        return Schedule((*range(self.size, length, self.size), length))

    def check_prompt(self, length: int) -> None:
        """Raise ValueError where a first prompt of so many tokens has no schedule. Here each has one."""


@dataclass
class RowGroup:
    """Rows of the batch that went through the same passes: equally many tokens, in the same chunks.

    Attributes:
        rows: their indices in the batch.
        layers: one child layer per decoder layer.
        seen: tokens that each row has seen.
        prompt_length: tokens of the prompt that is being fed. None when this is unknown or no prompt is fed.
        prompt_done: how many tokens of that prompt have been fed.
        schedule, chunk_index: the chunks of that prompt, and the index of the current one.
        budget_id: index in the cache's ``budget_caches`` of the one that made the layers.
    """

    rows: list[int]
    layers: list[CacheLayer]
    seen: int = 0
    prompt_length: int | None = None
    prompt_done: int = 0
    schedule: Any = None
    chunk_index: int = 0
    budget_id: int = 0

    def parts(self, labels: Sequence[Any]) -> dict[Any, "RowGroup"]:
        """Split the group into one group for each label.

        Args:
            labels: one for each row of the group.

        Returns:
            The groups by label. With one label it is the group itself, else copies.
        """
        places: dict[Any, list[int]] = {}
        for place, label in enumerate(labels):
            places.setdefault(label, []).append(place)
        if len(places) == 1:
            return {labels[0]: self}
        return {label: self.take(those, [self.rows[i] for i in those]) for label, those in places.items()}

    def take(self, places: list[int], rows: list[int]) -> "RowGroup":
        """A new group with some of this group's rows. Tensors are copied.

        Args:
            places: the rows, as indices into this group.
            rows: the indices of these rows in the batch from now on.
        """
        held = {id(tensor): tensor for layer in self.layers for _, tensor in layer.parts()}
        layers = deepcopy(self.layers, held)  # tensors are shared until select_rows copies their rows
        for layer in layers:
            layer.select_rows(torch.tensor(places))
        return replace(self, rows=rows, layers=layers)

    def count(self, part: Step) -> None:
        """Count the tokens of a pass over these rows as seen."""
        self.seen += part.num_new
        if not part.is_decode:
            self.prompt_done += part.num_new
            if part.ends_prompt:
                self.chunk_index += 1
            if part.ends_prompt and part.is_last_chunk:
                self.prompt_length, self.prompt_done, self.schedule, self.chunk_index = None, 0, None, 0

    def crop(self, count: int) -> None:
        """Take back the last ``count`` tokens of each row. A prompt that is being fed keeps its end."""
        if not count:  # the columns were padding
            return
        self.seen -= count
        if self.prompt_length is not None:
            self.prompt_length += max(0, count - self.prompt_done)
        self.prompt_done = max(0, self.prompt_done - count)
        for layer in self.layers:
            if self.seen:
                layer.crop(self.seen)
            else:
                layer.clear()


class GroupedCache(PodCache):
    """A cache of child layers, one set per group of rows.

    Args:
        config: the model's configuration.
        make_layer: ``(config, layer_idx) -> CacheLayer``, makes a child layer, whose rows have equal lengths.
        spec: name of the method, shown in reports and errors.
        rowwise: whether every row is a group of its own, for methods that decide by the content of a row.
        chunks: makes the ``Schedule`` of a prompt, after each chunk of which the method compresses; for
            example ``FixedChunks``. None = it compresses once, when the prompt ends.
        decide: ``(children, step) -> labels or None``. It is called for each group when all layers have seen
            a chunk, and labels each row by the tokens that it holds. Rows with different labels become
            different groups.
        after_layers: ``(children, step, label)``, called after ``decide`` for each group.

    Attributes:
        budget_caches: caches of the same method with different budgets, the first of which is this cache.
            Each row has the layers and chunks of one of them.
        budget_id_of_row: for each row of a new batch, its index in ``budget_caches``. None = all rows have
            the first.
        tokens_of_prompt: gives the budget of a row, in tokens, from the number of tokens of its first prompt.
            The first budget cache then only serves rows that have no prompt yet. None = budgets are known
            from the start.
        make_budget_cache: makes the other caches, one for each of ``prompt_budgets``.
        prompt_budgets: the budgets, in tokens, that ``tokens_of_prompt`` has given so far.
    """

    tokens_of_prompt: Callable[[int], int] | None = None
    make_budget_cache: Callable[[int], PodCache] | None = None

    def __init__(
        self,
        config: PodConfig,
        make_layer: Callable[[PodConfig, int], CacheLayer],
        spec: str,
        rowwise: bool = False,
        chunks: Any = None,
        decide: Callable[[list, Step], list | None] | None = None,
        after_layers: Callable[[list, Step, Any], None] | None = None,
    ):
        self.make_child, self.rowwise, self.chunks = make_layer, rowwise, chunks
        self.budget_caches: list[GroupedCache] = [self]
        self.budget_id_of_row: list[int] | None = None
        self.prompt_budgets: list[int] = []
        self.decide, self.after_layers = decide, after_layers
        self.groups: list[RowGroup] = []
        super().__init__(config, partial(_GroupedLayer, self), spec)

    configuration = PodCache.configuration | {
        *("layers", "chunks", "rowwise", "decide", "after_layers", "budget_caches", "budget_id_of_row")
    }

    @classmethod
    def of_budgets(cls, caches: list[PodCache], budget_id_of_row: list[int]) -> "GroupedCache":
        """An empty cache whose rows have different budgets.

        Args:
            caches: an empty cache for each budget.
            budget_id_of_row: for each row of the batch, the index of its cache in ``caches``.
        """
        budget_caches = [cls.grouped(cache) for cache in caches]
        budget_caches[0].budget_caches, budget_caches[0].budget_id_of_row = budget_caches, budget_id_of_row
        return budget_caches[0]

    @classmethod
    def by_prompt(
        cls,
        stand_in: PodCache,
        tokens_of_prompt: Callable[[int], int],
        make_budget_cache: Callable[[int], PodCache],
    ) -> "GroupedCache":
        """An empty cache whose rows get their budgets, in tokens, when the first prompt of each begins.

        Args:
            stand_in: an empty cache of any budget, for rows that have no prompt yet.
            tokens_of_prompt: gives the budget in tokens for the length of a prompt in tokens.
            make_budget_cache: makes an empty cache of a budget in tokens.
        """
        cache = cls.grouped(stand_in)
        cache.tokens_of_prompt, cache.make_budget_cache = tokens_of_prompt, make_budget_cache
        return cache

    @classmethod
    def grouped(cls, cache: PodCache) -> "GroupedCache":
        """A grouped cache with the layers of ``cache``, which is empty; ``cache`` itself if it is grouped."""
        return cache if isinstance(cache, cls) else cls(cache.config, cache.make_layer, cache.spec)

    def budget_cache(self, number: int) -> "GroupedCache":
        """The cache at index ``number`` of ``budget_caches``, made when it is first needed."""
        while len(self.budget_caches) <= number:
            assert self.make_budget_cache is not None, (
                "only caches whose budgets follow the prompt add budgets"
            )
            made = self.make_budget_cache(self.prompt_budgets[len(self.budget_caches) - 1])
            self.budget_caches.append(self.grouped(made))
        return self.budget_caches[number]

    def new_layer(self, layer_idx: int) -> CacheLayer:
        return self.make_child(self.config, layer_idx)

    # -- one pass --------------------------------------------------------------------------------------------

    def prefill_chunks(self, step: Step) -> Iterator[Step]:
        """See ``PodCache.prefill_chunks``.

        In each step that it yields, every row advances to the end of its own chunk, or of the pass.
        """
        counts = [step.num_new] * step.past.shape[0] if step.all_real else step.counts.tolist()
        fed = [0] * len(counts)
        try:
            self._split(counts, step)
            self._plan_chunks(step, counts)
        except ValueError:
            self._forget_pass()
            raise
        while True:
            groups = list(self.groups)
            left = [counts[group.rows[0]] - fed[group.rows[0]] for group in groups]
            passes = [self._next_pass(*each, step) for each in zip(groups, left, strict=True)]
            yield self._prefill_chunk(step, passes, fed)
            for group, part in zip(groups, passes, strict=True):
                for row in group.rows:
                    fed[row] += part.num_new
                if part.num_new:
                    self._end_pass(group, part)
            if fed == counts:
                return

    def _split(self, counts: list[int], step: Step) -> None:
        """Regroup so that the rows of a group feed equally many tokens of equally long prompts."""
        groups = self.groups or self._new_groups(len(counts))
        self.groups = []
        for group in groups:
            labels = [(counts[row], self._prompt_length(group, counts[row], step)) for row in group.rows]
            for (_, length), part in group.parts(labels).items():
                part.prompt_length = length
                if self.tokens_of_prompt is not None and length and not part.seen:
                    part.budget_id, part.layers = self._budget_id_of_prompt(self.tokens_of_prompt(length)), []
                make = self.budget_cache(part.budget_id).new_layer
                part.layers = part.layers or [make(i) for i in range(self.config.num_hidden_layers)]
                self.groups.append(part)

    def _budget_id_of_prompt(self, tokens: int) -> int:
        """The index in ``budget_caches`` of the cache with a budget of so many tokens."""
        if tokens not in self.prompt_budgets:
            self.prompt_budgets.append(tokens)
        return 1 + self.prompt_budgets.index(tokens)

    def _new_groups(self, count: int) -> list[RowGroup]:
        """The groups of a new batch of ``count`` rows: one per row if ``rowwise``, else one per budget."""
        budget_ids = self.budget_id_of_row or [0] * count
        if len(budget_ids) != count:
            raise ValueError(
                f"the cache was made with budgets of {len(budget_ids)} rows, the batch has {count}: "
                "give each row its budget, or one for all"
            )
        labels = range(count) if self.rowwise else budget_ids
        parts = RowGroup(list(range(count)), []).parts(labels).values()
        return [replace(part, budget_id=budget_ids[part.rows[0]]) for part in parts]

    def _prompt_length(self, group: RowGroup, count: int, step: Step) -> int | None:
        """Real tokens of the prompt of a row that feeds ``count`` tokens. None without a prompt.

        A row whose first token comes while the others decode starts a prompt of one token, as it does alone.
        """
        if group.prompt_length is not None or not count:
            return group.prompt_length
        if step.is_decode:
            return None if group.seen else 1
        return count + (self._prompt_columns_left or step.columns) - step.columns

    def _plan_chunks(self, step: Step, counts: list[int]) -> None:
        """Make the schedule of every prompt that begins in this pass, from its length in tokens.

        Raises:
            ValueError: there is padding behind a row's last token, so that the length is wrong.
        """
        for group in self.groups:
            chunks = self.budget_cache(group.budget_id).chunks
            length, fed = group.prompt_length, group.prompt_done + counts[group.rows[0]]
            if chunks is None or length is None or (step.is_decode and group.seen):
                continue
            if step.ends_prompt and fed != length:
                raise ValueError(
                    f"{self.spec} compresses while a prompt is fed and takes padding on the left only: row "
                    f"{group.rows[0]} has {fed} tokens where {length} were announced"
                )
            if group.schedule is None:
                group.schedule = chunks.start_prompt(length, group.seen, group.layers)

    def _forget_pass(self) -> None:
        """Undo the beginning of a pass that was refused before any token was fed.

        The cache can then be used as if the pass had not been tried.
        """
        self._pending = None
        if not self.is_initialized:
            self.groups.clear()
        for group in self.groups:
            if not group.prompt_done:
                group.prompt_length = group.schedule = None

    def _next_pass(self, group: RowGroup, left: int, step: Step) -> Step:
        """The group's next pass: to the end of its chunk, or of the ``left`` tokens still to be fed."""
        is_decode = step.is_decode and group.seen > 0
        width, ends, last = left, step.ends_prompt and left > 0 and not is_decode, True
        if left and not is_decode and group.schedule is not None:
            boundary = group.schedule.next_boundary(group.prompt_done)
            width = min(left, boundary - group.prompt_done)
            ends = group.prompt_done + width == boundary
            last = boundary == group.prompt_length
        past = step.past.new_full((len(group.rows),), group.seen)
        return Step(
            layers=group.layers,
            past=past,
            counts=torch.full_like(past, width),
            num_new=width,
            columns=width,
            uniform_past=group.seen,
            ends_prompt=ends,
            is_decode=is_decode and width == 1,
            all_real=True,
            schedule=group.schedule,
            chunk_index=group.chunk_index,
            is_last_chunk=last,
        )

    def _prefill_chunk(self, step: Step, passes: list[Step], fed: list[int]) -> Step:
        """The step of the whole batch in which each group does its own pass.

        Args:
            step: the pass that the caller feeds.
            passes: the next pass of each group.
            fed: for each row, the tokens of ``step`` that were fed already.
        """
        device = step.past.device
        starts = torch.tensor(fed, device=device)
        counts = torch.zeros_like(starts)
        # made once for all layers
        rows = [torch.tensor(group.rows, device=device) for group in self.groups]
        for places, part in zip(rows, passes, strict=True):
            counts[places] = part.num_new
        width = max(part.num_new for part in passes)
        whole = not any(fed) and width == step.num_new
        return replace(
            step,
            past=step.past + starts if any(fed) else step.past,
            counts=counts,
            num_new=width,
            uniform_past=passes[0].uniform_past if len(passes) == 1 else None,
            starts=None if whole else starts,
            groups=list(zip(passes, rows, strict=True)),
        )

    def end_step(self, step: Step) -> None:
        """See ``PodCache.end_step``.

        Rows whose prompt ends without a new token (right padding) are compressed now.
        """
        if step.ends_prompt and not step.is_decode:
            self._plan_chunks(step, [0] * step.past.shape[0])
            for group in list(self.groups):
                if group.prompt_done:
                    part = self._next_pass(group, 0, step)
                    part.ends_prompt, part.ropes = True, step.ropes
                    for layer in group.layers:
                        layer.flush(part.on(layer.device or part.past.device))
                    self._end_pass(group, part)
        super().end_step(step)

    def _end_pass(self, group: RowGroup, part: Step) -> None:
        """Run ``decide`` and ``after_layers`` on a group after its pass ``part``, and count its tokens."""
        labels = self.decide(group.layers, part) if self.decide else None
        parts = group.parts(labels or [None] * len(group.rows))
        at = self.groups.index(group)
        self.groups[at : at + 1] = parts.values()
        for label, taken in parts.items():
            if self.after_layers is not None:
                own = part if taken is group else _pass_of_some(taken, part)
                self.after_layers(taken.layers, own, label)
            taken.count(part)

    # -- rows ------------------------------------------------------------------------------------------------

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.groups:
            wanted = indices.tolist()
            groups, self.groups = self.groups, []
            for group in groups:
                rows = [new for new, old in enumerate(wanted) if old in group.rows]
                parts = [rows] if rows else []
                if self.rowwise:
                    parts = [[row] for row in rows]
                for part in parts:
                    places = [group.rows.index(wanted[row]) for row in part]
                    self.groups.append(group.take(places, part))
        super().batch_select_indices(indices)

    @property
    def is_croppable(self) -> bool:
        """Whether the method's layers can take tokens back."""
        return self.new_layer(0).is_croppable

    def _holders(self) -> Iterator[tuple[CacheLayer, list[int]]]:
        yield from ((layer, group.rows) for group in self.groups for layer in group.layers)

    def _crop_layers(self, counts: Tensor) -> None:
        groups, self.groups = self.groups, []
        for group in groups:
            for count, part in group.parts(counts[group.rows].tolist()).items():
                part.crop(count)
                self.groups.append(part)

    def check_integrity(self) -> None:
        super().check_integrity()
        seen = sorted((row, group.seen) for group in self.groups for row in group.rows)
        lengths = list(enumerate(self.lengths.tolist())) if self.is_initialized else []
        assert seen == lengths, f"groups have seen (row, tokens) {seen}, the cache {lengths}"


def _pass_of_some(taken: RowGroup, part: Step) -> Step:
    """The pass ``part`` of a group, for the group ``taken`` that some of its rows have become."""
    rows = slice(len(taken.rows))  # any rows will do, as past and counts are equal in all of them
    past = part.past[rows]
    counts = part.counts[rows]
    return replace(part, layers=taken.layers, past=past, counts=counts, agreed=Agreed(part.sizes))


class _GroupedLayer(CacheLayer):
    """Layer ``layer_idx`` as the model calls it: passes each group's rows to that group's child layer."""

    def __init__(self, cache: GroupedCache, config: PodConfig, layer_idx: int):
        super().__init__()
        self.cache, self.layer_idx = cache, layer_idx

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if len(step.groups) == 1:
            return self._attend_group(0, None, step, [q, k, v])
        out = torch.zeros_like(q)
        for number, (part, rows) in enumerate(step.groups):
            if part.num_new:
                qkv = [x[rows, :, : part.num_new] for x in (q, k, v)]
                out[rows, :, : part.num_new] = self._attend_group(number, rows, step, qkv)
        return out

    def _attend_group(self, number: int, rows: Tensor | None, step: Step, qkv: list[Tensor]) -> Tensor:
        part = step.groups[number][0]
        layer = self.cache.groups[number].layers[self.layer_idx]
        if part.ropes is None:
            made = {rope: rope.for_rows(rows, part.num_new) for rope in set(step.ropes)}
            part.ropes, part.backend = [made[rope] for rope in step.ropes], step.backend
        part.sink = step.sink
        q, k, v = qkv
        out = layer.attend(q, k, v, part)
        layer.flush(part)
        return out

    def clear(self) -> None:
        self.cache.groups.clear()
