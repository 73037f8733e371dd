"""Reports of `pod explore`: plans, retrieval heads and measurements as text and pictures.

The pictures are those of the paper's Figures 1d (similarity) and 5 (blocks), the scores of heads, and the
whole curve of plans: the least cost of every saving, with the roles of the plan that has it.
"""

import io
import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from pod.files import atomic_write_bytes
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.plan.args import ExploreArgs
from pod.plan.checks import check_array, check_groups
from pod.plan.choose import Choice, pairs_without
from pod.plan.engines import EngineCache, describe_engine, window_counts
from pod.plan.exploration import counted_windows
from pod.plan.plan_progress import steps

MOST_POINTS = 100
"""Most points of a curve, about. With 1,000 heads, choosing the windows of a point takes seconds."""
SCHEMA_VERSION = 1  # of the curve that `pareto` makes
# What `Choice.without` and the provenance call a thing that was forbidden → how reports call it.
FORBIDDEN = {
    "follow": "without followers",
    "window": "without windows",
    "4_bits": "with 16 bits in every layer",
}


def pareto(choice: Choice, explore: ExploreArgs, windows: dict[str, int]) -> dict[str, Any]:
    """The Pareto curve of plans, for JSON: savings with their least cost, where no larger saving costs less.

    Each point has its saving, the least cost, the least cost of saving as much or more when one role or
    packing is forbidden, and the numbers of roles in the plan. There is a point for each half of a pair's
    bytes, at most about `MOST_POINTS`, and one for the chosen plan. A saving is the share of bytes at
    ``budget_length`` tokens.

    Heads have one order on the whole curve: the order that was found for the chosen plan. A curve with a role
    forbidden has an order of its own.

    Args:
        choice: of a plan by dynamic programming; a greedy plan has no curve.
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.
    """
    assert choice.plans is not None, "a greedy plan has no curve"
    frontier, chosen = choice.plans.curve, choice.units
    counted = counted_windows(explore, windows)
    pair = frontier.pair_units
    wanted = range(0, len(frontier.costs), max(pair // 2, len(frontier.costs) // MOST_POINTS))
    every = {frontier.cheapest(units) for units in wanted} | {chosen}
    points = []
    for units in steps(sorted(every), "curve"):
        plan = choice.plan_at(units)
        pairs = {name: pairs_without(name, plan, units / pair, explore, windows) for name in choice.without}
        point = {
            "units": units,
            "saving": plan.saving(explore.budget_tokens, **counted),
            "cost": choice.plans.at(units)[1],
            "cost_without": {name: other.cost_of(pairs[name], 1) for name, other in choice.without.items()},
            "leads": plan.num_leads,
            "followers": plan.num_followers,
            "windows": plan.num_windows,
            "packed_layers": [layer for layer, bits in enumerate(plan.bits or ()) if bits < 16],
        }
        points.append(point)
    about = {name: getattr(explore, name) for name in ("budget_length", "cost", "retrieval_weight")}
    about |= {"schema": SCHEMA_VERSION, "num_layers": choice.plan.num_layers, **windows}
    saving = choice.plan.saving(explore.budget_tokens, **counted)
    return {**about, "chosen": {"units": chosen, "saving": saving}, "points": points}


def about_plan(plan: SharingPlan, explore: ExploreArgs) -> str:
    """One line about how the plan was made, for which model, and on which text."""
    found, length = plan.provenance, explore.budget_length
    how = f"greedy at threshold {explore.threshold:g}"
    if explore.algorithm == "dp":
        where = f"at {length:,} tokens" if length else "on very long texts"
        what = "whole layers, " if explore.granularity == "layer" else ""
        what = "whole layers for vLLM, " if explore.target == "vllm" else what
        what += "constant sinks, " if plan.sinks == "constant" else ""
        how = f"dp by {explore.cost}, {what}target {explore.target_saving:.1%} {where}"
    name = found["model"].rstrip("/").split("/")[-1].removeprefix("package:")
    text = f"{found['num_sequences']} x {found['sequence_length']:,} tokens, {found['num_queries']} queries"
    return f"{name}, {text}; {how}"


def summary(plan: SharingPlan, explore: ExploreArgs, windows: dict[str, int]) -> str:
    """Lines about a plan: its roles, saving and cost, the costs with a role forbidden, and its losses."""
    found, n = plan.provenance, plan.provenance["sequence_length"]
    sinks, recent = windows.values()
    lines = [
        f"plan: {about_plan(plan, explore)}",
        describe_plan(plan),
        f"KV saving at {n:,} tokens with {_windows(plan, sinks, recent)}: "
        f"{plan.saving(n, sinks, recent):.1%}",
    ]
    if "units" in found:
        there = plan.saving(explore.budget_tokens, **counted_windows(explore, windows))
        where = f"at {explore.budget_length:,} tokens" if explore.budget_length else "on very long texts"
        target = [f"target: save {explore.target_saving:.1%} {where}; the plan saves {there:.1%}"]
        if explore.target == "vllm":
            target += _rounded(plan, explore, there)
        lines[2:2] = target
    if "layers" in found:
        covered = f"{len(found['layers'])} of {found['num_layers']} layers"
        planned = f"the plan covers {covered}, and savings count only these"
        lines.insert(2, f"{planned}; the others keep the windows that they were trained with")
    if plan.head_order is not None:
        moved = sum(row != tuple(range(len(row))) for row in plan.head_order)
        layers = f"{moved} of {plan.num_layers} layers"
        lines.append(f"heads change their order in {layers}; the output of the model stays the same")
    if "plan_cost" in found:
        unit = " nats per token" if found.get("cost") == "nats" else ""
        when = " before windows were exchanged" if len(found.get("rounds", ())) > 1 else ""
        costs = [f"cost of the plan{when}: {found['plan_cost']:.4g}{unit}"]
        for name, what in FORBIDDEN.items():
            cost = found.get(f"plan_cost_without_{name}", math.nan)
            if cost is None or not math.isnan(cost):
                costs.append(f"{'not reachable' if cost is None else f'{cost:.4g}'} {what}")
        lines.append("; ".join(costs))
    if found.get("rounds"):
        lines.append(_rounds(found["rounds"]))
    losses = found.get("losses", {})
    for kind, dense in losses.get("dense", {}).items():
        own = losses["plan"][kind]
        what = "text" if kind == "text" else "numbers that stand far back"
        change = f"perplexity x {math.exp(own - dense):.3f}"
        lines.append(f"measured loss on {what}: dense {dense:.4f}, plan {own:.4f} nats per token ({change})")
    if explore.target == "vllm":
        lines.append(describe_engine(plan, explore.engine_batch_tokens))
    return "\n".join(lines)


def _rounds(rounds: Sequence[dict[str, float | None]]) -> str:
    """What was measured of the windows of the plan, and of the first plan, in one line."""

    def figures(one: dict[str, float | None], of_text: str = "", of_answers: str = "") -> str:
        told = [(one["text"], of_text), (one["retrieval"], of_answers)]
        return ", ".join(f"{value:.4g}{what}" for value, what in told if value is not None)

    moved = figures(rounds[-1], " nats per token of text", " of answers")
    line = f"measured with the windows of the plan: predictions change by {moved}"
    if len(rounds) == 1:
        return f"{line}; no exchange of windows for leads lowered this"
    return f"{line} ({figures(rounds[0])} before windows were exchanged for leads)"


def _windows(plan: SharingPlan, num_sink_tokens: int, num_recent_tokens: int) -> str:
    """What a head that keeps its window sees, in words."""
    first = {
        "constant": "a constant sink (numbers that stand for the first tokens)",
        "none": "no sink",
    }.get(plan.sinks or "", f"{num_sink_tokens} sink")
    return f"{first} and {num_recent_tokens} recent tokens"


def _rounded(plan: SharingPlan, explore: ExploreArgs, saved: float) -> list[str]:
    """A note when a plan for vLLM has more window layers than the target needs, since fewer waste memory.

    Args:
        saved: share of bytes that the plan saves.

    Returns:
        A list of one line, or an empty list.
    """
    chosen = EngineCache.of_plan(plan, 1).num_windows
    enough = math.ceil(chosen * (explore.least_saving - 1e-6) / saved) if saved else chosen
    if enough >= chosen:
        return []
    lower = max(count for count in window_counts(plan.num_layers) if count < enough)
    return [
        f"note: {enough} layers with windows are enough for {explore.target_saving:.1%}, but vLLM would "
        f"waste memory with them; of {plan.num_layers} layers {lower} and {chosen} waste next to none, and "
        f"{chosen} are taken"
    ]


def describe_plan(plan: SharingPlan) -> str:
    """Two lines about a plan: its KV saving on long sequences, and how many pairs have each role."""
    text = (
        f"KV saving (long sequences): {plan.asymptotic_saving:.1%}\n"
        f"roles of {plan.num_pairs} (layer, KV head) pairs: "
        f"{plan.num_leads} lead, {plan.num_followers} follow, {plan.num_windows} keep their window"
    )
    bits = plan.bits or ()
    return f"{text}; {bits.count(4)} of {len(bits)} layers in 4 bits" if 4 in bits else text


def describe_heads(heads: RetrievalHeads) -> str:
    """Two lines about retrieval heads: how many were chosen, and how much smaller they make the cache.

    The saving is that of a long text, of which each other head holds a fifth.
    """
    chosen = sum(map(len, heads.query_heads))
    queries = sum(map(len, heads.echo))
    kept = sum(map(len, heads.key_value_heads))
    pairs = len(heads.echo) * heads.num_key_value_heads
    share = kept / pairs
    smaller = 1 / (share + (1 - share) / 5)
    return (
        f"retrieval heads: {chosen} of {queries} query heads ({chosen / queries:.1%}; "
        f"induction {heads.induction_share:g}, echo {heads.echo_share:g}) "
        f"protect {kept} of {pairs} KV heads ({share:.1%})\n"
        f"KV cache of a long prompt: {smaller:.2f}x smaller with 1/5 of it in the other heads"
    )


BLOCK_COLOURS = matplotlib.color_sequences["Set2"][:7]  # the eighth is grey
SINGLE_COLOUR = "#d5d5d5"
ROLES = {
    "leads": ("lead", "#1f3b73"),
    "followers": ("follow", "#e08214"),
    "windows": ("keep their window", "#b8d7ef"),
}
FORBIDDEN_COLOURS = ("#b8d7ef", "#e08214", "#7a9a3a")


class Map(NamedTuple):
    """A picture of values over layers, a row per layer.

    Attributes:
        title: above the map.
        values: ``[L, columns]``, from 0 to 1; NaN = no value, shown in grey.
        dots: (layer, column) of each dot.
    """

    title: str
    values: Any
    dots: Sequence[tuple[int, int]] = ()


def map_picture(maps: Sequence[Map], title: str, meaning: str, xlabel: str, columns: int = 0) -> Figure:
    """Draw maps over layers with one scale of colours from 0 to 1.

    Args:
        title: of the whole picture.
        meaning: what the colours show.
        xlabel: what the columns of the maps are.
        columns: maps in a row; 0 = all maps.
    """
    columns = columns or len(maps)
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(2.9 * columns + 1.4, 2.9 * rows + 1.0), layout="constrained")
    grid: NDArray[Any] = figure.subplots(rows, columns, squeeze=False)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#eeeeee")
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, one in zip(grid.flat, maps, strict=False):
        values = np.ma.masked_invalid(np.array(one.values, dtype=np.float64))
        axes.imshow(values, vmin=0, vmax=1, origin="lower", cmap=colours, aspect="auto")
        dots = np.array(one.dots).reshape(-1, 2)
        axes.plot(dots[:, 1], dots[:, 0], linestyle="", marker="o", color="crimson", markersize=3)
        axes.set_title(one.title, fontsize=9)
        axes.tick_params(labelsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
    colourbar = figure.colorbar(grid.flat[0].images[0], ax=list(grid.flat), shrink=0.8, pad=0.02, aspect=30)
    colourbar.set_label(meaning)
    figure.supxlabel(xlabel, fontsize=11)
    figure.supylabel("layer", fontsize=11)
    figure.suptitle(title.replace("; ", "\n"), fontsize=11)
    return figure


def similarity_picture(similarity: ArrayLike, num_key_value_heads: int, subject: str) -> Figure:
    """Draw a map of the similarity of all pairs of layers for each query head (the paper's Figure 1d).

    Args:
        similarity: ``[L, L, Hq]``.
        subject: one line for the title.
    """
    check_groups("similarity", check_array("similarity", similarity, "L L Hq")["Hq"], num_key_value_heads)
    heads = np.moveaxis(np.asarray(similarity, dtype=np.float64), 2, 0)
    group = len(heads) // num_key_value_heads
    maps = [Map(f"query head {head} (KV head {head // group})", one) for head, one in enumerate(heads)]
    in_row = math.ceil(math.sqrt(len(maps)) / group)  # KV heads, for a picture about as wide as high
    title = f"Attention similarity between layers\n{subject}"
    meaning = "similarity (1 − JSD₂): 1 = identical, 0 = disjoint"
    return map_picture(maps, title, meaning, "layer", columns=min(group * in_row, len(maps)))


def head_score_picture(heads: RetrievalHeads, subject: str) -> Figure:
    """Draw induction and echo scores, layer × query head (RazorAttention §3.3).

    Dots mark heads that were chosen for either score; their KV heads keep all tokens.
    """
    dots = [(layer, head) for layer, chosen in enumerate(heads.query_heads) for head in chosen]
    maps = [
        Map("what followed (induction)", heads.induction, dots),
        Map("earlier copies (echo)", heads.echo, dots),
    ]
    title = f"Retrieval heads: they look far back; dots mark the chosen ones\n{subject}"
    return map_picture(maps, title, "mean attention, 0 to 1", "query head")


def pareto_picture(curve: dict[str, Any], subject: str) -> Figure:
    """Draw the least cost by saving, and the roles along the curve.

    Above: the least cost, also with a role or packing forbidden. Below: how many pairs have each role, and
    how many stand in packed layers.

    Args:
        curve: from `pareto`.
    """
    points = curve["points"]
    saving = np.array([100 * point["saving"] for point in points])
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_curves(above, curve, saving)
    shares = [[point[role] for point in points] for role in ROLES]
    meanings, colours = zip(*ROLES.values(), strict=True)
    below.stackplot(saving, *shares, colors=colours, labels=meanings)
    if any(point["packed_layers"] for point in points):
        pairs = sum(points[0][role] for role in ROLES)
        packed = [pairs * len(point["packed_layers"]) / curve["num_layers"] for point in points]
        below.plot(saving, packed, color="black", linestyle="--", label="are in layers with 4 bits")
    below.set_ylabel("(layer, KV head)\npairs that …")
    below.legend(loc="lower left", fontsize=9)
    for axes in (above, below):
        axes.axvline(100 * curve["chosen"]["saving"], color="crimson", linewidth=1.2)
    length = curve["budget_length"]
    where = f"at {length:,} tokens" if length else "of long sequences"
    below.set_xlabel(f"share of KV bytes saved {where} (%)", fontsize=11)
    figure.suptitle(f"Lowest cost of each saving, and the roles that reach it\n{subject}", fontsize=12)
    return figure


def _draw_curves(axes: Axes, curve: dict[str, Any], saving: NDArray[np.float64]) -> None:
    points = curve["points"]
    axes.set_yscale("log", nonpositive="mask")
    axes.plot(saving, [x["cost"] for x in points], color="black", linewidth=2.2, label="allowed")
    for name, colour in zip(points[0]["cost_without"], FORBIDDEN_COLOURS, strict=False):
        costs = np.array([x["cost_without"][name] for x in points], dtype=np.float64)  # None becomes NaN
        axes.plot(saving, costs, color=colour, linestyle="--", label=f"without {name.replace('_', ' ')}")
    at = [point["units"] for point in points].index(curve["chosen"]["units"])
    axes.plot(saving[at], points[at]["cost"], "o", color="crimson", linestyle="", label="the plan")
    nats = curve["cost"] == "nats"
    axes.set_ylabel("cost, nats per token" if nats else f"cost `{curve['cost']}`, summed over pairs")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)


def block_picture(plan: SharingPlan, subject: str) -> Figure:
    """Draw the paper's Figure 5: a column per KV head, a colour per block, with leads marked.

    Leads that nobody follows are grey, and windows are white.
    """
    heads, layers = plan.num_key_value_heads, plan.num_layers
    cell = 0.28 if layers <= 40 else 0.2  # inches
    figure = Figure(figsize=(max(6.5, 0.62 * heads + 1.6), cell * layers + 2.0), layout="constrained")
    axes = figure.add_subplot()
    colours = np.ones((layers, heads, 3))
    for head in range(heads):
        block_colours = cycle(BLOCK_COLOURS)
        for block in plan.blocks(head):
            colours[block, head] = next(block_colours) if len(block) > 1 else to_rgb(SINGLE_COLOUR)
            if len(block) > 1:
                axes.plot(head, block[0], marker="o", color="black", markersize=4)
    axes.imshow(colours, origin="lower", aspect="auto")
    axes.set(xlabel="KV head", ylabel="layer", xticks=range(heads))
    ticks = range(0, layers, 1 if layers <= 40 else 5)
    names = plan.provenance.get("layers") or range(layers)
    axes.set_yticks(ticks, [str(names[tick]) for tick in ticks])
    for edge in np.arange(heads - 1) + 0.5:
        axes.axvline(edge, color="black", linewidth=0.8)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(
        f"How each KV head treats distant tokens\n{subject.replace('; ', chr(10))}\n"
        f"KV saving {plan.asymptotic_saving:.1%}: {plan.num_leads} lead, {plan.num_followers} follow, "
        f"{plan.num_windows} keep their window",
        fontsize=11,
    )
    seen = {"constant": "a constant sink and recent tokens", "none": "recent tokens"}.get(
        plan.sinks or "", "sinks and recent tokens"
    )
    handles: list[Any] = [
        Line2D([], [], linestyle="", marker="o", color="black", label="lead of a block"),
        Patch(facecolor=BLOCK_COLOURS[0], label="a block (colours only separate neighbours)"),
        Patch(facecolor=SINGLE_COLOUR, label="leads alone"),
        Patch(facecolor="white", edgecolor="black", label=f"keeps only its window: {seen}"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def save_picture(figure: Figure, path: Path) -> Path:
    """Write a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(path, buffer.getvalue())
    return path
