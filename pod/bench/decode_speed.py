"""Decode speed of cache methods beside the dense cache: both in one process, in turns, by the decode engine.

Dense and PoD run the same program: preallocated buffers and one static step from embedding to argmax,
recorded as a graph on CUDA. Every method races the dense cache. In each round of a race both decode
``steps`` tokens per row at the same length, in alternating order. The ratio is taken round by round. It is
compared with the byte ceiling of ``pod.bench.decode_bytes``.

CUDA graphs and fused kernels save the time of kernel launches, whatever the cache. Every row of the result
says whether it had them. Methods that the engine does not serve decode through the ordinary cache, which
waits for the host. Stock transformers copies its cache to append to it. Neither can be recorded as a graph.
Wherever the dense cache had graphs or fused kernels, each method races it once more, and both do without
them: this gives the ratio ``like_for_like``.

Caches are filled without reading a prompt: random keys and values are written into the buffers. Decoding
takes the same time as after a real prompt. Caches that compress a prompt by its content read a random prompt,
with an attention that returns zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

import pod
from pod.bench.args import FULL, STOCK, BenchArgs
from pod.bench.decode_bytes import Sizes, budget_at, is_modelled, read_per_step, uses_plan
from pod.bench.dense_decode import candidates
from pod.errors import one_line
from pod.eval.answer.methods import EvaluatedMethod
from pod.measure.random_cache import fill_with_random_tokens
from pod.measure.speed_comparison import RaceEntry, race, spread
from pod.modeling.placement import free_unused, is_spread, places_of
from pod.notation import parse
from pod.registry.combine import has_decode_engine

_WARM_UP = 2  # tokens; during the first one, the engine compiles and captures
_TRIAL_STEPS = 8  # tokens by which backends for the dense cache are compared
_NO_ENGINE = "it has no decode engine, and its passes wait for the host"
_STOCK_GROWS = "transformers' cache is copied to append a token"


@dataclass(kw_only=True)
class Bench:
    """Models that share one set of weights, and how they are measured.

    Attributes:
        args: section `bench` of the recipe.
        sizes: the sizes of the models.
        dense: the model without a sharing plan.
        planned: the model with a sharing plan.
        stock: the transformers model with these weights; None when there is none.
    """

    args: BenchArgs
    sizes: Sizes
    dense: Any
    planned: Any
    stock: Any = None

    @property
    def device(self) -> torch.device:
        return self.dense.lm_head.weight.device

    def model_of(self, method: EvaluatedMethod) -> Any:
        """The model that a method's cache belongs to."""
        return self.planned if uses_plan(method) else self.dense


# -- caches --------------------------------------------------------------------------------------------------


def make_cache(
    bench: Bench, method: EvaluatedMethod, length: int, capacity: int, backend: str = "auto"
) -> tuple[Any, str | None]:
    """An empty cache with the decode engine, and None; or an ordinary cache, and why the engine refuses it.

    Args:
        length: tokens with which the cache will be filled; budgets that are shares are taken of it.
        capacity: tokens for which the engine reserves space.
        backend: of the engine's attention.

    Raises:
        ValueError: ``pod.make_cache`` refuses the method without an engine too.
    """
    model = bench.model_of(method)
    spec = str(method.spec)
    options = {name: value for name, value in method.options.items() if name != "skip_share"}
    options |= {"budget": budget_at(bench.sizes, method, length)} if method.takes_budget else {}
    named = {"full", "pod"} & set(spec.split("+"))
    without = "without the decode engine"
    if not has_decode_engine(parse(spec)):
        return pod.make_cache(model, spec, **options), f"{without}: it does not support this method"
    try:
        cache = pod.make_cache(model, spec if named else f"full+{spec}", capacity=capacity, **options)
    except ValueError as error:
        return pod.make_cache(model, spec, **options), f"{without}: {one_line(error, with_class=True)}"
    engine: Any = cache.engine
    engine.backend = backend
    return cache, None


# -- entries -------------------------------------------------------------------------------------------------


@torch.no_grad()
def make_entry(
    bench: Bench, method: EvaluatedMethod, batch: int, length: int, capacity: int, backend: str = "auto"
) -> tuple[RaceEntry, str | None]:
    """An entry whose cache holds ``length`` tokens, and a note for the report (None = nothing to say).

    It is warmed up: kernels are compiled and graphs are captured. Arguments and errors are those of
    `make_cache`, with ``batch`` rows.
    """
    if method is STOCK:
        model, sizes = bench.stock, bench.sizes
        cache: Any = DynamicCache(config=model.config)
        shape = batch, sizes.plan.num_key_value_heads, length - _WARM_UP, sizes.head_dim
        devices = places_of(model) if is_spread(model) else [model.device] * sizes.plan.num_layers
        for layer, device in enumerate(devices):
            keys = torch.randn(shape, dtype=model.dtype, device=device)
            values = torch.randn(shape, dtype=model.dtype, device=device)
            cache.update(keys, values, layer)
        note = f"transformers' DynamicCache, {model.config._attn_implementation}"
    else:
        model = bench.model_of(method)
        cache, note = make_cache(bench, method, length, capacity, backend)
        fill_with_random_tokens(model, cache, batch, length - _WARM_UP, method.options.get("skip_share", 0.0))
    one = RaceEntry(method.name, model, cache, torch.zeros(batch, 1, dtype=torch.long, device=model.device))
    one.decode(_WARM_UP)
    return one, note


def fastest_backend(bench: Bench, batch: int, length: int) -> tuple[str, dict[str, Any]]:
    """The decode backend with which the dense cache is fastest, and what was tried.

    For each backend that was tried, the second result has the seconds per step, or the error.

    Raises:
        ValueError: no backend runs the dense cache.
    """
    if is_spread(bench.dense):  # the engine, whose backends these are, steps aside
        return "auto", {}
    tried: dict[str, Any] = {}
    for name in candidates(bench.device):
        try:
            one, _ = make_entry(bench, FULL, batch, length, length + 2 * _TRIAL_STEPS, name)
            tried[name] = min(one.decode(_TRIAL_STEPS) for _ in range(2)) / _TRIAL_STEPS
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; the others go on
            tried[name] = one_line(error, with_class=True, limit=400)
        one = None
        free_unused(bench.device)
    found = {name: seconds for name, seconds in tried.items() if isinstance(seconds, float)}
    if not found:
        raise ValueError(f"no decode backend runs the dense cache here: {tried}")
    return min(found, key=lambda name: found[name]), tried


# -- one setting ---------------------------------------------------------------------------------------------


def compare(
    bench: Bench, methods: list[EvaluatedMethod], batch: int, length: int, backend: str | None = None
) -> dict[str, Any]:
    """Let methods race the dense cache at one batch size and length.

    Args:
        length: tokens in the dense cache before the first race.
        backend: decode backend of the dense cache; None = the fastest that runs.

    Returns:
        A dictionary for JSON:

        - ``batch`` and ``length``;
        - ``full``: the dense cache's backend, what was tried, why it has no graph or no fused kernels
          (`why_slower_path`), and its bytes by part;
        - ``methods``: by name, the figures of `compare_speed` or an ``error``.

    Raises:
        ValueError: no backend runs the dense cache.
        Exception: the dense cache fails in a race.
    """
    capacity = bench.args.capacity_for(length, races_on(bench.device))
    tried: dict[str, Any] = {}
    if backend is None:
        backend, tried = fastest_backend(bench, batch, length)
    full, _ = make_entry(bench, FULL, batch, length, capacity, backend)
    about: dict[str, Any] = {"backend": backend, "tried": tried, **why_slower_path(full)}
    held = full.cache.nbytes_by_part()
    found = {}
    for method in methods:
        try:
            found[method.name] = compare_speed(bench, full, method, batch, capacity)
        except Exception as error:  # noqa: BLE001 - as above
            found[method.name] = {"error": one_line(error, with_class=True, limit=400)}
        free_unused(bench.device)
        if full.failed is not None:
            raise full.failed
    about["bytes_by_part"] = held
    return {"batch": batch, "length": length, "full": about, "methods": found}


def races_on(device: torch.device) -> int:
    """How often a method races the dense cache at most.

    Where there can be graphs or fused kernels, as on a GPU, there is a second race without them.
    """
    return 1 if device.type == "cpu" else 2


def why_slower_path(one: RaceEntry) -> dict[str, str | None]:
    """Why an entry has no CUDA graph (``no_graph``) and no fused kernels (``no_fused``).

    A reason is None where it has them.
    """
    engine = getattr(one.cache, "engine", None)
    if engine is not None:
        return {"no_graph": engine.without_graph(), "no_fused": engine.without_kernels()}
    reason = _STOCK_GROWS if one.name == STOCK.name else _NO_ENGINE
    return {"no_graph": reason, "no_fused": "its modules run one by one"}


@contextmanager
def plainly(entries: Sequence[RaceEntry]) -> Iterator[None]:
    """Let the engines work without graphs and fused kernels while the block runs."""
    engines = [engine for one in entries if (engine := getattr(one.cache, "engine", None)) is not None]
    for engine in engines:
        engine.plain = True
    try:
        yield
    finally:
        for engine in engines:
            engine.plain = False


def compare_speed(
    bench: Bench, full: RaceEntry, method: EvaluatedMethod, batch: int, capacity: int
) -> dict[str, Any]:
    """The figures of a method that races the dense cache. Both begin at the dense cache's present length."""
    length, args = full.cache.get_seq_length(), bench.args
    one, note = make_entry(bench, method, batch, length, capacity)
    race([full, one], args.steps, args.repeats)
    if one.failed is not None:
        raise one.failed
    tokens = args.steps * batch
    result: dict[str, Any] = {
        "spec": method.spec,
        "options": method.options,
        "engine": getattr(one.cache, "engine", None) is not None,
        "note": note,
        **why_slower_path(one),
        "length": length,
        **_speeds(full, one, tokens),
    }
    if method is not STOCK:
        result |= {"bytes": one.cache.nbytes, "bytes_by_part": one.cache.nbytes_by_part()}
    if is_modelled(method):
        mean_length = (length + one.cache.get_seq_length()) // 2
        result |= _against_bytes(bench.sizes, method, batch, mean_length, result)
    if None in why_slower_path(full).values():
        result["like_for_like"] = _raced_plainly(full, one, args, tokens)
    return result


def _speeds(full: RaceEntry, one: RaceEntry, tokens: int) -> dict[str, Any]:
    """The speeds in the race that the dense cache and a method have just run, each as a `spread`.

    Args:
        full: the entry of the dense cache.
        one: the entry of the method.
        tokens: how many tokens each of them decoded in each round, over all rows.
    """
    pairs = list(zip(full.seconds, one.seconds, strict=True))
    return {
        "tokens_per_second": spread([tokens / own for _, own in pairs]),
        "full_tokens_per_second": spread([tokens / other for other, _ in pairs]),
        "speed_over_full": spread([other / own for other, own in pairs]),
    }


def _raced_plainly(full: RaceEntry, one: RaceEntry, args: BenchArgs, tokens: int) -> dict[str, Any]:
    """The speeds when both race again, without graphs and fused kernels."""
    with plainly([full, one]):
        race([full, one], args.steps, args.repeats)
    if one.failed is not None:
        return {"error": one_line(one.failed, with_class=True, limit=400)}
    return {} if full.failed is not None else _speeds(full, one, tokens)


def _against_bytes(
    sizes: Sizes, method: EvaluatedMethod, batch: int, length: int, found: dict[str, Any]
) -> dict[str, Any]:
    """The byte ceiling of a method's speed over dense, and the share of it that was reached.

    Args:
        length: mean number of tokens in the caches during the race.
        found: the figures of the race so far, from `compare_speed`.
    """
    own = read_per_step(sizes, method, length, batch)
    full = read_per_step(sizes, FULL, length, batch)
    return {
        "byte_ceiling": full / own,
        "share_of_ceiling": found["speed_over_full"]["median"] * own / full,
        "bytes_per_step": own,
        "full_bytes_per_step": full,
        "bytes_per_second": own * found["tokens_per_second"]["median"] / batch,
        "full_bytes_per_second": full * found["full_tokens_per_second"]["median"] / batch,
    }
