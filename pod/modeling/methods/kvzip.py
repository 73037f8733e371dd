"""KVzip (Kim et al., 2025): when a prompt ends, the model is asked to repeat it; tokens that it reads stay.

After the prompt, the model reads the text once more, ``chunk_size`` tokens at a time: a request
(``repeat_ids``), then the chunk. From the second chunk on, the request names the last 8 tokens of the chunk
before. The tokens that are read once more see all tokens held, and are not stored themselves.

The score of a pair (key and value) is the largest weight that any token read once more gives it, in any query
head of its group. The weights are a softmax over three sets of tokens: the chunk in the cache, the first
``num_sink_tokens`` tokens, and the tokens read once more up to the query. This is as in the authors' code,
where the first tokens are the system prompt (in kvpress: 4 tokens). The best ``budget · layers · heads``
pairs of all layers and KV heads together stay. The first tokens of every head are always among them.

The first prompt that ends with more than ``budget`` tokens held is compressed in this way, together with all
tokens before it. Later tokens, such as questions and answers, all stay.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pod.kernels.statistics import attention_rows
from pod.modeling.methods.adakv import AdaLayer
from pod.modeling.methods.base import Builder, Request
from pod.modeling.methods.ranking import LastQueries, best_slots
from pod.modeling.model.attend import Tokens, attend, take_heads
from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.rows import GroupedCache
from pod.modeling.model.step import Step
from pod.tokenizer import load_tokenizer


class KVzipLayer(AdaLayer):
    """A layer for a single row, in which every head is a head group of its own, as with Ada-KV.

    Attributes:
        is_compressed: whether a text was compressed.
        waits: whether the text must be read once more before it is compressed. Passes then only collect
            scores.
        heard: scores ``[H, c]`` of each chunk of the text that was read once more so far.
    """

    @staticmethod
    def ranks(config: PodConfig, layer_idx: int, request: Request) -> LastQueries:
        """A ranking that observes nothing, as the scores do not come from the prompt's own queries."""
        request.below_budget("num_sink_tokens")
        return LastQueries(0)

    def clear(self) -> None:
        super().clear()
        self.waits = self.is_compressed = False
        self.heard: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if not self.waits:
            return super().attend(q, k, v, step)
        q, k = step.ropes[self.layer_idx].pair(q, k)
        pairs = [(group.keys.read(group.held), group.values.read(group.held)) for group in self.head_groups]
        held = [torch.cat(tensors, dim=1) for tensors in zip(*pairs, strict=True)]
        size = self.params["chunk_size"]
        start = len(self.heard) * size
        first = min(start, self.params["num_sink_tokens"])
        chunk = held[0][:, :, start : start + size]
        keys = torch.cat((held[0][:, :, :first], chunk, k), dim=2)
        parts = ((take_heads(q, [i], self.groups), take_heads(keys, [i])) for i in range(keys.shape[1]))
        largest = torch.stack([attention_rows(*part, self.scale).amax((0, 1, 2)) for part in parts])
        self.heard.append(largest[:, first : first + chunk.shape[2]])
        tokens = Tokens(*(torch.cat(pair, dim=2) for pair in zip(held, (k, v), strict=True)))
        return attend(q, tokens, scale=self.scale, backend=step.chunk_backend)[0]

    def flush(self, step: Step) -> None:
        if step.ends_prompt and not self.is_compressed and self.head_groups[0].held > self.budget:
            self.waits = True
        elif not self.waits:
            super().flush(step)

    def choose(self, step: Step) -> list[Tensor | None]:
        return [None] * len(self.head_groups)


def compress(layers: list[KVzipLayer]) -> None:
    """Keep the pairs with the best scores of all layers together, for a row whose text was read once more."""
    device = layers[0].heard[0].device  # layers may lie on several devices
    heads = torch.cat([torch.cat(layer.heard, dim=1).to(device) for layer in layers])
    heads[:, : layers[0].params["num_sink_tokens"]] = torch.inf
    best = best_slots(heads.flatten(), layers[0].budget * len(heads)) // heads.shape[1]
    sizes = best.bincount(minlength=len(heads)).tolist()
    head_groups = [group for layer in layers for group in layer.head_groups]
    devices = [layer.device for layer in layers for _ in layer.head_groups]
    for group, head, size, own in zip(head_groups, heads, sizes, devices, strict=True):
        slots = best_slots(head, size)[None, None].to(own)
        for buffer in (group.keys, group.values):
            buffer.keep(slots, group.held)
            buffer.flush(size)
        group.held = size
    for layer in layers:
        layer.waits, layer.is_compressed, layer.heard = False, True, []


class RepeatingCache(GroupedCache):
    """A cache that has the model read the text once more, for each row whose layers wait for it."""

    def rereadings(self) -> Iterator[tuple[Tensor, Tensor, PodCache]]:
        """See ``PodCache.rereadings``. The caches that it yields share this cache's layers, which wait."""
        layers: dict[int, list] = {group.rows[0]: group.layers for group in self.groups}
        waiting = {row: own for row, own in layers.items() if own[0].waits and not own[0].heard}
        left = {row: self._requests(row, own[0]) for row, own in waiting.items()}
        while any(left.values()):
            chunks = [left[row].pop(0) if left.get(row) else [] for row in sorted(layers)]
            rows = [torch.tensor(ids, dtype=torch.long, device=self.lengths.device) for ids in chunks]
            ids = pad_sequence(rows, batch_first=True)
            new = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            seen = new.new_ones(len(new), self._columns) if self._seen_mask is None else self._seen_mask
            view = copy.deepcopy(self, {id(x): x for x in (self.config, *layers.values())})
            view._pending = None
            self._pending = ()  # failing half-way leaves the cache unusable
            yield ids, torch.cat((seen.long(), new), dim=1), view
        for own in waiting.values():
            compress(own)
            self._pending = None

    def _requests(self, row: int, layer: KVzipLayer) -> list[list[int]]:
        """The token ids to read for each chunk of a row's text: a request, then the chunk once more."""
        if self._seen_ids is None:
            raise ValueError(f"{self.spec} repeats a text: feed its input_ids, not inputs_embeds")
        seen = torch.cat([ids[row] for ids in self._seen_ids])
        text = (seen if self._seen_mask is None else seen[self._seen_mask[row]]).tolist()
        first, later, end = layer.params["repeat_ids"]
        size = layer.params["chunk_size"]
        starts = range(0, len(text), size)
        asked = [[*later, *text[max(0, at - 8) : at]] if at else first for at in starts]
        return [[*ids, *end, *text[at : at + size]] for ids, at in zip(asked, starts, strict=True)]


_REPEAT = "\n\nRepeat the previous context exactly."
_REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
"""The requests: ``_REPEAT`` for the first chunk of a text, ``_REPEAT_FROM`` for a later one."""


def repeat_ids(tokenizer: Any) -> list[list[int]]:
    """The requests in a tokenizer's ids, in the words of KVzip's authors.

    Returns:
        Three lists of ids:

        * the request to repeat a text's first chunk;
        * the request to repeat a later chunk, up to the tokens that it names;
        * the end of a request: the end of a question in the chat template, or a line break if there is none.
    """
    end = "\n"
    if getattr(tokenizer, "chat_template", None):
        asked = [{"role": "user", "content": _REPEAT.strip()}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        end = text.rpartition(_REPEAT.strip())[2]
    return [list(tokenizer.encode(x, add_special_tokens=False)) for x in (_REPEAT, _REPEAT_FROM, end)]


def with_requests(model: Any, names: Sequence[str], params: dict[str, Any]) -> dict[str, Any]:
    """Add ``repeat_ids`` to the parameters of the methods ``names``, if KVzip is one and they are missing.

    They come from the tokenizer in the model's own folder. ``ValueError`` when it cannot be loaded.
    """
    if "kvzip" not in names or params.get("repeat_ids") is not None:
        return params
    place = getattr(model.config, "name_or_path", "")
    if not place:
        # a model made in memory: building the cache refuses it, if nothing else is wrong
        return params
    try:
        tokenizer = load_tokenizer(place)
    except ValueError as error:
        raise ValueError(
            f"kvzip has the model repeat what it reads and needs the tokenizer's ids for that ({error}): "
            "give repeat_ids=repeat_ids(tokenizer), from pod.modeling.methods.kvzip import repeat_ids"
        ) from None
    return params | {"repeat_ids": repeat_ids(tokenizer)}


def _build(config: PodConfig, request: Request) -> PodCache:
    ids, size = request.params["repeat_ids"], config.vocab_size
    is_three = isinstance(ids, Sequence) and len(ids) == 3 and all(isinstance(x, Sequence) for x in ids)
    if not is_three or not all(type(i) is int and 0 <= i < size for x in ids for i in x):
        raise ValueError(
            f"{request.spec} has the model repeat what it reads: give repeat_ids=repeat_ids(tokenizer), "
            "from pod.modeling.methods.kvzip import repeat_ids: "
            f"three lists of token ids from 0 to {size - 1}; got {ids!r}"
        )
    KVzipLayer(config, 0, request)  # made only because this checks the request
    return RepeatingCache(config, partial(KVzipLayer, request=request), request.spec, rowwise=True)


BUILDERS = {"kvzip": Builder(build=_build)}
