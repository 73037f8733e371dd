"""Prompts through a cache: a text is read and compressed, then asked about.

So it is in use, where nobody knows the question beforehand.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pod.eval.answer import gates
from pod.eval.answer.answer_cache import key_of
from pod.tokenizer import pad_id


class Asked(Protocol):
    """A prompt as token ids. The last ``num_asked`` of them are the question.

    0: the whole prompt is compressed at once.
    """

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_asked(self) -> int: ...


def tokens_from(encode: Callable[[str], Sequence[int]], text: str, start: int) -> int:
    """How many tokens of a text stand from the character ``start`` on. A token that spans it counts."""
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
    """A copy of a cache, with the same content.

    Tensors are copied; the model's configuration is shared.
    """
    return copy.deepcopy(cache, {id(cache.config): cache.config})


@torch.no_grad()
def read_prompts(model: Any, cache: Any, rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Feed prompts (token ids, left padding) as one prompt each, after which `cache` has compressed.

    Returns: their mask [B, n].
    """
    ids, mask = left_padded(rows, pad, next(model.parameters()).device)
    out = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    judge_ahead(model, cache, mask, hidden=out.last_hidden_state[:, -1:])
    return mask


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

    A method that says none gives nothing. SimLayerKV gives lazy (0 or 1) and mass, D2O variance and tokens,
    PoD with a tau what `gates.skipped` counts.

    Args:
        new: the rows' answers [B, m] that were generated last.
        pad: what stands behind an answer that ended before others; it counts for nothing.
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
    """What is held for each row: `bytes` and `held_tokens`.

    `held_tokens` counts what the longest of the rows that share its tensors has seen.
    """
    lengths = cache.lengths.tolist()
    shared = [group.rows for group in getattr(cache, "groups", ())] or [range(len(lengths))]
    tokens = {row: max(lengths[other] for other in rows) for rows in shared for row in rows}
    return [{"bytes": size, "held_tokens": tokens[row]} for row, size in enumerate(cache.nbytes_by_row())]


def behind(mask: Tensor | None, rows: Sequence[Sequence[int]], pad: int, device: Any) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` for `generate`: rows (left padding) behind what a cache has seen.

    Args:
        mask: [B, n] of what the cache has seen; None for a new one.
    """
    ids, new = left_padded(rows, pad, device)
    return {"input_ids": ids, "attention_mask": new if mask is None else torch.cat((mask, new), dim=1)}


@torch.no_grad()
def tokens_behind(
    model: Any, cache: Any, mask: Tensor | None, rows: Sequence[Sequence[int]], new_tokens: int, pad: int
) -> Tensor:
    """Greedy answers [B, m] to questions behind the prompts that `cache` holds. The cache is used up.

    The questions are one prompt more for the method, as in a conversation.

    Args:
        mask: [B, n] of what the cache has seen; None for a new one.
        rows: the questions (token ids, at least one each).
    """
    fed = behind(mask, rows, pad, next(model.parameters()).device)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": pad}
    return model.generate(**fed, past_key_values=cache, **options)[:, fed["input_ids"].shape[1] :]


def answer_behind(
    model: Any,
    tokenizer: Any,
    cache: Any,
    mask: Tensor | None,
    rows: Sequence[Sequence[int]],
    new_tokens: int,
) -> list[str]:
    """`tokens_behind` as texts."""
    return _texts(tokenizer, tokens_behind(model, cache, mask, rows, new_tokens, pad_id(tokenizer)))


def _texts(tokenizer: Any, new: Tensor) -> list[str]:
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


def in_parts(prompts: Sequence[Asked]) -> tuple[list[tuple[int, ...]] | None, list[tuple[int, ...]]]:
    """What is read first, and what is read then.

    The first is None when a prompt has no question of its own.
    """
    if not all(prompt.num_asked for prompt in prompts):
        return None, [prompt.token_ids for prompt in prompts]
    pairs = [(p.token_ids[: -p.num_asked], p.token_ids[-p.num_asked :]) for p in prompts]
    return [before for before, _ in pairs], [question for _, question in pairs]


def answers(
    model: Any, tokenizer: Any, cache: Any, prompts: Sequence[Asked], new_tokens: int
) -> list[dict[str, Any]]:
    """Greedy answers to a batch of prompts through `cache`, a new one, as records for a answer_cache.

    A record says what was said, the bytes held for it at the end, and what was `decided`.
    """
    gates.watch(cache)
    pad, (before, rows) = pad_id(tokenizer), in_parts(prompts)
    mask = None if before is None else read_prompts(model, cache, before, pad)
    new = tokens_behind(model, cache, mask, rows, new_tokens, pad)
    said = zip(_texts(tokenizer, new), cache.nbytes_by_row(), decided(cache, new, pad), strict=True)
    return [{"answer": text, "bytes": size, **one} for text, size, one in said]


def key_of_prompt(prompt: Asked, new_tokens: int, room: int | str | None) -> str:
    """The key of what `answers` is asked.

    Args:
        room: the budget of its cache.
    """
    return key_of("greedy", prompt.token_ids, prompt.num_asked, new_tokens, room)
