"""SnapKV (Li et al., 2024): at the end of the prompt each KV head keeps the tokens that the prompt's end attends to.

``exact`` prefill: the whole prompt is held until it ends, however it is chunked, then every layer keeps ``budget`` tokens:
the last ``window`` ones and the best of the rest by the pooled sum of their attention. Decoded tokens are all kept.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.cache import PodCache, Step
from pod.modeling.config import PodConfig
from pod.modeling.layout import PodCacheLayer
from pod.modeling.methods.base import Method
from pod.modeling.stores import TokenStore

_POOLS = {"avg": F.avg_pool1d, "max": F.max_pool1d}


class SnapLayer(PodCacheLayer):
    """A dense layer whose slots stop being positions once the prompt has been compressed."""

    def __init__(self, config: PodConfig, layer_idx: int, budget: int, window: int, kernel: int, pool: str):
        self.budget, self.window, self.kernel, self.pool = budget, window, kernel, _POOLS[pool]
        super().__init__(config, layer_idx)

    def clear(self) -> None:
        super().clear()
        self.held: Tensor | None = None  # [B] tokens held per row; None = every token seen
        # last queries of the unfinished prompt, [B, Hq, window, d] right-aligned, and how many of them are real, [B]
        self.observed: tuple[Tensor, Tensor] | None = None

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().parts()
        yield from (("bookkeeping", x) for x in (self.held, *(self.observed or ())) if x is not None)

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.held = None if self.held is None else self.held[index.to(self.held.device)]
        if self.observed is not None:
            queries, counts = self.observed
            self.observed = queries[index.to(queries.device)], counts[index.to(counts.device)]

    def predicted_nbytes(self, length: int) -> int:
        batch, heads, _, head_dim = self.all_values.data.shape
        slots = length if self.held is None else int(self.held.max())
        return 2 * batch * heads * slots * head_dim * self.all_values.data.element_size()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope(q), step.rope(k)
        past = step.past if self.held is None else self.held
        out = self.attend_rotated(q, k, v, self._in_slots(step, past))
        if self.held is not None:
            self.held = past + step.counts
        if not step.is_decode:
            self._remember_queries(q, step)
            if step.ends_prompt:
                self._compress(past + step.counts)
        return out

    def _in_slots(self, step: Step, past: Tensor) -> Step:
        """The step as the stores see it: slots instead of positions."""
        if self.held is None:
            return step
        same = step.all_real and bool((past == past[0]).all())
        return dataclasses.replace(step, past=past, uniform_past=int(past[0]) if same else None)

    def _remember_queries(self, q: Tensor, step: Step) -> None:
        """Keep the last ``window`` queries of the prompt, right-aligned per row."""
        if self.observed is None:
            nothing = q.new_zeros(q.shape[0], q.shape[1], self.window, q.shape[3])
            self.observed = nothing, torch.zeros_like(step.counts)
        queries, counts = self.observed
        index = step.counts[:, None] + torch.arange(self.window, device=q.device)
        index = index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        queries = torch.cat((queries, q), dim=2).gather(2, index)
        self.observed = queries, (counts + step.counts).clamp(max=self.window)

    def _compress(self, lengths: Tensor) -> None:
        assert self.observed is not None
        (queries, counts), self.observed = self.observed, None
        if int(lengths.max()) <= self.budget:
            return
        held = torch.where(counts > 0, lengths.clamp(max=self.budget), lengths)  # no new token: leave the row
        width = int(held.max())
        stores = self.lead_keys, self.all_values
        kept = [store.data.new_zeros(*store.data.shape[:2], width, store.data.shape[3]) for store in stores]
        for row, (length, real) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            keys, values = (store.data[row, :, :length] for store in stores)
            if real == 0:
                for target, source in zip(kept, (keys, values), strict=True):
                    target[row, :, :length] = source
                continue
            index = self._select(queries[row, :, self.window - real :], keys)
            index = index[:, :, None].expand(-1, -1, keys.shape[2])
            for target, source in zip(kept, (keys, values), strict=True):
                target[row, :, : index.shape[1]] = source.gather(1, index)
        self.lead_keys, self.all_values, self.held = TokenStore(), TokenStore(), held
        self.lead_keys.data, self.all_values.data = kept

    def _select(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Kept positions ``[H, min(n, budget)]`` in order, from ``[Hq, <= window, d]`` queries and ``[H, n, d]`` keys."""
        heads, n, _ = keys.shape
        everything = torch.arange(n, device=keys.device).expand(heads, -1)
        if n <= self.budget:
            return everything
        scores = snapkv_scores(queries, keys, self.scale)[:, : n - self.window]
        scores = self.pool(scores, self.kernel, stride=1, padding=self.kernel // 2)
        order = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.budget - self.window]
        return torch.cat((order.sort(-1).values, everything[:, n - self.window :]), dim=-1)


def snapkv_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention that the last ``w`` queries ``[Hq, w, d]`` pay to ``[H, n, d]`` keys: ``[H, n]``, summed over queries and
    averaged over the query heads of a group."""
    heads, n, _ = keys.shape
    window = queries.shape[1]
    compute = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.unflatten(0, (heads, -1)) * scale
    logits = (grouped.flatten(1, 2) @ keys.transpose(1, 2)).to(compute).unflatten(1, (-1, window))
    position = torch.arange(n - window, n, device=keys.device)
    future = torch.arange(n, device=keys.device) > position[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(-1).sum(2).mean(1)


def _build(config: PodConfig, budget: int, window: int, kernel: int, pool: str) -> PodCache:
    if pool not in _POOLS:
        raise ValueError(f"snapkv: pool = {pool!r}; choose one of {', '.join(_POOLS)}")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"snapkv: kernel = {kernel} must be odd and positive")
    if window < 1 or budget <= window:
        raise ValueError(f"snapkv: budget = {budget} must exceed window = {window} >= 1: raise the budget")
    return PodCache(config, lambda c, i: SnapLayer(c, i, budget, window, kernel, pool), spec="snapkv")


METHOD = Method(
    name="snapkv",
    paper="SnapKV (Li et al., 2024)",
    frees="prompt tokens that the end of the prompt does not attend to; decoded tokens stay",
    build=_build,
    parameters={
        "window": (32, "observation window at the end of the prompt, always kept (tokens)"),
        "kernel": (5, "width of the pooling over neighbouring tokens (tokens)"),
        "pool": ("avg", "avg or max"),
    },
    takes_budget=True,
)
