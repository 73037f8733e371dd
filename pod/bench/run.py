"""Run the `bench` section of a recipe: measure every pair of a batch size and a length.

After each pair, its figures are printed as a table, and all figures so far are written as JSON.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from pod.bench.args import FULL, SHAPES, STOCK, BenchArgs
from pod.bench.decode_bytes import Sizes, held_per_row, is_modelled, needed, read_per_step, spread_plan
from pod.eval.answer.devices import (
    Load,
    check_available,
    places_for,
    rank_devices,
    room_on,
    spread_of,
)
from pod.files import keep_old, write_json
from pod.measure.machine import version
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.models import head_dim_of, read_config, resolve_model

if TYPE_CHECKING:
    import torch

    from pod.bench.decode_speed import Bench
    from pod.recipe import Recipe

_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}  # bytes
_RANDOM_LONGEST = 1 << 20  # positions of random models, which read all lengths alike
_OF_EXPORTS = (
    "model.path is an export with PoD weights; set it to the dense model to compare with stock transformers"
)


_USUAL_DEVICES = r"auto|balanced|sequential|(cpu|cuda)(:\d+)?"
"""Values of bench.device that are known to be right without loading torch."""


def settings(args: BenchArgs) -> Iterator[tuple[int, int]]:
    """Every pair of a batch size and a length."""
    return ((batch, length) for batch in args.batch_sizes for length in args.lengths)


def estimate(recipe: "Recipe") -> str:
    """Text for `--dry-run`, with a line for every batch size, length and method.

    A line has the size of the cache, the bytes that a step reads, and the ceiling of the speed over dense.
    """
    args, bench_plan = recipe.bench, plan_bench(recipe)
    if not re.fullmatch(_USUAL_DEVICES, args.device):
        rank_devices(args.device, "bench.device")  # refuses a text that names no device
    sizes, plan = bench_plan.sizes, bench_plan.sizes.plan
    lines = [
        f"Plan: {bench_plan.describe()}",
        f"Weights: {sizes.weights / 1e9:.2f} GB, of which a decode step reads {sizes.read / 1e9:.2f} GB. "
        f"{plan.num_followers} of {plan.num_pairs} (layer, KV head) pairs follow, "
        f"{plan.num_windows} keep their window.",
        "Each line: size of the cache after all rounds (GB); bytes that a step reads from cache and "
        "weights (GB); highest possible speed relative to full, if only these bytes took time:",
    ]
    for batch, length in settings(args):
        lines.append(f"  batch {batch}, {length:,} tokens:")
        full = read_per_step(sizes, FULL, length, batch)
        for method in [FULL, *args.raced_methods]:
            held = batch * held_per_row(sizes, method, args.capacity_for(length)) / 1e9
            read = read_per_step(sizes, method, length, batch)
            known = f"{held:8.3f} size  {read / 1e9:8.3f} read  {full / read:.3f}x"
            unknown = f"at most {held:.3f} size; bytes per step unknown"
            lines.append(f"    {method.name:<30} {known if is_modelled(method) else unknown}")
    return "\n".join(lines)


class BenchPlan(NamedTuple):
    """What `pod bench` measures: a model's sizes, its plan and its limits.

    Attributes:
        sizes: the sizes of the model, with its plan.
        plan_source: where the plan comes from, in words.
        positions: the longest sequence that the model reads, in tokens.
        windows: numbers of sink and of recent tokens of the plan.
        is_export: whether the model is an export of this project, for which there is no dense transformers
            model.
    """

    sizes: Sizes
    plan_source: str
    positions: int
    windows: tuple[int, int]
    is_export: bool

    def describe(self) -> str:
        """The plan and its windows in a sentence."""
        sinks, recent = self.windows
        return f"{self.plan_source}; windows of {sinks} sink and {recent} recent tokens."


def plan_bench(recipe: "Recipe") -> BenchPlan:
    """What the recipe asks to measure.

    The plan is that of model.plan, else an export's own, else the one in <output_dir>/plan, else a generated
    one (`spread_plan`). The windows are the recipe's, else the plan's.

    Raises:
        ValueError: the plan has other numbers of layers or heads than the model, or the model's layout is
            neither pod nor dense.
    """
    args, model = recipe.bench, recipe.model
    stored: Any = None
    if args.shapes is not None:
        config: Any = SimpleNamespace(**SHAPES[args.shapes], max_position_embeddings=_RANDOM_LONGEST)
    else:
        from pod.modeling.loading import target_config  # loads torch, which random shapes do not need

        stored = read_config(resolve_model(model.path), model.gguf_file)
        config = target_config(stored)
        if config.layout != "pod":
            raise ValueError(
                f"{model.path} has layout {config.layout!r}: `pod bench` compares a dense cache with PoD's. "
                "Give it a model with layout pod or dense"
            )
    has_own_plan = getattr(config, "lead", None) is not None
    found = None if has_own_plan and model.plan is None else model.plan_file(recipe.output_dir)
    if found is not None:
        plan = SharingPlan.load(found)
        source = str(found)
        plan.check_fits(config.num_hidden_layers, config.num_key_value_heads)
    elif has_own_plan:
        own_windows = {name: getattr(config, name) for name in ("num_sink_tokens", "num_recent_tokens")}
        plan, source = replace(config.sharing_plan, **own_windows), "the model's own"
    else:
        shares = args.share_followers, args.share_windows
        own = getattr(config, "layer_windows", None) or [None] * config.num_hidden_layers
        plan = spread_plan(own, config.num_key_value_heads, *shares)
        source = "generated, {:.0%} of the pairs follow, {:.0%} keep their window".format(*shares)
    plan = replace(plan, head_order=None)  # another order costs the same and copies the weights
    windows = model.windows(plan)
    plan = _with_sinks(plan, windows, model.sinks or plan.sinks, config)
    near = windows["num_sink_tokens"], windows["num_recent_tokens"]
    sizes = Sizes.of(config, plan, near, _ELEMENT[model.dtype])
    is_export = args.shapes is None and stored.model_type == "pod"
    return BenchPlan(sizes, source, config.max_position_embeddings, near, is_export)


def _with_sinks(plan: SharingPlan, windows: dict[str, Any], sinks: str | None, config: Any) -> SharingPlan:
    """The plan with these windows and this kind of sinks.

    Constant sinks are all zeros, since the time does not depend on their values.

    Args:
        windows: `num_sink_tokens` and `num_recent_tokens`.
        sinks: ``constant``, or something else for sinks without constants.
        config: of the model.
    """
    if sinks != "constant":
        return replace(plan, **windows, sinks=None, sink_constants=None)
    heads, head_dim = config.num_attention_heads, head_dim_of(config)
    value = ((0.0,) * head_dim,) * plan.num_key_value_heads
    has_own = getattr(config, "layer_windows", None) or [None] * plan.num_layers
    has = [None in row and own is None for row, own in zip(plan.lead, has_own, strict=True)]
    constants = SinkConstants(
        tuple((0.0,) * heads if one else None for one in has), tuple(value if one else None for one in has)
    )
    return replace(plan, **windows, sinks=sinks, sink_constants=constants)


def _places(recipe: "Recipe") -> dict[str, str]:
    """Arguments of transformers' `from_pretrained` that name a GGUF file; none for other models."""
    return {} if recipe.model.gguf_file is None else {"gguf_file": recipe.model.gguf_file}


def load(recipe: "Recipe", bench_plan: BenchPlan, devices: "Sequence[torch.device]") -> "Bench":
    """The dense, the planned and the stock model, all with the same weights.

    The weights are random (bench.shapes), or those of model.path. For an export, or without bench.stock,
    there is no stock model.

    Args:
        devices: where the models may lie. They use several only if they do not fit on one, or if
            `bench.device` says how to spread them.
    """
    import torch
    from accelerate import dispatch_model
    from transformers import AutoModelForCausalLM

    import pod
    from pod.bench.decode_speed import Bench
    from pod.modeling.loading import stock_device_map

    args, model = recipe.bench, recipe.model
    dtype = getattr(torch, model.dtype)
    options: dict[str, Any] = {"attn_implementation": stock_attention(devices[0]), "dtype": dtype}
    torch.manual_seed(recipe.seed)
    source: Any = None if args.shapes is not None else resolve_model(model.path)
    config: Any = random_config(args) if source is None else read_config(source, model.gguf_file)
    where = _where(recipe, bench_plan, config, devices)
    stock: Any = None
    of_stock = stock_device_map(config, where["device_map"]) if "device_map" in where else where["device"]
    if source is None:
        with torch.device(where.get("device", "cpu")):
            stock = AutoModelForCausalLM.from_config(config, **options).eval()
        source = stock
        if "device_map" in where:
            names = {module: str(one) for module, one in of_stock.items()}
            skipped = stock._skip_keys_device_placement
            dispatch_model(stock, names, devices[0], skip_keys=skipped)  # type: ignore
    elif not bench_plan.is_export:
        options |= {"device_map": of_stock, **_places(recipe)}
        stock = AutoModelForCausalLM.from_pretrained(source, **options)
        source = stock
    dense = pod.load_model(source, None, *bench_plan.windows, layout="dense", dtype=dtype, **where)
    planned = pod.load_model(dense, plan=bench_plan.sizes.plan)
    return Bench(
        args=args, sizes=bench_plan.sizes, dense=dense, planned=planned, stock=stock if args.stock else None
    )


def random_config(args: BenchArgs) -> Any:
    """The transformers configuration of a model in the shape of bench.shapes."""
    from transformers import LlamaConfig

    assert args.shapes is not None
    return LlamaConfig(**SHAPES[args.shapes], max_position_embeddings=_RANDOM_LONGEST)


def _where(
    recipe: "Recipe", bench_plan: BenchPlan, config: Any, devices: "Sequence[torch.device]"
) -> dict[str, Any]:
    """Arguments of `pod.load_model` that say where the models lie: `device`, or `device_map` for several.

    Beside the weights, each device has space for its layers' part of two dense caches: a method races the
    dense cache, and holds no more than it does.

    Args:
        config: the transformers configuration of the model, or that of an export.
    """
    if len(devices) == 1:
        return {"device": devices[0]}
    from pod.bench.decode_speed import races_on
    from pod.modeling.loading import target_config

    args = recipe.bench
    longest = args.capacity_for(max(args.lengths), races_on(devices[0]))
    load = Load(2 * max(args.batch_sizes), longest)
    asked = spread_of(args.device)
    dense = target_config(config, layout="dense")
    places = places_for(dense, _ELEMENT[recipe.model.dtype], asked, room_on(devices), load)
    used = set(places.values())
    return {"device": used.pop()} if len(used) == 1 else {"device_map": places}


def stock_attention(device: "torch.device") -> str:
    """The attention of the stock model: flash-attn's where that package is installed, else PyTorch's."""
    # This looks for the installed distribution, not for a module: flash-attn-4 has a module of the same name,
    # which lacks what transformers needs.
    has_flash = device.type == "cuda" and version("flash-attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def run_bench(recipe: "Recipe") -> dict[str, Any]:
    """Measure what section `bench` asks for, and write <output_dir>/bench/bench.json after every setting.

    Returns:
        The content of bench.json.

    Raises:
        ValueError: before anything is measured: lengths beyond the model's positions, settings that do not
            fit into memory, methods that cannot be made, or a plan that does not fit the model.
    """
    from pod.bench.decode_speed import compare, make_cache, races_on
    from pod.bench.dense_decode import dense_peers
    from pod.measure.machine import environment

    args, bench_plan = recipe.bench, plan_bench(recipe)
    sizes = bench_plan.sizes
    devices = rank_devices(args.device, "bench.device")
    check_available(devices, "bench.device")
    _check_lengths(args, bench_plan.positions, races_on(devices[0]))
    no_room = _check_memory(args, sizes, devices)
    bench = load(recipe, bench_plan, devices)
    for method in args.raced_methods:  # a cache that cannot be made is refused before anything is measured
        for length in args.lengths:
            make_cache(bench, method, length, length)
    earlier = keep_old(recipe.bench_dir / "bench.json")
    if earlier is not None:
        print(f"the figures of an earlier run are kept as {earlier}")
    result: dict[str, Any] = {
        "schema": 2,
        "environment": environment(),
        "model": args.shapes or recipe.model.path,
        "dtype": recipe.model.dtype,
        "plan": bench_plan.plan_source,
        "share_followers": sizes.plan.share_followers,
        "share_windows": sizes.plan.share_windows,
        "windows": list(bench_plan.windows),
        "steps": args.steps,
        "settings": [],
    }
    print(f"Plan: {bench_plan.describe()}")
    with dense_peers():
        for setting in settings(args):
            reason = _OF_EXPORTS if bench_plan.is_export else no_room.get(setting)
            with_stock = args.stock and reason is None
            methods = [*args.raced_methods, STOCK] if with_stock else args.raced_methods
            found = compare(bench, methods, *setting)
            if args.stock and not with_stock:
                found["methods"][STOCK.name] = {"not_measured": reason}
            result["settings"].append(found)
            write_json(recipe.bench_dir / "bench.json", result)
            print(table(found))
    print(f"written: {recipe.bench_dir / 'bench.json'}")
    return result


def table(found: dict[str, Any]) -> str:
    """The figures of one setting as text, with a line for each method.

    Args:
        found: from `decode_speed.compare`.
    """
    full = found["full"]
    held = sum(full["bytes_by_part"].values()) / 1e9
    head = "".join(f"{name:>{size}}" for name, size in _COLUMNS.items())
    lines = [
        f"batch {found['batch']}, {found['length']:,} tokens; the dense cache (full) takes {held:.3g} GB, "
        f"attention "
        f"backend: {full['backend']}, graph: {_told(full['no_graph'])}, fused: {_told(full['no_fused'])}",
        f"  {'':<30}{head}",
    ]
    for name, row in found["methods"].items():
        if "not_measured" in row:
            lines.append(f"  {name:<30} not measured: {row['not_measured']}")
            continue
        if "error" in row:
            lines.append(f"  {name:<30} failed: {row['error']}")
            continue
        note = f"  ({row['note']})" if row["note"] else ""
        cells = zip(_cells(row), _COLUMNS.values(), strict=True)
        lines.append(f"  {name:<30}{''.join(f'{cell:>{size}}' for cell, size in cells)}{note}")
    if None in (full["no_graph"], full["no_fused"]):
        lines += [*_reasons(found, "no_graph", "graph"), *_reasons(found, "no_fused", "fused kernels")]
    return "\n".join(lines)


_COLUMNS = {
    "tokens/s": 11,
    "full": 11,
    "x full": 8,
    "min–max": 12,
    "graph": 6,
    "fused": 6,
    "x alike": 8,
    "ceiling": 9,
    "reached": 9,
    "GB": 9,
}
"""The titles of the table's columns, and their widths."""


def _cells(row: dict[str, Any]) -> list[str]:
    """The figures of a method as texts, in the order of the columns; empty where there is none."""
    own = row["tokens_per_second"]["median"]
    other = row["full_tokens_per_second"]["median"]
    speed = row["speed_over_full"]
    alike = row.get("like_for_like", {})
    return [
        f"{own:.2f}",
        f"{other:.2f}",
        f"{speed['median']:.3f}",
        f"{speed['min']:.2f}–{speed['max']:.2f}",
        "yes" if row["no_graph"] is None else "no",
        "yes" if row["no_fused"] is None else "no",
        f"{alike['speed_over_full']['median']:.3f}" if "speed_over_full" in alike else "",
        f"{row['byte_ceiling']:.3f}" if "byte_ceiling" in row else "",
        f"{row['share_of_ceiling']:.2f}" if "byte_ceiling" in row else "",
        f"{row['bytes'] / 1e9:.3g}" if "bytes" in row else "",
    ]


def _told(reason: str | None) -> str:
    """`yes`, or `no` and the reason."""
    return "yes" if reason is None else f"no ({reason})"


def _reasons(found: dict[str, Any], key: str, what: str) -> Iterator[str]:
    """One line for each reason why methods had no graph, or no fused kernels."""
    names: dict[str, list[str]] = {}
    for name, row in found["methods"].items():
        if row.get(key) is not None:
            names.setdefault(row[key], []).append(name)
    for reason, those in names.items():
        yield f"  no {what}: {', '.join(those)}: {reason}"


def _check_lengths(args: BenchArgs, positions: int, races: int) -> None:
    """Raise ValueError when the longest length, with the tokens decoded behind it, exceeds the positions."""
    longest = max(args.lengths)
    capacity = args.capacity_for(longest, races)
    if capacity > positions:
        raise ValueError(
            f"bench.lengths: {longest} tokens plus {capacity - longest} decoded tokens exceed the "
            f"model's {positions} positions: lower bench.lengths, bench.steps or bench.repeats"
        )


def _check_memory(
    args: BenchArgs, sizes: Sizes, devices: "Sequence[torch.device]"
) -> dict[tuple[int, int], str]:
    """Why the stock model is not measured, by (batch, length).

    Raises:
        ValueError: another method does not fit at some setting.
    """
    from pod.bench.decode_speed import races_on
    from pod.measure import measured_memory

    reasons: dict[tuple[int, int], str] = {}
    free = {one if one.type == "cuda" else "host": measured_memory.free_memory(one) for one in devices}
    there = sum(free.values())
    names = ", ".join(map(str, devices))
    for batch, length in settings(args):
        for method in [*args.raced_methods, STOCK]:
            capacity = args.capacity_for(length, races_on(devices[0]))
            size = needed(sizes, method, batch, capacity, devices[0].type == "cpu")
            said = (
                f"needs {size / 1e9:.2f} GB with the weights and the dense cache, but {there / 1e9:.2f} GB "
                f"are free on {names}"
            )
            if size > there and method is STOCK:
                reasons[batch, length] = said
            elif size > there:
                raise ValueError(
                    f"batch {batch} at {length} tokens: {method.name} {said}: "
                    "lower bench.batch_sizes or bench.lengths"
                )
    return reasons
