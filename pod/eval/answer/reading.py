"""Feed prompts through a cache: a text is read and compressed, and the question is read after that.

This is how caches are used in practice, where nobody knows the question beforehand.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pod.eval.answer import gates
from pod.eval.answer.answer_cache import key_of


class Asked(Protocol):
    """A prompt as token ids. The last ``num_asked`` of them are the question.

    If it is 0, there is no separate question: the whole prompt is compressed at once.
    """

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_asked(self) -> int: ...


def tokens_from(encode: Callable[[str], Sequence[int]], text: str, start: int) -> int:
    """Number of a text's tokens from the character ``start`` on, a token across ``start`` included.

    It is 0 when ``start`` is not inside the text.
    """
    return max(1, len(encode(text)) - len(encode(text[:start]))) if 0 < start < len(text) else 0


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """`input_ids` and `attention_mask` [B, longest] with the padding on the left."""
    longest = max(len(row) for row in rows)
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def branch(cache: Any) -> Any:
    """A copy of a cache. Its tensors are copied; the model's configuration is shared."""
    return copy.deepcopy(cache, {id(cache.config): cache.config})


class Seen(NamedTuple):
    """What a cache has seen, and what the next token is predicted from: `last` or `hidden`.

    Attributes:
        mask: [B, n], the attention mask of what the cache has seen.
        last: [B, 1], the last tokens, if they were held out; they must be fed next. Else None.
        hidden: [B, 1, D], the last hidden states, if no token was held out. Else None.
    """

    mask: Tensor
    last: Tensor | None
    hidden: Tensor | None

    def after(self, tokens: Tensor) -> "Seen":
        """The `Seen` after `tokens` [B, m], of which the cache was fed all but the last. That is held out."""
        fed = tokens.shape[1]
        if self.last is None:
            fed -= 1
        mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), fed)], 1)
        return Seen(mask, last=tokens[:, -1:], hidden=None)


@torch.no_grad()
def read(
    model: Any,
    cache: Any,
    rows: Sequence[Sequence[int]],
    pad: int = 0,
    *,
    hold_out: bool,
    prompt_columns: int | None = None,
) -> Seen:
    """Feed each row to a new cache as one prompt (token ids, left padding). The cache compresses them.

    Args:
        hold_out: do not feed the last token of each row. It is fed later, to the compressed cache.
        prompt_columns: number of tokens of the whole prompts, if the rows are only their beginnings.
    """
    assert not hold_out or all(len(row) > 1 for row in rows), "one token alone cannot be held out"
    device = next(model.parameters()).device
    ids, mask = left_padded([row[:-1] if hold_out else row for row in rows], pad, device)
    cache.begin_prompt(prompt_columns or ids.shape[1])
    out = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    if hold_out:
        seen = Seen(mask, torch.tensor([list(row[-1:]) for row in rows], device=device), None)
    else:
        seen = Seen(mask, None, out.last_hidden_state[:, -1:].to(device))
    judge_ahead(model, cache, mask, hidden=seen.hidden, last=seen.last)
    return seen


@torch.no_grad()
def judge_ahead(
    model: Any, cache: Any, mask: Tensor | None, hidden: Tensor | None = None, last: Tensor | None = None
) -> None:
    """Let a method that judges by the first generated token do so before anything is scored or asked.

    SimLayerKV is such a method. A copy of the cache generates the token, and the cache takes over what the
    copy decided. Nothing happens for other methods.

    Args:
        mask: [B, n] of what the cache has seen; None where no row is padded.
        hidden: [B, 1, D], from which the model would generate.
        last: [B, 1] instead of `hidden`: the prompt's last token, which is not fed yet.
    """
    waiting = _waiting(cache)
    if not waiting:
        return
    probe = branch(cache)
    copies = _waiting(probe)

    def feed(token: Tensor) -> Tensor:
        nonlocal mask
        mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        out = model.model(input_ids=token, attention_mask=mask, past_key_values=probe, use_cache=True)
        return out.last_hidden_state[:, -1:]

    if hidden is None:
        assert last is not None, "the prompt's end, or its last token"
        for layer in copies:
            layer.judges_next = False  # the prompt's last token is not the first generated one
        hidden = feed(last)
        for layer in copies:
            layer.judges_next = True
    feed(model.lm_head(hidden[:, -1]).argmax(-1, keepdim=True))
    for layer, copied in zip(waiting, copies, strict=True):
        layer.adopt(copied)


def _waiting(cache: Any) -> list[Any]:
    """Layers that wait for a first generated token."""
    layers = (layer for group in getattr(cache, "groups", ()) for layer in group.layers)
    return [layer for layer in layers if getattr(layer, "judges_next", False)]


def decided(cache: Any, new: Tensor | None = None, pad: int = 0) -> list[dict[str, Any]]:
    """What a method decided for each row: `decisions`, by name a number per layer (None: not decided).

    SimLayerKV gives lazy (0 or 1) and mass, D2O variance and tokens, PoD with a tau what `gates.skipped`
    counts. The mapping of a row is empty for a method that decides nothing.

    Args:
        new: the rows' answers [B, m] that were generated last.
        pad: the id that fills an answer that ended before others; these tokens are not counted.
    """
    ends = cache.lengths if new is None else cache.lengths - (new == pad).long().cummax(dim=1).values.sum(1)
    found: list[dict[str, Any]] = [{} for _ in ends]
    parts = [(group.rows, group.layers) for group in getattr(cache, "groups", ())]
    for rows, layers in parts or [(range(len(ends)), cache.layers)]:
        asked = [layer for layer in layers if hasattr(layer, "decisions")]
        for place, row in enumerate(rows):
            said = [layer.decisions(place) for layer in asked]
            by_name = {name: [one[name] for one in said] for name in (said[0] if said else ())}
            by_name = by_name or gates.skipped(layers, place, int(ends[row]))
            found[row] = {"decisions": by_name} if by_name else {}
    return found


def held(cache: Any) -> list[dict[str, int]]:
    """What a cache holds for each row: `bytes` and `held_tokens`.

    Rows that share tensors hold as much as the longest of them: `held_tokens` is what that one has seen.
    """
    lengths = cache.lengths.tolist()
    shared = [group.rows for group in getattr(cache, "groups", ())] or [range(len(lengths))]
    tokens = {row: max(lengths[other] for other in rows) for rows in shared for row in rows}
    return [{"bytes": size, "held_tokens": tokens[row]} for row, size in enumerate(cache.nbytes_by_row())]


def in_parts(prompts: Sequence[Asked]) -> tuple[list[tuple[int, ...]] | None, list[tuple[int, ...]]]:
    """The texts and the questions of prompts, as token ids.

    If any prompt has no question of its own, the texts are None and whole prompts stand for the questions.
    """
    if not all(prompt.num_asked for prompt in prompts):
        return None, [prompt.token_ids for prompt in prompts]
    pairs = [(p.token_ids[: -p.num_asked], p.token_ids[-p.num_asked :]) for p in prompts]
    return [before for before, _ in pairs], [question for _, question in pairs]


def key_of_prompt(prompt: Asked, new_tokens: int, cache_budget: int | str | None) -> str:
    """The key, in an answer cache, of a prompt that `generate` answers greedily.

    Args:
        cache_budget: the budget of its cache (`MethodRunner.cache_budget`).
    """
    return key_of("greedy", prompt.token_ids, prompt.num_asked, new_tokens, cache_budget)
