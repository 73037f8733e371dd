"""What plans are made from, measured by all ranks or read from the folder where it lies: similarity, and costs of roles."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.modeling.loading import load_tokenizer
from pod.modeling.shipped.llama import PodForCausalLM
from pod.training.plans.costs import (
    COSTS_NAME,
    RETRIEVAL,
    PlanCosts,
    cost_shapes,
    match_query_heads,
    measure_costs,
    measure_query_head_errors,
)
from pod.training.plans.exploration import MATCHING_SEQUENCES, Exploration, keep_old, reusable, weights_stamp
from pod.training.plans.heads import fitting_tokens, ordinary_vocabulary, repeated_tokens
from pod.training.plans.recording import record_attention_rows
from pod.training.plans.similarity import (
    SIMILARITY_NAME,
    Similarity,
    from_first_rank,
    jensen_shannon_similarity,
    measure_mean,
    model_fingerprint,
    sequence_fingerprint,
)

REPEATS = 4  # copies of the random tokens of a retrieval sequence
Say = Callable[[str], None]


def find_similarity(exploration: Exploration, say: Say = print) -> Similarity:
    """The similarity of these settings, see `_find`."""
    return _find(exploration, SIMILARITY_NAME, Similarity, _measure_similarity, {}, say)


def find_costs(exploration: Exploration, say: Say = print) -> PlanCosts:
    """The costs of these settings, see `_find`."""
    wanted = exploration.windows | {"retrieval_sequences": exploration.explore.retrieval_sequences}
    return _find(exploration, COSTS_NAME, PlanCosts, _measure_costs, wanted, say)


def _find(
    exploration: Exploration, name: str, kind: Any, measure: Any, wanted: dict[str, Any], say: Say
) -> Any:
    """A `kind`, read from the folder when it is there, else measured (by all ranks) and written.

    A file of other settings is kept under another name. An interrupted measurement is continued.

    Args:
        measure: (exploration, model, sequences, mean) → the fields of `kind`; mean: (name, measure of one sequence, sequences).
        wanted: what it depends on beside the settings.
    Raises: ValueError for texts, models and partial files that do not fit.
    """
    path, explore = exploration.folder / name, exploration.explore
    wanted = exploration.settings | wanted | {"weights": weights_stamp(exploration.model_folder)}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = from_first_rank(reusable(path, kind, wanted, say) if is_first else None)
    if found is not None:
        return found
    model = exploration.load_model()
    sequences, split = exploration.read(say)
    fingerprint = wanted | {
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }

    def mean(part: str, measure_one: Callable[[Tensor], Tensor], texts: Sequence[Tensor]) -> Tensor:
        with tqdm(total=len(texts), desc=f"explore, {part}", unit="seq", disable=say is quiet) as bar:
            return measure_mean(
                lambda input_ids: measure_one(input_ids.to(model.device)),
                texts,
                fingerprint=fingerprint,
                partial_dir=path.with_suffix(".partial") / part,
                save_every=explore.save_every,
                progress=lambda done, total: bar.update(done - bar.n),
            )

    fields = measure(exploration, model, sequences, mean)
    found = kind(**fields, provenance=fingerprint | {"split_used": split})
    if is_first:
        keep_old(path)
        found.save(path)
        shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)
    return found


def quiet(line: str) -> None:
    """Ranks other than 0 say nothing."""


def _measure_similarity(
    exploration: Exploration, model: PodForCausalLM, sequences: Sequence[Tensor], mean: Any
) -> dict[str, Any]:
    def measure(input_ids: Tensor) -> Tensor:
        rows = record_attention_rows(model, input_ids, exploration.explore.num_queries)
        return jensen_shannon_similarity(torch.stack(list(rows)))

    heads = model.config.num_key_value_heads
    return {"values": mean("similarity", measure, sequences), "num_key_value_heads": heads}


def _measure_costs(
    exploration: Exploration, model: PodForCausalLM, sequences: Sequence[Tensor], mean: Any
) -> dict[str, Any]:
    """Query heads matched on a few sequences, then the cost of every role on all of them."""
    queries, heads = exploration.explore.num_queries, model.config.num_key_value_heads
    repeated = repeated_sequences(exploration, model.config)
    few = [*sequences[:MATCHING_SEQUENCES], *repeated]
    errors = mean("query heads", lambda ids: measure_query_head_errors(model, ids, queries), few)
    order = match_query_heads(errors, heads)
    shapes = cost_shapes(model.config.num_hidden_layers, heads)

    def flat(input_ids: Tensor) -> Tensor:
        found = measure_costs(model, input_ids, queries, order)
        return torch.cat([found[name].flatten() for name in shapes])

    values: dict[str, Tensor] = {}
    for name, ending, kind in (("text", "", list(sequences)), ("repeated", RETRIEVAL, repeated)):
        if kind:
            parts = mean(name, flat, kind).split([int(np.prod(shape)) for shape in shapes.values()])
            values |= {
                key + ending: part.view(shape)
                for (key, shape), part in zip(shapes.items(), parts, strict=True)
            }
    return {"values": values, "order": order}


def repeated_sequences(exploration: Exploration, config: Any) -> list[Tensor]:
    """Sequences of random ordinary tokens, each repeated REPEATS times."""
    explore, settings = exploration.explore, exploration.settings
    if not explore.retrieval_sequences:
        return []
    tokenizer = load_tokenizer(exploration.model_folder, gguf_file=settings["gguf_file"])
    vocab, special = ordinary_vocabulary(tokenizer, config)
    length = explore.sequence_length // REPEATS
    num_tokens = fitting_tokens(config, length, REPEATS, vocab - len(special))
    seeds = range(settings["seed"], settings["seed"] + explore.retrieval_sequences)
    return [repeated_tokens(num_tokens, REPEATS, vocab, special, seed) for seed in seeds]
