"""Decode speed of cache methods beside the dense cache, both through the decode engine, in one process and in turns.

Dense and PoD run the same program: preallocated stores, one static step from embedding to argmax, on CUDA recorded as a graph.
Every method meets the dense cache in a *duel*: rounds in which both decode ``steps`` tokens per row at the same length, in
alternating order; the ratio is taken round by round. Methods that the engine does not serve decode through the ordinary cache,
and their result says so. What is compared with the measured ratio is the byte ceiling of ``pod.bench.decode_bytes``.

Caches are filled without reading a prompt: random keys and values are written into the stores, which is what they hold after
a prompt as far as time is concerned. Caches that compress a prompt by what is in it read a random one, with an attention that
returns zeros.
"""

import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pod
from pod.bench import decode_bytes
from pod.bench.args import FULL, BenchMethod
from pod.bench.decode_bytes import Sizes
from pod.bench.dense_decode import candidates
from pod.eval.results import one_line
from pod.measure import race
from pod.measure.memory import now
from pod.measure.race import spread
from pod.modeling.shipped.layout import PodCacheLayer

_WARM_UP = 2  # tokens; the first compiles and captures
_CHUNK = 1 << 26  # random numbers written to a store at a time
_LOUD = 100.0  # standard deviation of window keys whose logits drown those of distant tokens, also of small queries
_TRIAL_STEPS = 8  # tokens by which backends for the dense cache are compared
STOCK = BenchMethod(name="transformers", spec="transformers")


class DeviceBroken(RuntimeError):
    """A contestant broke the CUDA context: nothing more runs in this process. contestant: its name."""

    def __init__(self, contestant: str, reason: str):
        super().__init__(f"{contestant} broke the CUDA context: {reason}")
        self.contestant, self.reason = contestant, reason


@dataclass(kw_only=True)
class Bench:
    """Models that share one set of weights, and how they are measured.

    Attributes:
        dense, planned: the model without and with a sharing plan.
        stock: the transformers model with these weights, None when there is none.
        steps, repeats: tokens per row and timed round; timed rounds.
        backend, full_backend: see ``BenchArgs``.
        skip: contestants that are not to run, with the reason.
    """

    dense: Any
    planned: Any
    stock: Any = None
    steps: int = 16
    repeats: int = 5
    backend: str = "auto"
    full_backend: str = "fastest"
    skip: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.dense.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.dense.lm_head.weight.dtype

    @property
    def sizes(self) -> Sizes:
        """Of the model with the plan, which has the weights of the other."""
        return sizes_of(self.planned.config, self.dtype.itemsize)

    def model_of(self, method: BenchMethod) -> Any:
        """The model that a method's cache belongs to."""
        return self.planned if method.uses_plan else self.dense


def sizes_of(config: Any, element: int) -> Sizes:
    """What bytes depend on, of a `PodConfig`; element: bytes per number."""
    windows = config.num_sink_tokens, config.num_recent_tokens
    return Sizes.of(config, config.sharing_plan.lead, windows, element)


# -- models ----------------------------------------------------------------------------------------------------------


def random_models(
    shape: dict[str, Any],
    lead: list[list[int | None]],
    windows: tuple[int, int],
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, Any]:
    """Dense model and model with a plan, with the same random weights.

    Args:
        shape: fields of `PodConfig`; lead: the plan; windows: sink and recent tokens; longest: tokens per row.
    """
    fields: dict[str, Any] = shape | {"max_position_embeddings": longest}
    fields |= {"num_sink_tokens": windows[0], "num_recent_tokens": windows[1]}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            dense = pod.PodForCausalLM(pod.PodConfig(**fields)).eval()
    finally:
        torch.set_default_dtype(before)
    return dense, pod.load_model(dense, plan=pod.SharingPlan(lead=tuple(map(tuple, lead))))


_NOT_LLAMA = [
    "attention_qkv_bias",
    "attention_out_bias",
    "mlp_bias",
    "qk_norm",
    "norm_placement",
    "norm_offset",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "num_experts",
    "no_rope_layers",
    "layer_windows",
]
"""Fields of other families."""


def stock_model(dense: Any) -> Any:
    """transformers' own Llama with the weights of a dense model of this family; None for other families."""
    config = dense.config
    plain = pod.PodConfig()
    if any(getattr(config, name) != getattr(plain, name) for name in _NOT_LLAMA):
        return None
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters hidden_act"
    )
    fields: dict[str, Any] = {name: getattr(config, name) for name in names.split()}
    device = dense.lm_head.weight.device
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    settings: Any = LlamaConfig(**fields, attn_implementation=attention)  # type: ignore[call-arg]
    with torch.device("meta"):
        stock = LlamaForCausalLM(settings)
    stock.load_state_dict(dense.state_dict(), assign=True)
    stock.tie_weights()
    stock.model.rotary_emb = LlamaRotaryEmbedding(settings).to(device)  # its buffers are in no state dict
    return stock.eval()


def load_models(
    path: str, lead: list[list[int | None]], windows: tuple[int, int], device: torch.device, **options
) -> tuple[Any, Any]:
    """Dense model and model with the plan ``lead`` of a checkpoint or an export, with the same weights.

    Args:
        options: for ``pod.load_model``: dtype, gguf_file.

    Raises: ValueError for an export of another layout.
    """
    sinks, recent = windows
    model = pod.load_model(path, num_sink_tokens=sinks, num_recent_tokens=recent, device=device, **options)
    if model.config.layout != "pod":
        raise ValueError(
            f"{path} has layout {model.config.layout!r}: this benchmark compares dense caches with pod, give it a model "
            "of full attention"
        )
    planned = pod.load_model(model, plan=pod.SharingPlan(lead=tuple(map(tuple, lead))))
    return pod.load_model(model, layout="dense"), planned


# -- caches ----------------------------------------------------------------------------------------------------------


def make_cache(model: Any, method: BenchMethod, capacity: int, backend: str) -> tuple[Any, str | None]:
    """An empty cache with the decode engine; the ordinary one when the engine refuses, and why.

    Raises: ValueError for what ``pod.make_cache`` refuses without an engine too.
    """
    named = any(part in ("full", "pod") for part in method.parts)
    try:
        cache = pod.make_cache(
            model, method.spec if named else f"full+{method.spec}", capacity=capacity, **method.options
        )
    except ValueError as error:
        cache = pod.make_cache(model, method.spec, **method.options)
        return cache, f"ordinary cache, no engine: {one_line(error)}"
    engine: Any = cache.engine
    engine.backend = backend
    return cache, None


@torch.no_grad()
def fill(model: Any, cache: Any, batch: int, length: int, skip_share: float = 0.0) -> None:
    """Let a cache hold ``length`` random tokens in each of ``batch`` rows.

    Args:
        skip_share: this share of the following pairs, spread over the layers, gets window keys so loud that proximal
            tokens hold nearly all attention of their query heads.
    """
    layers = cache.layers
    if type(cache) is not pod.PodCache or not all(isinstance(layer, PodCacheLayer) for layer in layers):
        _read_random_prompt(model, cache, batch, length)
        return
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    step, _ = cache.begin_step(torch.empty(batch, length, 0, device=device), None, None)
    generator = torch.Generator(device).manual_seed(length)
    seen = 0.0
    for layer in layers:
        loud = torch.ones(max(1, len(layer.roles.followers)), device=device)
        for index in range(len(layer.roles.followers)):
            seen += skip_share
            if seen >= 1 - 1e-9:
                seen, loud[index] = seen - 1, _LOUD
        for name, store in layer.stores().items():
            shape = batch, _num_heads(layer, name), length, model.config.head_dim
            _append_random(store, shape, loud if name == "window_keys" else None, dtype, generator)
    cache.end_step(step)


def _num_heads(layer: PodCacheLayer, store: str) -> int:
    """KV heads of a store of a layer, by its name."""
    roles = layer.roles
    heads = {"keys": roles.leads, "window_keys": roles.followers, "values": roles.held}
    return len(heads.get(store, roles.windows))


def _append_random(store: Any, shape: tuple, factor: Tensor | None, dtype: torch.dtype, generator) -> None:
    """Random tokens ``[B, h, n, d]``, a part at a time; of a window only those that stay."""
    batch, heads, length, head_dim = shape
    size = max(1, _CHUNK // (batch * heads * head_dim) // 64) * 64
    for first in range(0, length, size):
        rows = min(size, length - first)
        if first and store.has_window and first + rows <= length - store.num_recent_tokens:
            continue
        x = torch.randn(
            batch, heads, rows, head_dim, generator=generator, device=generator.device, dtype=dtype
        )
        store.append(x if factor is None else x * factor[:, None, None].to(dtype), first)
        store.settle(first + rows)


@torch.no_grad()
def reserve(model: Any, cache: Any, batch: int, length: int) -> None:
    """As ``fill``, with zeros and without a temporary copy: the room that the cache reserved is allocated, and no more."""
    weight = model.lm_head.weight
    step, _ = cache.begin_step(torch.empty(batch, length, 0, device=weight.device), None, None)
    for layer in cache.layers:
        for name, store in layer.stores().items():
            shape = batch, _num_heads(layer, name), 1, model.config.head_dim
            store.append(weight.new_zeros(shape), 0)
    cache.end_step(step)


@torch.no_grad()
def _read_random_prompt(model: Any, cache: Any, batch: int, length: int) -> None:
    """Feed a random prompt with an attention that returns zeros: projections, methods and packing work as they do."""
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    with race.without_attention(model):
        model(input_ids=prompt.to(model.lm_head.weight.device), past_key_values=cache, logits_to_keep=1)


# -- contestants -----------------------------------------------------------------------------------------------------


@dataclass
class Runner(race.Contestant):
    """A contestant whose cache may have an engine.

    Attributes:
        note: why it has none; None when it has.
        backend: decode backend of the engine.
    """

    method: BenchMethod = FULL
    note: str | None = None
    backend: str = "auto"

    def trying(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """A failure ends the duel; `recorded` keeps it."""
        return nullcontext()

    @torch.no_grad()
    def decode(self, steps: int) -> float:
        """Greedy decoding of ``steps`` tokens per row; returns the seconds that it took."""
        engine = getattr(self.cache, "engine", None)
        if engine is None:
            return super().decode(steps)
        assert self.token is not None
        began = now(self.token.device)
        found = engine.greedy(self.model, self.token, steps)[:, -1:]
        seconds = now(found.device) - began
        self.token = found
        return seconds

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.cache.get_seq_length()


def start_runner(
    bench: Bench, method: BenchMethod, batch: int, length: int, capacity: int, backend: str
) -> Runner:
    """A contestant that holds ``length`` tokens, warmed up: what compiles has compiled, what is captured is."""
    model = bench.model_of(method)
    cache, note = make_cache(model, method, capacity, backend)
    fill(model, cache, batch, length - _WARM_UP, method.skip_share)
    return _warmed(Runner(method.name, model, cache, method=method, note=note, backend=backend), batch)


def start_stock(bench: Bench, batch: int, length: int) -> Runner:
    """The transformers model with random keys and values."""
    model, sizes = bench.stock, bench.sizes
    cache: Any = DynamicCache(config=model.config)
    shape = batch, len(sizes.lead[0]), length - _WARM_UP, sizes.head_dim
    for layer in range(len(sizes.lead)):
        keys, values = (torch.randn(shape, dtype=bench.dtype, device=bench.device) for _ in range(2))
        cache.update(keys, values, layer)
    note = f"transformers' DynamicCache, {model.config._attn_implementation}"
    return _warmed(Runner(STOCK.name, model, cache, method=STOCK, note=note), batch)


def _warmed(runner: Runner, batch: int) -> Runner:
    runner.token = torch.zeros(batch, 1, dtype=torch.long, device=runner.model.device)
    runner.decode(_WARM_UP)
    return runner


def free(device: torch.device) -> None:
    """Give back what nobody holds any more: engines and caches refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def recorded(bench: Bench, name: str, errors: dict[str, str]) -> Iterator[None]:
    """Record what goes wrong with a contestant in one line, and go on. Raises: DeviceBroken when nothing can go on."""
    try:
        yield
        return
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; the others go on
        errors[name] = one_line(error)[:400]
    if bench.device.type == "cuda":
        try:
            torch.cuda.synchronize(bench.device)
        except RuntimeError:
            raise DeviceBroken(name, errors[name]) from None


# -- one setting -----------------------------------------------------------------------------------------------------


def fastest_backend(bench: Bench, batch: int, length: int) -> tuple[str, dict[str, Any]]:
    """The decode backend in which the dense cache is fastest, and what was tried: seconds per step, or the error."""
    if bench.full_backend != "fastest":
        return bench.full_backend, {}
    names = candidates(bench.device)
    tried: dict[str, Any] = {}
    for name in names:
        key, errors = f"full {name}", {}
        if key in bench.skip:
            tried[name] = bench.skip[key]
            continue
        with recorded(bench, key, errors):
            tried[name] = _seconds_per_step(bench, batch, length, name)
        if errors:
            tried[name] = errors[key]
        free(bench.device)
    found = {name: seconds for name, seconds in tried.items() if isinstance(seconds, float)}
    if not found:
        raise ValueError(f"no decode backend runs the dense cache here: {tried}")
    return min(found, key=lambda name: found[name]), tried


def _seconds_per_step(bench: Bench, batch: int, length: int, backend: str) -> float:
    """The dense cache's, with a backend; the better of two short rounds."""
    runner = start_runner(bench, FULL, batch, length, length + 2 * _TRIAL_STEPS, backend)
    return min(runner.decode(_TRIAL_STEPS) for _ in range(2)) / _TRIAL_STEPS


def compare(
    bench: Bench,
    methods: Iterable[BenchMethod],
    batch: int,
    length: int,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Duels of methods with the dense cache at one batch size and length.

    Args:
        is_late: asked before each duel; True = leave it and those that follow out.

    Returns:
        ``full``: the dense cache's backend, what was tried, its bytes by part; ``methods``: by name, figures or an error.
    """
    methods = list(methods)
    capacity = decode_bytes.room(length, len(methods), bench.steps, bench.repeats)
    backend, tried = fastest_backend(bench, batch, length)
    full = start_runner(bench, FULL, batch, length, capacity, backend)
    result: dict[str, Any] = {
        "batch": batch,
        "length": length,
        "full": {"backend": backend, "tried": tried, "bytes_by_part": full.cache.nbytes_by_part()},
        "methods": {},
    }
    errors: dict[str, str] = {}
    for method in methods:
        found: dict[str, Any] = {}
        if method.name in bench.skip:
            errors[method.name] = bench.skip[method.name]
        elif is_late():
            errors[method.name] = "not measured: the time for this benchmark was up"
        else:
            with recorded(bench, method.name, errors):
                found = duel(bench, full, method, batch, capacity)
        if method.name in errors:
            found = {"error": errors[method.name]}
        result["methods"][method.name] = found
        free(bench.device)
    return result


def duel(bench: Bench, full: Runner, method: BenchMethod, batch: int, capacity: int) -> dict[str, Any]:
    """A method against the dense cache, both at the length that the latter has now; figures of the method."""
    length = full.length
    if method is STOCK:
        runner = start_stock(bench, batch, length)
    else:
        runner = start_runner(bench, method, batch, length, capacity, bench.backend)
    race.race([full, runner], bench.steps, bench.repeats)
    tokens = bench.steps * batch
    pairs = list(zip(full.seconds, runner.seconds, strict=True))
    result: dict[str, Any] = {
        "spec": method.spec,
        "options": method.options,
        "skip_share": method.skip_share,
        "engine": getattr(runner.cache, "engine", None) is not None,
        "note": runner.note,
        "length": length,
        "tokens_per_second": spread([tokens / own for _, own in pairs]),
        "full_tokens_per_second": spread([tokens / other for other, _ in pairs]),
        "speed_over_full": spread([other / own for other, own in pairs]),
    }
    if method is not STOCK:
        result["bytes"], result["bytes_by_part"] = runner.cache.nbytes, runner.cache.nbytes_by_part()
        result |= _against_bytes(bench, method, batch, (length + runner.length) // 2, result)
    return result


def _against_bytes(bench: Bench, method: BenchMethod, batch: int, length: int, found: dict) -> dict[str, Any]:
    """The byte ceiling at the mean length of the duel, and the share of it that was reached."""
    sizes = bench.sizes
    limit = decode_bytes.ceiling(sizes, method, FULL, length, batch)
    if limit is None:
        return {"byte_ceiling": None, "share_of_ceiling": None}
    figures = {}
    for name, one, speed in (
        ("full_bytes_per_second", FULL, found["full_tokens_per_second"]),
        ("bytes_per_second", method, found["tokens_per_second"]),
    ):
        moved = decode_bytes.read_per_step(sizes, one, length, batch)
        figures[name] = moved * speed["median"] / batch
    return {
        "byte_ceiling": limit,
        "share_of_ceiling": found["speed_over_full"]["median"] / limit,
        "bytes_per_step": decode_bytes.read_per_step(sizes, method, length, batch),
        "full_bytes_per_step": decode_bytes.read_per_step(sizes, FULL, length, batch),
        **figures,
    }


# -- memory ----------------------------------------------------------------------------------------------------------


def bytes_needed(
    sizes: Sizes, methods: Iterable[BenchMethod], batch: int, capacity: int, on_cpu: bool
) -> dict[str, float]:
    """Bytes held at the same time at one setting: weights, the dense cache, and each method's, of which one is held at a time."""
    held = {
        "weights": float(sizes.weights),
        "full": batch * decode_bytes.held_per_row(sizes, FULL, capacity, on_cpu),
    }
    for method in methods:
        if method is STOCK:
            held[method.name] = batch * decode_bytes.stock_per_row(sizes, capacity)
        else:
            held[method.name] = batch * decode_bytes.held_per_row(sizes, method, capacity, on_cpu)
    return held


def most_bytes(needed: dict[str, float]) -> float:
    """Bytes at the peak: weights, dense cache and the largest method's."""
    others = [size for name, size in needed.items() if name not in ("weights", "full")]
    return needed["weights"] + needed["full"] + max(others, default=0.0)
