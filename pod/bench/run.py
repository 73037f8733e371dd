"""The `bench` section of a recipe, run: every batch size and length, printed as a table and written as JSON after each."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pod.bench import decode_bytes
from pod.bench.args import FULL, BenchArgs, BenchMethod
from pod.files import write_json
from pod.models import resolve_model

if TYPE_CHECKING:
    from pod.recipe import Recipe

BYTE_MODEL = (decode_bytes.__doc__ or "").split("\n\n", 1)[-1].strip()
"""The model behind the ceilings, as text."""

_ELEMENT = {"float32": 4, "bfloat16": 2, "float64": 8}
_RANDOM_LONGEST = 1 << 20  # positions of random models, which read any length alike


def estimate(recipe: "Recipe") -> str:
    """Lines for `--dry-run`: bytes held and bytes read per step at every setting, and the ceiling of the speed over dense."""
    args = recipe.bench
    sizes = _sizes(recipe)
    lines = [
        f"Weights: {sizes.weights / 1e9:.2f} GB, of which a decode step reads {sizes.read / 1e9:.2f} GB. "
        f"{sizes.followers} of {sizes.pairs} (layer, KV head) pairs follow, {sizes.windows} keep their window.",
        "Bytes of each cache at its end (GB), bytes that a step reads, weights included (GB), ceiling of the speed over full:",
    ]
    for batch in args.batch_sizes:
        for length in args.lengths:
            lines.append(f"  batch {batch}, {length:,} tokens:")
            for method in [FULL, *args.contestants()]:
                lines.append("    " + _estimate_line(sizes, method, batch, length, _capacity(args, length)))
    return "\n".join(lines)


def _estimate_line(sizes: Any, method: BenchMethod, batch: int, length: int, capacity: int) -> str:
    held = batch * decode_bytes.held_per_row(sizes, method, capacity) / 1e9
    limit = decode_bytes.ceiling(sizes, method, FULL, length, batch)
    if limit is None:
        return f"{method.name:<30} at most {held:.3f} held; what a step reads is not modelled"
    read = decode_bytes.read_per_step(sizes, method, length, batch) / 1e9
    return f"{method.name:<30} {held:8.3f} held  {read:8.3f} read  {limit:.3f}x"


def _capacity(args: BenchArgs, length: int) -> int:
    return decode_bytes.room(length, len(args.contestants()) + args.stock, args.steps, args.repeats)


def _config(recipe: "Recipe") -> Any:
    """What sizes depend on, as fields of `PodConfig`."""
    args = recipe.bench
    if args.shapes is not None:
        return SimpleNamespace(
            **{"tie_word_embeddings": False, "max_position_embeddings": _RANDOM_LONGEST} | args.shape()
        )
    from transformers import AutoConfig

    from pod.modeling.loading import convert_config
    from pod.modeling.shipped.config import PodConfig  # loads torch, which random shapes do not need

    options = {} if recipe.model.gguf_file is None else {"gguf_file": recipe.model.gguf_file}
    path = resolve_model(recipe.model.path)
    if PodConfig.get_config_dict(path, **options)[0].get("model_type") == "pod":
        return PodConfig.from_pretrained(path)
    return convert_config(AutoConfig.from_pretrained(path, **options))


def _lead(recipe: "Recipe", config: Any) -> tuple[list[list[int | None]], str]:
    """The plan `[L][H]` that is measured, and where it comes from.

    Raises: ValueError for a plan of another size.
    """
    found, shares = (
        recipe.model.plan_file(recipe.output_dir),
        (recipe.bench.share_followers, recipe.bench.share_windows),
    )
    shape = config.num_hidden_layers, config.num_key_value_heads
    if found is not None:
        from pod.modeling.shipped.sharing import SharingPlan

        plan = SharingPlan.load(found)
        plan.check_fits(*shape)
        return [list(row) for row in plan.lead], str(found)
    own = getattr(config, "lead", None)
    if own is not None and any(lead != layer for layer, row in enumerate(own) for lead in row):
        return own, "the model's own"
    made_up = "made up, {:.0%} of the pairs follow, {:.0%} keep their window".format(*shares)
    return decode_bytes.spread_plan(*shape, *shares), made_up


def _sizes(recipe: "Recipe") -> decode_bytes.Sizes:
    config, model = _config(recipe), recipe.model
    windows = model.num_sink_tokens, model.num_recent_tokens
    return decode_bytes.Sizes.of(config, _lead(recipe, config)[0], windows, _ELEMENT[model.dtype])


def run_bench(recipe: "Recipe") -> dict[str, Any]:
    """Measure what the section asks for; writes <output_dir>/bench/bench.json after every setting.

    Raises:
        ValueError: lengths beyond the model's positions, settings that do not fit into memory, unknown methods or options,
            a plan of another size; before anything is measured.
    """
    import torch

    from pod.bench.decode_speed import STOCK, Bench, compare, load_models, random_models, stock_model
    from pod.bench.dense_decode import dense_peers
    from pod.measure.machine import environment

    args, windows = recipe.bench, (recipe.model.num_sink_tokens, recipe.model.num_recent_tokens)
    device = torch.device(
        args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    config = _config(recipe)
    lead, source = _lead(recipe, config)
    _check_lengths(args, config.max_position_embeddings)
    stock_reasons = _check_memory(recipe, device)
    torch.manual_seed(recipe.seed)
    dtype = getattr(torch, recipe.model.dtype)
    if args.shapes is not None:
        longest = config.max_position_embeddings
        dense, planned = random_models(args.shape(), lead, windows, longest, dtype, device)
    else:
        options = {"dtype": dtype, "gguf_file": recipe.model.gguf_file}
        dense, planned = load_models(resolve_model(recipe.model.path), lead, windows, device, **options)
    stock = stock_model(dense) if args.stock else None
    bench = Bench(dense=dense, planned=planned, stock=stock, steps=args.steps, repeats=args.repeats)
    bench.backend, bench.full_backend = args.backend, args.full_backend
    _check_methods(bench, args)
    result: dict[str, Any] = {
        "schema": 1,
        "environment": environment(),
        "model": args.shapes or recipe.model.path,
        "shape_changes": args.shape_changes,
        "dtype": recipe.model.dtype,
        "plan": source,
        "share_followers": planned.config.sharing_plan.share_followers,
        "share_windows": planned.config.sharing_plan.share_windows,
        "windows": list(windows),
        "byte_model": BYTE_MODEL,
        "steps": args.steps,
        "settings": [],
    }
    print(f"Plan: {source}.\n{BYTE_MODEL}")
    with dense_peers():
        for batch in args.batch_sizes:
            for length in args.lengths:
                reason = stock_reasons.get((batch, length))
                with_stock = [STOCK] if stock is not None and reason is None else []
                found = compare(bench, [*args.contestants(), *with_stock], batch, length)
                if args.stock and not with_stock:
                    why = reason or "transformers' Llama does not have these weights' biases or norms"
                    found["methods"][STOCK.name] = {"error": why}
                result["settings"].append(found)
                write_json(recipe.bench_dir / "bench.json", result)
                print(table(found))
    print(f"wrote {recipe.bench_dir / 'bench.json'}")
    return result


def table(found: dict[str, Any]) -> str:
    """The figures of one setting as text, one line per method."""
    full = found["full"]
    held = sum(full["bytes_by_part"].values()) / 1e9
    lines = [
        f"batch {found['batch']}, {found['length']:,} tokens; full holds {held:.3g} GB and decodes with {full['backend']}",
        f"  {'':<24} {'tokens/s':>10} {'min–max':>15} {'full':>10} {'x full':>7} {'min–max':>11} {'ceiling':>8} {'reached':>8} {'GB':>8}",
    ]
    for name, row in found["methods"].items():
        if "error" in row:
            lines.append(f"  {name:<24} failed: {row['error']}")
            continue
        own, speed = row["tokens_per_second"], row["speed_over_full"]
        limit = row.get("byte_ceiling")
        ceiling = "" if limit is None else f"{limit:8.3f} {row['share_of_ceiling']:8.2f}"
        size = f"{row['bytes'] / 1e9:8.3g}" if "bytes" in row else ""
        note = f"  ({row['note']})" if row["note"] else ""
        lines.append(
            f"  {name:<24} {own['median']:10.2f} {own['min']:7.2f}–{own['max']:<7.2f} "
            f"{row['full_tokens_per_second']['median']:10.2f} {speed['median']:7.3f} {speed['min']:5.2f}–{speed['max']:<5.2f} "
            f"{ceiling:>17} {size:>8}{note}"
        )
    return "\n".join(lines)


def _check_lengths(args: BenchArgs, limit: int) -> None:
    longest = max(_capacity(args, length) for length in args.lengths)
    if longest > limit:
        raise ValueError(
            f"bench.lengths: {max(args.lengths)} tokens and {longest - max(args.lengths)} decoded in all rounds pass the "
            f"model's {limit} positions: lower bench.lengths, bench.steps or bench.repeats"
        )


def _check_memory(recipe: "Recipe", device: Any) -> dict[tuple[int, int], str]:
    """Why the stock model is left out, by (batch, length). Raises: ValueError for a setting that does not fit."""
    from pod.bench.decode_speed import STOCK, bytes_needed, most_bytes
    from pod.measure import memory

    args, sizes, there = recipe.bench, _sizes(recipe), memory.free_memory(device)
    reasons = {}
    for batch in args.batch_sizes:
        for length in args.lengths:
            setting = batch, _capacity(args, length), device.type == "cpu"
            needed = bytes_needed(sizes, args.contestants(), *setting)
            if most_bytes(needed) > there:
                parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.items())
                raise ValueError(
                    f"batch {batch} at {length} tokens needs {most_bytes(needed) / 1e9:.2f} GB ({parts}; one method at a "
                    f"time beside full) and {there / 1e9:.2f} GB are free on {device}: lower bench.batch_sizes or bench.lengths"
                )
            stock = most_bytes(bytes_needed(sizes, [STOCK], *setting))
            if stock > there:
                reasons[batch, length] = (
                    f"needs {stock / 1e9:.2f} GB beside full, {there / 1e9:.2f} GB are free"
                )
    return reasons


def _check_methods(bench: Any, args: BenchArgs) -> None:
    """Raises: ValueError for a method, option or backend that does not exist."""
    import pod
    from pod.bench.dense_decode import PEERS
    from pod.modeling.shipped.decode import DECODERS

    for method in args.contestants():
        pod.make_cache(bench.model_of(method), method.spec, **method.options)
    allowed = {"backend": ["auto", *DECODERS], "full_backend": ["fastest", "auto", *DECODERS, *PEERS]}
    for name, names in allowed.items():
        if getattr(args, name) not in names:
            raise ValueError(f"bench.{name} is {getattr(args, name)!r}, allowed: {', '.join(names)}")
