"""Token budgets at which methods hold as many bytes as PoD, and caches made with them.

The bytes that PoD's cache really holds at a length are measured. They give the token budget with which a
token-dropping method holds as many bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pod
from pod.eval.answer.answer_cache import AnswerCache, key_of
from pod.eval.answer.methods import EvaluatedMethod
from pod.models import head_dim_of
from pod.notation import NO_LIMIT

if TYPE_CHECKING:
    import torch

LENGTH_CLASS = 64  # tokens


def length_class(length: int) -> int:
    """A sample's length rounded up to a multiple of 64 tokens. Its budget is taken at this length.

    So there are few budgets and cache sizes, however ragged the lengths of samples are.
    """
    return -(-length // LENGTH_CLASS) * LENGTH_CLASS


@dataclass(frozen=True, order=True)
class CacheSpan:
    """The size of a cache that will be used.

    Attributes:
        length: tokens that the cache has seen at the end.
        fed: how many of them are fed after the prompt.
    """

    length: int
    fed: int


class ByteBudgets:
    """Bytes that the PoD cache holds at each length, and the budgets that follow from them.

    Args:
        bytes_per_token: of the dense model.
        measure: from lengths to the bytes that one sequence holds at each, by part of the cache (as
            `measure_bytes` gives them). It is called when they are needed. None without a PoD model.
    """

    def __init__(
        self,
        bytes_per_token: int,
        measure: Callable[[list[int]], dict[int, dict[str, int]]] | None = None,
    ):
        self.bytes_per_token, self._measure = bytes_per_token, measure
        self._known: dict[int, dict[str, int]] = {}

    def prepare(self, lengths: Iterable[int]) -> None:
        """Measure the lengths that are not known yet, in one pass over the longest."""
        new = sorted(set(lengths) - self._known.keys())
        if new and self._measure is not None:
            self._known |= self._measure(new)

    def pod_bytes(self, length: int) -> int | None:
        """Bytes that PoD holds for one sequence of `length` tokens; None without a PoD model."""
        self.prepare([length])
        return None if self._measure is None else sum(self._known[length].values())

    def tokens(self, method: EvaluatedMethod, span: CacheSpan) -> int:
        """Budget of a method (tokens per KV head and layer) that fills PoD's bytes.

        The bytes are compared when the sequence has reached the span's length. A method that keeps every
        token fed after the prompt gets as many fewer slots for its prompt, so that the *largest* number of
        bytes it ever holds is PoD's.

        Returns: the length itself where PoD holds every key and value: nothing is dropped then.
        Raises:
            ValueError: when PoD's bytes leave no token for the prompt.
        """
        held = self.pod_bytes(span.length)
        assert held is not None, "methods that follow PoD's bytes are refused where there is no PoD model"
        slots = held // self.bytes_per_token
        if slots >= span.length:
            return span.length  # PoD has dropped nothing yet, and neither need the others
        budget = slots - (span.fed if method.grows else 0)
        if budget < 1:
            raise ValueError(
                f"{method.name}: PoD's bytes at {span.length} tokens leave {budget} tokens for the prompt; "
                f"score or generate fewer tokens than {slots} after it"
            )
        return budget

    def stated(self, length: int, budget: int | None, held: Sequence[int]) -> dict[str, Any]:
        """What a result says about its bytes per sequence of `length` tokens.

        Args:
            budget: tokens that a token-dropping method got.
            held: bytes of the caches that were used (the largest counts); empty when none was used.
        Returns: `bytes` held, `pod_bytes` and `dense_bytes` at this length, the ratio `bytes_over_pod`, and
            the `saving` as a share of the dense bytes. None for what is not known.
        """
        own = max(held, default=0)
        dense = self.bytes_per_token * length
        reference = self.pod_bytes(length)
        return {
            "length": length,
            "budget_tokens": budget,
            "pod_bytes": reference,
            "dense_bytes": dense,
            "bytes": own or None,
            "bytes_over_pod": own / reference if own and reference else None,
            "saving": 1 - own / dense if own else None,
        }


class MethodRunner:
    """A method under test: its model, and its caches of every size.

    Args:
        load: returns the model.
        options: parameters of its caches.
        budgets: the budgets that follow PoD's bytes, for a method without a budget of its own.
    """

    def __init__(
        self, method: EvaluatedMethod, load: Callable[[], Any], options: dict[str, Any], budgets: ByteBudgets
    ):
        self.method, self.options, self.budgets, self._load = method, options, budgets, load

    @property
    def model(self) -> Any:
        """Its model, loaded when first needed."""
        return self._load()

    def budget(self, span: CacheSpan) -> int | None:
        """Tokens per KV head and layer; None for a method that takes no budget."""
        if self.method.fills_pod_bytes:
            return self.budgets.tokens(self.method, span)
        budget = self.method.budget
        return None if budget is None else budget.of_prompt(span.length - span.fed)

    def cache_budget(self, span: CacheSpan) -> int | str | None:
        """The argument `budget` of `pod.make_cache` for a cache of this size.

        Returns: a number of tokens; or a share as the recipe writes it (`25%`), which each row takes of its
            own prompt; or `NO_LIMIT` where the budget follows PoD's bytes and PoD has dropped nothing yet;
            or None for a method that takes no budget.
        """
        if self.method.budget is not None:
            return self.method.budget.tokens or str(self.method.budget)
        budget = self.budget(span)
        return NO_LIMIT if budget is not None and budget >= span.length else budget

    def cache(self, *spans: CacheSpan) -> Any:
        """A new cache. With several spans it is for a batch whose rows have these spans.

        Without a span the cache gets no budget.
        """
        if not spans:
            return self._new_cache(None)
        budgets = [self.cache_budget(span) for span in spans]
        if len(set(budgets)) == 1:  # also where no span has a budget
            return self._new_cache(budgets[0])
        return self._new_cache(budgets)

    def trial(self, span: CacheSpan) -> Any:
        """A cache to check a budget with, before any measuring. A share of the prompt is turned into tokens.

        Raises:
            ValueError: for a budget below the method's minimum, even if it is written as a share.
        """
        budget = self.cache_budget(span)
        if isinstance(budget, str):
            budget = self.budget(span)
        return self._new_cache(budget)

    def _new_cache(self, budget: Any) -> Any:
        return pod.make_cache(self.model, self.method.spec, budget=budget, **self.options)

    def stated(self, span: CacheSpan, held: Sequence[int]) -> dict[str, Any]:
        """What a result says about the bytes per sequence of caches that were used."""
        return self.budgets.stated(span.length, self.budget(span), held)


def measure_once(
    answer_cache: AnswerCache, layout: Any, load: Callable[[], Any], lengths: Iterable[int]
) -> Callable[[list[int]], dict[int, dict[str, int]]]:
    """A function that gives PoD's bytes at some lengths, as `measure_bytes` does.

    It keeps them in an answer cache, and measures only the lengths that are not there.

    Args:
        layout: JSON that changes with whatever changes the bytes.
        load: returns the PoD model.
        lengths: all lengths that will be asked for. The missing ones are measured together, in one pass.
    """
    every = set(lengths)

    def measure(asked: list[int]) -> dict[int, dict[str, int]]:
        wanted = sorted(every.union(asked))
        with answer_cache.asked_by("bytes of PoD"):
            found = answer_cache.answers(
                wanted,
                key=lambda length: key_of("bytes", layout, length),
                batches=lambda left: [left],
                compute=lambda left: list(measure_bytes(load(), "pod", left).values()),
            )
        return dict(zip(wanted, found, strict=True))

    return measure


def native_bytes_per_token(model: Any) -> int:
    """Bytes of one token's K and V over all layers and KV heads, in the model's dtype."""
    return bytes_per_token(model.config, next(model.parameters()).dtype)


def bytes_per_token(config: Any, dtype: "torch.dtype") -> int:
    """`native_bytes_per_token` of a model's configuration, before it is loaded."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim_of(config) * dtype.itemsize


def measure_bytes(
    model: Any, spec: str, lengths: Iterable[int], budget: int | None = None
) -> dict[int, dict[str, int]]:
    """Bytes by part that one sequence holds at each length, from a cache that is filled chunk by chunk.

    Returns: {length: {part: bytes}}. The tokens fed are arbitrary: bytes do not depend on them.
    """
    import torch  # counting tokens does not need it

    cache = pod.make_cache(model, spec, budget=budget)
    device = next(model.parameters()).device
    measured, seen = {}, 0
    for length in sorted(set(lengths)):
        chunk = torch.arange(seen, length, device=device)[None] % model.config.vocab_size
        with torch.no_grad():
            model.model(input_ids=chunk, past_key_values=cache, use_cache=True)
        measured[length], seen = dict(cache.nbytes_by_part()), length
    return measured
