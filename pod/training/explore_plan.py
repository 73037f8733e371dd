"""From a recipe's settings and a similarity to the plan: which cost decides, and refinement by the model's loss."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.data import DataArgs
from pod.modeling.loading import load_tokenizer
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.explore import (
    advance,
    from_first_rank,
    keep_old,
    load_dense,
    quiet,
    read_sequences,
    weights_stamp,
)
from pod.training.explore_args import ExploreArgs
from pod.training.heads import fitting_tokens, ordinary_vocabulary, repeated_tokens
from pod.training.plan_costs import (
    MEASURED_COSTS,
    RETRIEVAL,
    PlanCosts,
    combined_cost,
    measure_pair_costs,
    sample_queries,
)
from pod.training.planning import dp_plan, greedy_plan, least_cost_plan
from pod.training.refine import LossLog, PlanLoss, refine_plan
from pod.training.similarity import Similarity, measure_mean, model_fingerprint, sequence_fingerprint

REPEATS = 4  # copies of the random tokens of a retrieval sequence
COSTS_NAME = "plan_costs.safetensors"
PARTIAL_NAME = "plan_costs.partial"
REFINE_NAME = "refine.jsonl"


@dataclass(frozen=True)
class Exploration:
    """What a plan is made of and from.

    Attributes:
        folder: shared by all ranks; receives the costs and the log of losses.
        settings: from `explore.settings_of`.
        model_folder: folder or hub id of the dense model.
        windows: ``num_sink_tokens`` and ``num_recent_tokens`` that the plan is for.
        prepared: folder of prepared data, or None.
    """

    folder: Path
    settings: dict[str, Any]
    model_folder: str
    windows: dict[str, int]
    explore: ExploreArgs
    data: DataArgs
    prepared: Path | None = None

    def read(self, say: Callable[[str], None]) -> tuple[list[Tensor], str]:
        """The sequences that similarity was measured on."""
        gguf_file, seed = self.settings["gguf_file"], self.settings["seed"]
        sequences, split = read_sequences(
            self.explore, self.data, self.model_folder, gguf_file, seed, say, self.prepared
        )
        return list(sequences), split

    def repeated(self, config: Any) -> list[Tensor]:
        """Sequences of random ordinary tokens, each repeated REPEATS times."""
        if not self.explore.retrieval_sequences:
            return []
        tokenizer = load_tokenizer(self.model_folder, gguf_file=self.settings["gguf_file"])
        vocab, special = ordinary_vocabulary(tokenizer, config)
        length = self.explore.sequence_length // REPEATS
        num_tokens = fitting_tokens(config, length, REPEATS, vocab - len(special))
        seeds = range(self.settings["seed"], self.settings["seed"] + self.explore.retrieval_sequences)
        return [repeated_tokens(num_tokens, REPEATS, vocab, special, seed) for seed in seeds]


def check_windows(explore: ExploreArgs, windows: dict[str, int]) -> None:
    """Refuse, before anything is measured, sequences that the windows cover whole.

    Raises: ValueError when a cost, or refinement, would find no distant token.
    """
    needs = "similarity" if explore.cost == "similarity" else explore.cost
    if needs == "similarity" and not explore.refine_evaluations:
        return
    queries = 1 if needs == "similarity" else explore.num_queries
    sample_queries(explore.sequence_length, queries, **windows)


def find_plan(
    exploration: Exploration, similarity: Similarity, say: Callable[[str], None] = print
) -> SharingPlan:
    """The plan of the settings, the same on every rank. Costs and losses that were measured before serve again.

    Raises: ValueError for texts, models, windows and files that do not fit.
    """
    explore, heads = exploration.explore, similarity.num_key_value_heads
    say = say if not dist.is_initialized() or dist.get_rank() == 0 else quiet
    if explore.algorithm == "greedy":
        plan = greedy_plan(similarity.values, heads, explore.threshold, similarity.provenance)
    elif explore.cost == "similarity":
        plan = dp_plan(similarity.values, heads, explore.target_saving, similarity.provenance)
    costs = 1.0 - similarity.values.unflatten(-1, (heads, -1)).mean(-1)
    if explore.cost != "similarity":
        measured = find_costs(exploration, say)
        costs = combined_cost(measured.values, explore.cost)
        plan = least_cost_plan(costs, explore.target_saving, {"cost": explore.cost, **measured.provenance})
    if explore.refine_evaluations:
        plan = _refined(exploration, plan, costs, say)
    return plan


def find_costs(exploration: Exploration, say: Callable[[str], None] = print) -> PlanCosts:
    """The costs of these settings: read from the folder when they are there, else measured (by all ranks) and written.

    `loss` is measured only when asked for, the others always.
    """
    explore = exploration.explore
    path = exploration.folder / COSTS_NAME
    wanted = exploration.settings | exploration.windows
    wanted |= {"weights": weights_stamp(exploration.model_folder)}
    wanted |= {"retrieval_sequences": explore.retrieval_sequences}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = from_first_rank(_reusable(path, wanted, explore.cost, say) if is_first else None)
    if found is not None:
        return found
    names = MEASURED_COSTS if explore.cost == "loss" else MEASURED_COSTS[:-1]
    found = _measure(exploration, names, wanted, say)
    if is_first:
        keep_old(path)
        found.save(path)
        shutil.rmtree(exploration.folder / PARTIAL_NAME, ignore_errors=True)
    return found


def _reusable(path: Path, wanted: dict[str, Any], name: str, say: Callable[[str], None]) -> PlanCosts | None:
    if not path.exists():
        return None
    found = PlanCosts.load(path)
    changed = sorted(key for key, value in wanted.items() if found.provenance.get(key) != value)
    if not changed and name in found.values:
        say(f"plan costs: {path} is of these settings, nothing is measured again")
        return found
    what = f"differs in {', '.join(changed)}" if changed else f"has no cost {name!r}"
    say(f"plan costs: {path} {what}: measuring again, the old file is kept")
    return None


def _measure(
    exploration: Exploration, names: tuple[str, ...], wanted: dict[str, Any], say: Callable[[str], None]
) -> PlanCosts:
    explore = exploration.explore
    model = load_dense(exploration.model_folder, exploration.settings, **exploration.windows)
    sequences, split = exploration.read(say)
    fingerprint = wanted | {
        "costs": list(names),
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }

    def measure(input_ids: Tensor) -> Tensor:
        return measure_pair_costs(model, input_ids.to(model.device), explore.num_queries, names)

    values: dict[str, Tensor] = {}
    for ending, kind in (("", sequences), (RETRIEVAL, exploration.repeated(model.config))):
        if not kind:
            continue
        with tqdm(total=len(kind), desc=f"plan costs{ending}", unit="seq", disable=say is quiet) as bar:
            means = measure_mean(
                measure,
                kind,
                fingerprint=fingerprint,
                partial_dir=exploration.folder / PARTIAL_NAME / f"text{ending}",
                save_every=explore.save_every,
                progress=partial(advance, bar),
            )
        values |= {name + ending: mean for name, mean in zip(names, means, strict=True)}
    return PlanCosts(values=values, provenance=fingerprint | {"split_used": split})


def _refined(
    exploration: Exploration, plan: SharingPlan, costs: Tensor, say: Callable[[str], None]
) -> SharingPlan:
    explore = exploration.explore
    model = load_dense(exploration.model_folder, exploration.settings, **exploration.windows)
    sequences, _ = exploration.read(say)
    sequences = [*sequences[: explore.refine_sequences], *exploration.repeated(model.config)]
    fingerprint = {
        **exploration.windows,
        "dtype": exploration.settings["dtype"],
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }
    log = LossLog(exploration.folder / REFINE_NAME, fingerprint)
    loss = PlanLoss(model, sequences)
    found = refine_plan(
        plan, costs, loss, explore.refine_evaluations, explore.refine_proposals, log=log, say=say
    )
    return replace(found, provenance=found.provenance | {"refine_sequences": len(sequences)})
