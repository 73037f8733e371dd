"""Equal bytes: what PoD really holds at a length, and the token budget that gives a token-dropping method as much."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pod
from pod.eval.answer.methods import Method

if TYPE_CHECKING:
    import torch

LENGTH_CLASS = 64  # tokens


def length_class(length: int) -> int:
    """A sample's length rounded up to a multiple of 64 tokens, the length that its budget is taken at.

    So samples of one class get one budget and may share a batch, and few cache sizes exist, however ragged the lengths are.
    """
    return -(-length // LENGTH_CLASS) * LENGTH_CLASS


_NO_LIMIT = (
    1 << 20
)  # tokens; a budget under which nothing is dropped, also by methods that give some layers less than others


def without_limit(budget: int | None, length: int) -> int | None:
    """The budget to make a cache with when it fills PoD's bytes at `length` tokens: no limit where PoD has dropped nothing yet."""
    return _NO_LIMIT if budget is not None and budget >= length else budget


class ByteBudgets:
    """Bytes that the PoD cache holds at each length, and the budgets that follow from them.

    bytes_by_part: by length (tokens), of one sequence (`measure_bytes`); bytes_per_token: of the dense model.
    """

    def __init__(self, bytes_by_part: dict[int, dict[str, int]], bytes_per_token: int):
        self.bytes_by_part, self.bytes_per_token = bytes_by_part, bytes_per_token

    @classmethod
    def of(cls, reference: Any, lengths: Iterable[int]) -> "ByteBudgets":
        """Measured on a model with the sharing plan, adapted or not: the bytes depend on plan, windows and dtype only."""
        return cls(measure_bytes(reference, "pod", lengths), native_bytes_per_token(reference))

    def pod_bytes(self, length: int) -> int:
        """Bytes that PoD holds for one sequence of `length` tokens."""
        return sum(self.bytes_by_part[length].values())

    def tokens(self, method: Method, length: int, fed: int) -> int | None:
        """Budget of a method (tokens per KV head and layer) that fills PoD's bytes when the sequence has reached `length`.

        fed: tokens fed after the prompt; a method that keeps every one of them gets so many slots less for its prompt, so
        that the *largest* number of bytes it ever holds is PoD's. `length` where PoD holds every key and value: nothing is
        dropped then. None for a method that takes no budget.
        """
        if not method.takes_budget:
            return None
        slots = self.pod_bytes(length) // self.bytes_per_token
        if slots >= length:
            return length  # PoD has dropped nothing yet, and neither need the others
        budget = slots - (fed if method.grows else 0)
        if budget < 1:
            raise ValueError(
                f"{method.name}: PoD's bytes at {length} tokens leave {budget} tokens for the prompt; score or generate fewer "
                f"tokens than {slots} after it"
            )
        return budget


def native_bytes_per_token(model: Any) -> int:
    """Bytes of one token's K and V over all layers and KV heads, in the model's dtype."""
    return bytes_per_token(model.config, next(model.parameters()).dtype)


def bytes_per_token(config: Any, dtype: "torch.dtype") -> int:
    """`native_bytes_per_token` of a model's configuration, before it is loaded."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize


def measure_bytes(
    model: Any, spec: str, lengths: Iterable[int], budget: int | None = None
) -> dict[int, dict[str, int]]:
    """Bytes by part that one sequence holds at each length, from a cache that is filled chunk by chunk.

    Returns: {length: {part: bytes}}. The tokens fed are arbitrary: bytes do not depend on them.
    """
    import torch  # which counting tokens needs not

    cache = pod.make_cache(model, spec, budget=budget)
    device = next(model.parameters()).device
    measured, seen = {}, 0
    for length in sorted(set(lengths)):
        chunk = torch.arange(seen, length, device=device)[None] % model.config.vocab_size
        with torch.no_grad():
            model.model(input_ids=chunk, past_key_values=cache, use_cache=True)
        measured[length], seen = dict(cache.nbytes_by_part()), length
    return measured


def stated(
    budgets: ByteBudgets | None, bytes_per_token: int, length: int, budget: int | None, held: Sequence[int]
) -> dict[str, Any]:
    """What a result says about its bytes per sequence of `length` tokens.

    budgets: PoD's bytes, None without a PoD model; bytes_per_token: of the dense model; budget: tokens that a token-dropping
    method got; held: bytes of the caches that were used (the largest counts), empty when none was.
    """
    own = max(held) if held else None
    reference = None if budgets is None else budgets.pod_bytes(length)
    return {
        "length": length,
        "budget_tokens": budget,
        "pod_bytes": reference,
        "dense_bytes": bytes_per_token * length,
        "bytes": own,
        "bytes_over_pod": own / reference if own and reference else None,
        "saving": 1 - own / (bytes_per_token * length) if own else None,
    }
