"""From a recipe's settings to measurements: on which text, with which model, and when an earlier file serves again."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pod.data import DataArgs, long_sequences
from pod.data.job import OF_READING, OF_SPLIT
from pod.files import sha256_file
from pod.modeling.loading import load_model, load_tokenizer
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import resolve_model
from pod.training.plans.bits import PackedCosts
from pod.training.plans.costs import cost_shapes
from pod.training.plans.explore_args import ExploreArgs
from pod.training.plans.solve import Curve, Floats, Frontier, solve

MATCHING_SEQUENCES = 2
"""Sequences of text, beside all repeated ones, on which query heads are matched."""
DATA_SETTINGS = (*OF_READING, "boundary_tokens", *(name for name in OF_SPLIT if name != "sources"))
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin"}


def windows_of(recipe: Any) -> dict[str, int]:
    """The windows that the plan is for."""
    return {name: getattr(recipe.model, name) for name in ("num_sink_tokens", "num_recent_tokens")}


@dataclass(frozen=True)
class Exploration:
    """What a plan is made of and from.

    Attributes:
        folder: shared by all ranks; receives the measurements and the log of losses.
        settings: everything that a similarity depends on, as JSON.
        model_folder: folder or hub id of the dense model.
        windows: ``num_sink_tokens`` and ``num_recent_tokens`` that the plan is for.
        prepared: folder of prepared data, or None; of the same sources, its held-out text saves reading them all again.
    """

    folder: Path
    settings: dict[str, Any]
    model_folder: str
    windows: dict[str, int]
    explore: ExploreArgs
    data: DataArgs
    prepared: Path | None = None

    @classmethod
    def of(cls, recipe: Any) -> "Exploration":
        """As a `Recipe` says."""
        model, explore, data = recipe.model, recipe.explore, recipe.data
        positions = {name: getattr(model, name) for name in ("rope", "max_position_embeddings")}
        settings = {name: value for name, value in positions.items() if value}
        settings |= {
            "model": model.path,
            "gguf_file": model.gguf_file,
            "dtype": model.dtype,
            "sources": list(explore.sources or data.sources),
            "split": "all" if explore.sources else "held_out",
            "data": {name: getattr(data, name) for name in DATA_SETTINGS},
            "num_sequences": explore.num_sequences,
            "sequence_length": explore.sequence_length,
            "num_queries": explore.num_queries,
            "seed": recipe.seed,
        }
        folder = resolve_model(model.path)
        return cls(recipe.plan_dir, settings, folder, windows_of(recipe), explore, data, recipe.data_dir)

    def load_model(self, plan: SharingPlan | None = None) -> PodForCausalLM:
        """The model on this rank's device, dense unless there is a plan, with the windows; refuses what `check_model` refuses."""
        model = load_model(
            self.model_folder,
            plan=plan,
            gguf_file=self.settings["gguf_file"],
            dtype=getattr(torch, self.settings["dtype"]),
            device=_device(),
            rope=self.settings.get("rope"),
            max_position_embeddings=self.settings.get("max_position_embeddings"),
            num_sink_tokens=self.windows["num_sink_tokens"],
            num_recent_tokens=self.windows["num_recent_tokens"],
        )
        check_model(model.config, self.explore, self.windows)
        return model

    def read(self, say: Callable[[str], None]) -> tuple[Sequence[Tensor], str]:
        """The sequences ``[n]`` of the settings, see `read_sequences`."""
        gguf_file, seed = self.settings["gguf_file"], self.settings["seed"]
        return read_sequences(self.explore, self.data, self.model_folder, gguf_file, seed, say, self.prepared)


def read_sequences(
    explore: ExploreArgs,
    data: DataArgs,
    model_folder: str,
    gguf_file: str | None,
    seed: int,
    say: Callable[[str], None] = print,
    prepared: Path | None = None,
) -> tuple[Sequence[Tensor], str]:
    """N token sequences ``[n]`` of the settings: from explore.sources, else from what data.sources holds out of training.

    `prepared` is the folder of prepared data: of the same sources, its held-out text saves reading them all again.

    Also returns which part of the sources they come from: all, held_out or train.
    Sources too small to hold enough out give training text instead, and a line says so: a plan only describes the model.
    """
    tokenizer = load_tokenizer(model_folder, gguf_file=gguf_file)
    # The model reads its own tokens, whatever data.tokenizer says; weights belong to data.sources.
    sources = {"sources": explore.sources, "weights": []} if explore.sources else {}
    take = partial(
        long_sequences,
        replace(data, tokenizer=None, **sources),
        tokenizer,
        explore.num_sequences,
        explore.sequence_length,
        seed=seed,
        prepared=prepared,
    )
    split = "all" if explore.sources else "held_out"
    try:
        tokens = take(split=split)
    except ValueError as error:
        if explore.sources:
            raise
        split = "train"
        tokens = take(split=split)
        say(f"explore: measured on training text, held-out text does not suffice ({error})")
    return list(torch.from_numpy(tokens)), split


def check_model(config: Any, explore: ExploreArgs, windows: dict[str, int]) -> None:
    """Refuse, before hours of measuring, a length the model cannot read and a saving its layers cannot reach."""
    if explore.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"explore.sequence_length is {explore.sequence_length}, the model reads {config.max_position_embeddings} "
            "tokens: lower it, or extend the model first"
        )
    if explore.algorithm == "dp":
        shapes = cost_shapes(config.num_hidden_layers, config.num_key_value_heads)
        free = {name: np.zeros(shape) for name, shape in shapes.items()}
        if 4 in explore.bits:
            target_units(packed_costs(explore, free, windows).solve(None), explore, windows)
        else:
            target_units(frontier_of(explore, free["in_place"], free["window"]), explore, windows)


def frontier_of(explore: ExploreArgs, follow: Any, window: Any) -> Frontier:
    """The frontier of the roles that the settings allow; costs as `solve` takes them."""
    return solve(follow if "follow" in explore.roles else None, window if "window" in explore.roles else None)


def packed_costs(explore: ExploreArgs, total: dict[str, Floats], windows: dict[str, int]) -> PackedCosts:
    """The costs of the roles that the settings allow where layers may be packed."""
    return PackedCosts(
        follow=total["in_place"] if "follow" in explore.roles else None,
        window=total["window"] if "window" in explore.roles else None,
        lead4=total["lead4"],
        follow4=total["follow4"],
        n=explore.budget_tokens,
        near=sum(windows.values()),
    )


def target_units(frontier: Curve, explore: ExploreArgs, windows: dict[str, int]) -> int:
    """The number of units that is nearest to `target_saving` at `budget_length` tokens.

    Raises: ValueError for a saving out of reach.
    """
    try:
        return frontier.units_for(explore.target_saving, explore.budget_tokens, **windows)
    except ValueError as error:
        raise ValueError(f"explore.{error}") from None


def weights_stamp(model_folder: str) -> str:
    """Tells that weight files were replaced, without reading them: the index's hash and each file's name, size and time.

    Empty for a hub id.
    """
    folder = Path(model_folder)
    if not folder.is_dir():
        return ""
    parts = []
    for file in sorted(folder.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES:
            state = file.stat()
            parts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
        elif file.name == "config.json":
            parts.append(sha256_file(file))
    return "; ".join(parts)


def reusable(path: Path, kind: Any, wanted: dict[str, Any], say: Callable[[str], None]) -> Any:
    """What lies at `path` as a `kind` (Similarity, PlanCosts, RetrievalHeads) when it was measured with these settings, else None."""
    if not path.exists():
        return None
    found = kind.load(path)
    changed = sorted(key for key, value in wanted.items() if found.provenance.get(key) != value)
    if not changed:
        say(f"explore: {path} is of these settings, nothing is measured again")
        return found
    say(f"explore: {path} differs in {', '.join(changed)}: measuring again, the old file is kept")
    return None


def keep_old(path: Path) -> None:
    """Move a file of other settings out of the way, under a name with its hash."""
    if path.exists():
        os.replace(path, path.with_name(f"{path.stem}-{sha256_file(path)[:8]}{path.suffix}"))


@contextmanager
def process_group(timeout: timedelta = timedelta(hours=6)) -> Iterator[int]:
    """Join the ranks of a launcher (torchrun, deepspeed) when WORLD_SIZE > 1; yields this process's rank.

    Only sums of a few megabytes travel, so gloo serves on every machine. The timeout is long because ranks wait for the slowest.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    dist.init_process_group("gloo", timeout=timeout)
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def describe_cost(config: Any, explore: ExploreArgs) -> str:
    """What measuring needs, from the model's sizes: tokens to read, memory beside the weights, disk."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    n, q = explore.sequence_length, explore.num_queries
    rows = 4 * layers * heads * q * n  # bytes, fp32
    held = f"{rows / 1e6:.0f} MB of attention rows ({layers} layers x {heads} heads x {q} x {n} fp32)"
    texts = f"{explore.num_sequences} x {n} = {explore.num_sequences * n} tokens"
    if explore.cost == "similarity":
        lines = [
            f"similarity: one forward pass over {texts}, divided among the ranks",
            f"memory per rank: the model, {held}, {24 * layers * q * n / 1e6:.0f} MB to compare them",
            f"disk: {24 * layers * layers * heads / 1e6:.1f} MB for the similarity and its partial sums, three pictures",
        ]
    else:
        repeated = explore.retrieval_sequences
        pairs = 24 * layers * layers * heads * heads
        lines = [
            f"costs of roles: one forward pass over {texts} and {repeated} x {n} repeated ones, a second one over "
            f"{repeated} + {min(explore.num_sequences, MATCHING_SEQUENCES)} sequences to match query heads, divided among the ranks",
            f"memory per rank: the model, {held}",
            f"disk: {pairs / 1e6:.1f} MB for the costs and their partial sums, three pictures",
        ]
    count = min(explore.loss_sequences, explore.num_sequences)
    if explore.cost != "similarity" and count:
        lines.append(f"loss of the dense model and of the plan: two forward passes over {count} x {n} tokens")
    return "\n".join(lines)
