"""What plans are made from, measured by all ranks or read from the folder where it lies: similarity, and costs of roles."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.modeling.loading import load_tokenizer
from pod.modeling.recording import record_attention_rows
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
from pod.training.plans.similarity import (
    SIMILARITY_NAME,
    Similarity,
    from_first_rank,
    measure_mean,
    measure_similarity,
    model_fingerprint,
    sequence_fingerprint,
)

REPEATS = 4  # copies of the random tokens of a retrieval sequence
Say = Callable[[str], None]


def find_similarity(exploration: Exploration, say: Say = print) -> Similarity:
    """The similarity of these settings, see `_find`."""
    return _find(exploration, SIMILARITY_NAME, Similarity, exploration.settings, _measure_similarity, say)


def find_costs(exploration: Exploration, say: Say = print) -> PlanCosts:
    """The costs of these settings, see `_find`."""
    wanted = exploration.settings | exploration.windows
    wanted |= {"retrieval_sequences": exploration.explore.retrieval_sequences}
    return _find(exploration, COSTS_NAME, PlanCosts, wanted, _measure_costs, say)


def _find(
    exploration: Exploration, name: str, kind: Any, wanted: dict[str, Any], measure: Any, say: Say
) -> Any:
    """Read from the folder when it is there, else measured (by all ranks) and written.

    A file of other settings is kept under another name. An interrupted measurement is continued.

    Raises: ValueError for texts, models and partial files that do not fit.
    """
    path = exploration.folder / name
    partial_dir = path.with_suffix(".partial")
    wanted = wanted | {"weights": weights_stamp(exploration.model_folder)}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = from_first_rank(reusable(path, kind, wanted, say) if is_first else None)
    if found is None:
        found = measure(exploration, wanted, partial_dir, say)
        if is_first:
            keep_old(path)
            found.save(path)
            shutil.rmtree(partial_dir, ignore_errors=True)
    return found


def _measure_similarity(
    exploration: Exploration, wanted: dict[str, Any], partial_dir: Path, say: Say
) -> Similarity:
    explore = exploration.explore
    model = exploration.load_model()
    sequences, split = exploration.read(say)
    fingerprint = exploration.settings | {
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }

    def rows(input_ids: Tensor) -> Iterator[Tensor]:
        return record_attention_rows(model, input_ids.to(model.device), explore.num_queries)

    with tqdm(total=len(sequences), desc="similarity", unit="seq", disable=say is quiet) as bar:
        values = measure_similarity(
            rows,
            sequences,
            fingerprint=fingerprint,
            partial_dir=partial_dir,
            save_every=explore.save_every,
            progress=partial(advance, bar),
        )
    return Similarity(
        values=values,
        num_key_value_heads=model.config.num_key_value_heads,
        provenance=wanted | fingerprint | {"split_used": split},
    )


def quiet(line: str) -> None:
    """Ranks other than 0 say nothing."""


def advance(bar: tqdm, done: int, total: int) -> None:
    bar.update(done - bar.n)


def _measure_costs(
    exploration: Exploration, wanted: dict[str, Any], partial_dir: Path, say: Say
) -> PlanCosts:
    """Query heads matched on a few sequences, then the cost of every role on all of them."""
    explore = exploration.explore
    model = exploration.load_model()
    sequences, split = exploration.read(say)
    repeated = repeated_sequences(exploration, model.config)
    fingerprint = wanted | {
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }

    def mean(name: str, measure: Callable[..., Tensor], kind: list[Tensor]) -> Tensor:
        with tqdm(total=len(kind), desc=f"plan costs, {name}", unit="seq", disable=say is quiet) as bar:
            return measure_mean(
                lambda input_ids: measure(model, input_ids.to(model.device), explore.num_queries),
                kind,
                fingerprint=fingerprint,
                partial_dir=partial_dir / name,
                save_every=explore.save_every,
                progress=partial(advance, bar),
            )

    heads = model.config.num_key_value_heads
    few = [*sequences[:MATCHING_SEQUENCES], *repeated]
    order = match_query_heads(mean("query heads", measure_query_head_errors, few), heads)
    shapes = cost_shapes(model.config.num_hidden_layers, heads)

    def flat(model: Any, input_ids: Tensor, num_queries: int) -> Tensor:
        found = measure_costs(model, input_ids, num_queries, order)
        return torch.cat([found[name].flatten() for name in shapes])

    values: dict[str, Tensor] = {}
    for name, ending, kind in (("text", "", list(sequences)), ("repeated", RETRIEVAL, repeated)):
        if kind:
            parts = mean(name, flat, kind).split([int(np.prod(shape)) for shape in shapes.values()])
            values |= {
                key + ending: part.view(shape)
                for (key, shape), part in zip(shapes.items(), parts, strict=True)
            }
    return PlanCosts(values=values, order=order, provenance=fingerprint | {"split_used": split})


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
