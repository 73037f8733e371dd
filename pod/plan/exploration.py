"""From a recipe's settings to what is measured: on which text, with which model, for which saving."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pod.data import held_out_documents, long_sequences, source_documents
from pod.data.rows.manifest import MANIFEST_NAME, read_manifest
from pod.modeling.loading import load_model
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.packed_bytes import GROUP_SIZE, RESIDUAL, bits_per_number, check_bits, window_size
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.placement import ROOM, free_bytes, free_unused, share_of_rank
from pod.models import resolve_model
from pod.plan.args import ExploreArgs
from pod.plan.costs import cost_shapes
from pod.plan.divergence import DenseStates
from pod.plan.engines import BATCHES_IN_FLIGHT, window_counts
from pod.plan.gradients import held_activations
from pod.plan.recording import planned_layers, sample_queries
from pod.plan.solve import PACKED, Curve, Floats, PackedCosts, PackedFrontier, solve
from pod.tokenizer import load_tokenizer
from pod.training.run.longer_context import extend
from pod.training.run.mesh import planned_world_size
from pod.training.run.start_model import model_config

REPEATED_SEQUENCES = 2  # most sequences of repeated tokens
CALIBRATION_SEQUENCES = 8  # most sequences of text on which constant sinks are calibrated
ROUND_SEQUENCES = 8  # most sequences of text on which windows are measured under the plan
LOSS_PROMPTS = 4  # prompts on which the loss of a plan is measured
MATCHING_SEQUENCES = 1  # of text, and as many repeated ones, on which query heads are matched
C = TypeVar("C", bound=Curve)
POSITIONS = ("rope", "max_position_embeddings")
"""Fields of section `model` that change which positions the model can read."""


def windows_of(recipe: Any, sinks: str) -> dict[str, int]:
    """The tokens that a window holds in the plan: `num_sink_tokens` and `num_recent_tokens`.

    These are the windows of the recipe. Where it names none, they hold 4,096 tokens: 16 and 4080 if first
    tokens are stored, else 0 and 4096.

    Args:
        sinks: what `sinks_of` says of the recipe.
    """
    return replace(recipe.model, layout="auto", plan=None, sinks=sinks).windows()


def sinks_of(recipe: Any) -> str:
    """What stands for the first tokens in windows: ``tokens``, ``constant`` or ``none``.

    It is what the recipe says, in `sinks` or by a number of first tokens. If it says nothing, it is
    ``constant``. Two cases take ``tokens`` then: plans without windows, and models that norm keys, whose
    constants have no keys (see ``pod.modeling.model.sinks``).

    Raises:
        ValueError: stored first tokens with target=vllm.
    """
    model, explore = recipe.model, recipe.explore
    if explore.target == "vllm":
        for name, value in (("num_sink_tokens", model.num_sink_tokens), ("sinks", model.sinks)):
            if value and value not in ("constant", "none"):
                raise ValueError(
                    f"model.{name} is {value} with explore.target=vllm, but vLLM's windows store no first "
                    "tokens: leave it out, or set explore.target=pod"
                )
        return model.sinks or "constant"
    if model.sinks is not None:
        return model.sinks
    if model.num_sink_tokens is not None:
        return "tokens" if model.num_sink_tokens else "none"
    if "window" not in explore.roles or dense_config(recipe).qk_norm:
        return "tokens"
    return "constant"


def dense_config(recipe: Any) -> PodConfig:
    """The configuration of the recipe's model without a plan. ``ValueError`` if there is no such model."""
    dense = replace(recipe.model, layout="dense", plan=None, sinks=None)
    config, _ = model_config(dense, recipe.output_dir)
    return config


@dataclass(frozen=True)
class Exploration:
    """Model, text and settings from which a plan is made.

    Attributes:
        folder: receives the measurements; all ranks see it.
        settings: everything that a measured similarity depends on, for JSON; costs depend on more.
        model_folder: folder or hub id of the dense model.
        windows: the plan's `num_sink_tokens` and `num_recent_tokens`, in tokens.
        explore: section `explore` of the recipe.
        prepared: folder of prepared data; its held-out text is measured where explore.sources names no other
            text.
        sinks: what stands for the first tokens in windows, see `sinks_of`.
        dense: final hidden states of the model, where costs or rounds have read it.
    """

    folder: Path
    settings: dict[str, Any]
    model_folder: str
    windows: dict[str, int]
    explore: ExploreArgs
    prepared: Path
    sinks: str = "tokens"
    dense: DenseStates = field(init=False, default_factory=DenseStates, compare=False, repr=False)

    @classmethod
    def of(cls, recipe: Any) -> "Exploration":
        """The exploration that a `Recipe` describes."""
        model, explore = recipe.model, recipe.explore
        is_prepared = (recipe.data_dir / MANIFEST_NAME).is_file()
        data = read_manifest(recipe.data_dir)["id"] if is_prepared else None
        positions = {name: getattr(model, name) for name in POSITIONS}
        settings = {name: value for name, value in positions.items() if value}
        settings |= {
            "num_sequences": explore.num_sequences,
            "sequence_length": explore.sequence_length,
            "num_queries": explore.num_queries,
            "model": model.path,
            "gguf_file": model.gguf_file,
            "dtype": model.dtype,
            "text": list(explore.sources) or data,
            "seed": recipe.seed,
        }
        folder = resolve_model(model.path)
        sinks = sinks_of(recipe)
        windows = windows_of(recipe, sinks)
        return cls(recipe.plan_dir, settings, folder, windows, explore, recipe.data_dir, sinks)

    def load_model(self, plan: SharingPlan | None = None) -> PodForCausalLM:
        """Load the model on this rank's device, with the windows of the exploration.

        Args:
            plan: the plan under which it is loaded; None = dense.

        Raises:
            ValueError: for what `check_model` refuses.
        """
        model = self.load(plan=plan, **self.windows)
        extend(model.config, *(self.settings.get(name) for name in POSITIONS))
        check_model(model.config, self.explore, self.windows)
        return model

    def load(self, **changes: Any) -> PodForCausalLM:
        """Load the model on this rank's device, or on as many of the rank's devices as it needs.

        Args:
            changes: arguments of `load_model`; without any, the model is loaded as it is.
        """
        if torch.cuda.is_available():  # an earlier model's memory counts as taken until it is given back
            free_unused(torch.device("cuda"))
        dtype = getattr(torch, self.settings["dtype"])
        gguf_file = self.settings["gguf_file"]
        return load_model(
            self.model_folder, gguf_file=gguf_file, dtype=dtype, **placement_arguments(), **changes
        )

    def load_tokenizer(self) -> Any:
        """Load the model's own tokenizer, whatever data.tokenizer says: the model reads its own tokens."""
        return load_tokenizer(self.model_folder, gguf_file=self.settings["gguf_file"])

    def read(self) -> list[Tensor]:
        """Read the token sequences to measure on, from explore.sources or else from the held-out text.

        There are explore.num_sequences of them, each ``[n]`` with n = explore.sequence_length. The held-out
        text is that of the prepared data.

        Raises:
            ValueError: there is neither source, or it has too little text.
        """
        explore, tokenizer = self.explore, self.load_tokenizer()
        if explore.sources:
            documents = source_documents(explore.sources, tokenizer)
        else:
            documents = held_out_documents(self.prepared, tokenizer)
        sizes = explore.num_sequences, explore.sequence_length
        try:
            found = long_sequences(documents, *sizes, self.settings["seed"])
        except ValueError as error:
            where = "explore.sources" if explore.sources else f"the held-out text in {self.prepared}"
            raise ValueError(f"{where}: {error}") from None
        return list(torch.from_numpy(found))


def placement_arguments() -> dict[str, Any]:
    """Where `load_model` puts the model: on this rank's device, or on its share of the GPUs.

    A rank has several GPUs where there are more GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return {"device": "cpu"}
    count = torch.cuda.device_count()
    own = [torch.device("cuda", number) for number in share_of_rank(count)]
    if len(own) == 1:
        return {"device": str(own[0])}
    if len(own) == count:
        return {"device_map": "auto"}
    return {"device_map": "auto", "max_memory": {device: free_bytes(device) * (1 - ROOM) for device in own}}


def check_model(config: Any, explore: ExploreArgs, windows: dict[str, int]) -> None:
    """Refuse what cannot give a plan, before hours of measuring.

    Raises:
        ValueError: a length that the model cannot read, sequences that the windows cover whole, a saving that
            the model's layers cannot reach, a model that has no layer to plan, bits that do not fit its
            head_dim, or target=vllm for a model with layers that were trained with windows.
    """
    shapes = cost_shapes(len(planned_layers(config)), config.num_key_value_heads)
    if 4 in explore.bits:
        check_bits(4, config.head_dim, f"explore.bits is {explore.bits}")
    if explore.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"explore.sequence_length is {explore.sequence_length}, but the model reads "
            f"{config.max_position_embeddings} tokens: lower it, or extend the model first"
        )
    if explore.cost == "nats":
        sample_queries(explore.sequence_length, explore.num_queries, **windows)
    if explore.target == "vllm" and config.layer_windows is not None:
        raise ValueError(
            "explore.target is vllm, but some layers of this model were trained with windows, which vLLM "
            "frees without a plan: set explore.target=pod"
        )
    if explore.algorithm == "dp":
        free = at_granularity(explore, {name: np.zeros(shape) for name, shape in shapes.items()})
        if 4 in explore.bits:
            packed = packed_costs(explore, free, windows, config.head_dim)
            every = packed.solve([True] * len(packed.lead4))
            most = replace(every.plan(len(every.costs) - 1), bits=(4,) * len(packed.lead4))
            if saves_enough(most, explore, windows, config.head_dim):
                return
            frontier = packed.solve(None)
        else:
            frontier = solve(*allowed(explore, free))
        units_of_target(for_target(frontier, explore), explore, windows)


def units_of_target(frontier: Curve, explore: ExploreArgs, windows: dict[str, int]) -> int:
    """The least number of units that saves explore.target_saving where the plan will run, or more.

    Args:
        frontier: the plans that are allowed there, see `for_target`.
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.

    Raises:
        ValueError: the allowed roles do not reach this saving.
    """
    counted = counted_windows(explore, windows)
    if explore.target == "vllm":
        savings = frontier.savings_at(explore.budget_tokens, **counted)
        if savings[-1] < explore.least_saving - 1e-6:
            raise ValueError(
                f"explore.target_saving is {explore.target_saving}, but at {explore.budget_tokens} tokens "
                f"windows in all layers save {savings[-1]:.3f}: vLLM holds {sum(counted.values())} tokens of "
                "each, those of two batches included. Choose a smaller saving, a larger "
                "explore.budget_length, a smaller explore.engine_batch_tokens, or a smaller "
                "model.num_recent_tokens"
            )
    return frontier.units_for(explore.least_saving, explore.budget_tokens, **counted)


def fewest_units(
    frontier: PackedFrontier, explore: ExploreArgs, windows: dict[str, int], head_dim: int | None
) -> int:
    """The least number of units whose plan saves explore.target_saving, with packed windows counted.

    Units count windows as 16-bit numbers, so the plan of `units_of_target` may save more than was asked for.

    Raises:
        ValueError: the allowed roles do not reach this saving.
    """

    def is_enough(units: int) -> bool:
        return saves_enough(frontier.plan(frontier.cheapest(units)), explore, windows, head_dim)

    most = len(frontier.costs) - 1
    if not is_enough(most):
        most = units_of_target(frontier, explore, windows)
    return bisect_left(range(most), True, key=is_enough)


def saves_enough(
    plan: SharingPlan, explore: ExploreArgs, windows: dict[str, int], head_dim: int | None
) -> bool:
    """Whether a plan saves explore.target_saving where it will run.

    Args:
        plan: its roles and bits; the residual is that of the settings.
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.
        head_dim: of the model.
    """
    plan = replace(plan, residual=residual_of(explore, windows), head_dim=head_dim)
    saving = plan.saving(explore.budget_tokens, **counted_windows(explore, windows))
    return saving >= explore.least_saving - 1e-6


def pairs_saved(plan: SharingPlan, explore: ExploreArgs, windows: dict[str, int]) -> float:
    """How many pairs' distant bytes a plan saves where it will run, with packed windows counted."""
    counted = counted_windows(explore, windows)
    distant = 1 - min(1.0, sum(counted.values()) / explore.budget_tokens)
    return plan.saving(explore.budget_tokens, **counted) / distant * plan.num_pairs if distant else 0.0


def residual_of(explore: ExploreArgs, windows: dict[str, int]) -> int:
    """How many of the newest tokens stay in 16 bits in packed layers of a plan, see `explore.residual`.

    Examples: 32 with windows of 85 to 240 recent tokens, 64 with 256, and 128 with 4,080. Windows of 65 to 84
    tokens would get larger, so their residual is so large that they stay native: 40 with 72. A plan that may
    not pack has the usual number.
    """
    if 4 not in explore.bits:
        return RESIDUAL
    if explore.residual is not None:
        return explore.residual
    recent = windows["num_recent_tokens"]
    quarter = max(GROUP_SIZE, min(RESIDUAL, recent // 4 // GROUP_SIZE * GROUP_SIZE))
    key_bits, _ = bits_per_number(PACKED)
    if window_size(recent, 0, quarter, key_bits) < recent:
        return quarter
    return max(GROUP_SIZE, recent - GROUP_SIZE)


def counted_windows(explore: ExploreArgs, windows: dict[str, int]) -> dict[str, int]:
    """The tokens that a window holds where `target_saving` is measured, as first and recent ones.

    With target=vllm a window also holds the tokens in flight, because vLLM gives every request the room that
    reading its prompt takes. Example: windows of 256 tokens count 4,352 with batches of 2,048.

    Args:
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.
    """
    if explore.target != "vllm":
        return windows
    in_flight = BATCHES_IN_FLIGHT * explore.engine_batch_tokens
    return windows | {"num_recent_tokens": windows["num_recent_tokens"] + in_flight}


def at_granularity(explore: ExploreArgs, total: dict[str, Floats]) -> dict[str, Floats]:
    """Costs at explore.granularity: per KV head, or summed over the KV heads of each layer.

    Args:
        explore: section `explore` of the recipe.
        total: costs by name, in the shapes of `cost_shapes`.

    Returns:
        For granularity `head` the costs as they are. For `layer` their sums over the KV heads, with H = 1.
        The cost ``follow`` is left out there: a whole layer follows a whole layer, and each of its heads the
        head of the same index, whose cost is ``in_place``.
    """
    if explore.granularity == "head":
        return total
    found = {name: cost.sum(axis=-1, keepdims=True) for name, cost in total.items() if name != "follow"}
    if "windows" in found:
        found["windows"] = found["windows"].sum(axis=1, keepdims=True)
    return found


def allowed(
    explore: ExploreArgs, total: dict[str, Floats], follow: str = "in_place"
) -> tuple[Floats | None, Floats | None]:
    """The costs of followers and of windows, as `solve` takes them; None for a role that is not allowed.

    Args:
        explore: says which roles are allowed.
        total: costs by name.
        follow: the name of the costs of followers, ``in_place`` or ``follow``.
    """
    roles = explore.roles or []
    followers = total[follow] if "follow" in roles else None
    windows = window_alone(total["windows"]) if "window" in roles else None
    return followers, windows


def window_alone(windows: Floats) -> Floats:
    """The cost ``[L, H]`` of a window in one head alone, from ``windows`` ``[L, H, L, H]``."""
    return np.einsum("ijij->ij", windows)


def for_target(frontier: C, explore: ExploreArgs) -> C:
    """The curve with only those plans that waste next to no memory where they will run.

    For target=pod no plan wastes memory, and the result is `frontier` itself. With 30 layers vLLM wastes
    nothing for 10, 15 or 20 layers with windows (see `window_counts`), and something for 12.
    """
    if explore.target == "pod":
        return frontier
    costs = np.full_like(frontier.costs, np.inf)
    units = [count * frontier.pair_units for count in window_counts(frontier.sizes[0])]
    costs[units] = frontier.costs[units]
    return replace(frontier, costs=costs)


def packed_costs(
    explore: ExploreArgs, total: dict[str, Floats], windows: dict[str, int], head_dim: int | None
) -> PackedCosts:
    """The costs of the roles that the settings allow, where layers may be packed.

    Args:
        total: costs by name.
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.
        head_dim: of the model.
    """
    follow, window = allowed(explore, total)
    near, residual = sum(windows.values()), residual_of(explore, windows)
    key_bits, _ = bits_per_number(PACKED, head_dim)
    return PackedCosts(
        follow=follow,
        window=window,
        lead4=total["lead4"],
        follow4=total.get("follow4"),
        n=explore.budget_tokens,
        near=near,
        head_dim=head_dim,
        residual=residual,
        packs_windows=window_size(near, windows["num_sink_tokens"], residual, key_bits) < near,
    )


@contextmanager
def process_group() -> Iterator[int]:
    """Join the ranks of a launcher (torchrun, deepspeed) when WORLD_SIZE > 1, and yield this process's rank.

    Only sums of a few megabytes travel, so gloo is enough on every machine. The timeout is long because ranks
    wait for the slowest one.
    """
    if planned_world_size() == 1:
        yield 0
        return
    dist.init_process_group("gloo", timeout=timedelta(hours=6))
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def describe_cost(config: Any, explore: ExploreArgs, sinks: str = "tokens", itemsize: int = 2) -> str:
    """Text for `--dry-run`: how many tokens `pod explore` reads, and its memory beside the weights.

    Args:
        config: of the model.
        sinks: see `sinks_of`.
        itemsize: bytes of a number of the model.
    """
    if explore.heads:
        num_tokens = min(explore.head_tokens, config.max_position_embeddings // explore.head_repeats)
        n = explore.head_repeats * num_tokens
        return f"retrieval heads: one forward pass over {explore.head_repeats} x {num_tokens} = {n} tokens"
    layers, heads = len(planned_layers(config)), config.num_attention_heads
    n, q, count = explore.sequence_length, explore.num_queries, explore.num_sequences
    streams = 0
    passes = "one forward pass" if explore.cost == "similarity" else "one forward and one backward pass"
    what = f"{explore.cost}: {passes} over {count} x {n} = {count * n} tokens"
    if explore.cost == "nats":
        losses = min(count, explore.loss_sequences)
        has_windows = "window" in (explore.roles or [])
        if explore.retrieval_sequences and has_windows:
            what += f" and {explore.retrieval_sequences} prompts with such texts (read twice)"
        repeated = min(REPEATED_SEQUENCES, explore.retrieval_sequences)
        follows = "follow" in (explore.roles or [])
        if follows or 4 in explore.bits:
            what += f", {repeated} x {n} repeated tokens"
        if follows:
            matching = min(repeated, MATCHING_SEQUENCES) + min(count, MATCHING_SEQUENCES)
            streams = matching * (config.num_hidden_layers + 1)  # which are held until they are needed again
            what += f" ({matching} of these sequences also match heads)"
        if explore.rounds and has_windows:
            read = f"{min(count, ROUND_SEQUENCES)} sequences and {explore.retrieval_sequences} prompts"
            rounds = "a round" if explore.rounds == 1 else f"{explore.rounds} rounds"
            has_starts = explore.retrieval_sequences and explore.retrieval_weight
            starts = "up to three forward passes, then " if has_starts else ""
            what += f", {starts}{rounds} of one backward and two or more forward passes over {read}"
        answers = f" and {LOSS_PROMPTS} prompts" if explore.retrieval_sequences else ""
        what += f", one forward pass over {losses} sequences{answers} with and without the plan for the loss"
        if sinks == "constant":
            what += f", one over {min(count, CALIBRATION_SEQUENCES)} for windows with constant sinks"
    if explore.roles == ["window"]:
        layers = 1  # rows are kept for layers above that may follow
    size = 4e-6 * layers * heads * q * n
    rows = f"{size:.0f} MB of attention rows ({layers} layers x {heads} heads x {q} x {n} fp32)"
    memory = f"memory per rank: the model, {rows}"
    if explore.cost == "nats":
        activations = held_activations(config, n, itemsize) + streams * n * config.hidden_size * itemsize
        memory += f", {activations / 1e6:,.0f} MB of activations"
    return f"{what}, divided among the ranks\n{memory}"
