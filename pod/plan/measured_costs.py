"""Measure what plans are made from: similarity, costs of roles, retrieval heads.

All ranks measure together and write a file into the exploration's folder. A later run reads it again.

Every sequence contributes integers: what was measured, in units of 2^-40. So the sum does not depend on the
order. One process, several ranks, and a run that was interrupted and continued with another number of ranks
all give the same bits.

Heads that look far back are found without text (RazorAttention §3.3). A head that has learnt to retrieve
finds the earlier copies of the current token (*echo*), or what followed them (*induction*), even among
repeated random tokens. No matrix of n x n is ever held.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from pod.files import atomic_write_bytes, keep_old
from pod.identity import content_of
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.plan.calibration import find_sinks
from pod.plan.checks import check_array, check_groups
from pod.plan.costs import (
    FOLLOWER_COSTS,
    RETRIEVAL,
    TextWithGradients,
    cost_shapes,
    match_query_heads,
    measure_costs,
    measure_query_head_errors,
    measure_retrieval,
)
from pod.plan.exploration import (
    CALIBRATION_SEQUENCES,
    LOSS_PROMPTS,
    MATCHING_SEQUENCES,
    REPEATED_SEQUENCES,
    ROUND_SEQUENCES,
    Exploration,
)
from pod.plan.layer_constants import LayerConstants, stacked
from pod.plan.needles import Prompt, needle_prompts
from pod.plan.recording import planned_layers, record_attention_inputs, record_attention_rows
from pod.plan.similarity import jensen_shannon_similarity
from pod.training.checkpoint.run_identity import sha256_of
from pod.training.run.mesh import from_rank_0
from pod.verbosity import is_quiet

COSTS_NAME, HEADS_NAME = "plan_costs.safetensors", "retrieval_heads.json"
SCHEMA_VERSION = "2"  # of files of measurements; other versions are refused
REPEATS = 4  # copies of the random tokens of a repeated sequence
UNIT = 2.0**-40  # of the integer sums; int64 holds sums below 2^23
S = TypeVar("S")
Say = Callable[[str], None]
"""A function that receives a line for the user, such as `print`."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured tensors, and a record of what they were measured on.

    Attributes:
        tensors: means over sequences, fp64, by name. A similarity is ``similarity`` ``[L, L, Hq]``. Costs
            are those of `cost_shapes`, once measured on text and once, with RETRIEVAL behind their names, on
            prompts (windows) or repeated tokens (the others). Where heads may follow, ``order``
            ``[L, L, H, H, G]`` is there too, see `match_query_heads`. With constant sinks there are also
            ``sink_logits`` ``[L, Hq]``, ``sink_values`` ``[L, H, d]``, and ``sink_keys`` ``[L, H, d]`` where
            sinks have keys.
        provenance: model, number of its KV heads, sources, windows, tokens n of a sequence, queries q, number
            N of sequences, seed and fingerprints. Where some layers were trained with windows, also
            ``layers``, the L layers that are measured, and ``num_layers``, the number of all layers.
    """

    tensors: dict[str, Tensor]
    provenance: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with the provenance as metadata, atomically."""
        metadata = {"schema": SCHEMA_VERSION, "provenance": json.dumps(self.provenance, sort_keys=True)}
        tensors = {name: value.contiguous() for name, value in self.tensors.items()}
        atomic_write_bytes(path, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MeasuredCosts":
        """Read what `save` wrote.

        Raises:
            ValueError: the file cannot be read, or it is no measurement of this schema. The message is one
                line that names the file.
        """
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("schema") != SCHEMA_VERSION:
                    raise KeyError(f"schema is {metadata.get('schema')}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(tensors, json.loads(metadata["provenance"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is no measurement of schema {SCHEMA_VERSION} ({error}): delete it and measure again"
            ) from None


def find_similarity(exploration: Exploration, say: Say = print) -> MeasuredCosts:
    """Measure the attention similarity of all pairs of layers, or read it where it was measured before.

    All ranks call it together.

    Args:
        say: receives a line about a file that is used again, or why it is not.

    Raises:
        ValueError: texts, models or files do not fit.
    """
    return _find(exploration, "similarity.safetensors", _measure_similarity, {}, say)


def find_costs(exploration: Exploration, say: Say = print) -> MeasuredCosts:
    """Measure the costs of all roles, or read them where they were measured before.

    Arguments and errors are those of `find_similarity`.
    """
    explore = exploration.explore
    wanted: dict[str, Any] = {"retrieval_sequences": explore.retrieval_sequences, "unit": "nats per token"}
    wanted |= exploration.windows
    if not exploration.windows["num_sink_tokens"]:  # a measurement with stored first tokens names no sinks
        wanted["sinks"] = exploration.sinks
        if exploration.sinks == "constant":
            # costs that were measured before constants had keys are measured again
            wanted["sinks"] = "constant (with keys, unless the model norms keys)"
    needed: list[str] = [*FOLLOWER_COSTS] if _may_follow(exploration) else []
    if explore.retrieval_sequences and _may_have_windows(exploration):
        needed.append("windows" + RETRIEVAL)
        wanted["prompts"] = "as long as the texts"  # costs of shorter prompts are measured again
    if explore.retrieval_sequences and 4 in explore.bits:
        needed.append("lead4" + RETRIEVAL)
    return _find(exploration, COSTS_NAME, _measure_costs, wanted, say, needed)


def _may_follow(exploration: Exploration) -> bool:
    """Whether the settings allow heads to follow, so that costs of followers are needed."""
    return "follow" in (exploration.explore.roles or [])


def _may_have_windows(exploration: Exploration) -> bool:
    """Whether the settings allow windows, so that their costs of retrieval are needed."""
    return "window" in (exploration.explore.roles or [])


def find_heads(exploration: Exploration) -> RetrievalHeads:
    """Find the retrieval heads that the settings ask for, and write them into the folder.

    Their scores are read from the folder when they were measured before. Else rank 0 measures them, without
    text. When only explore.induction_share or explore.echo_share changes, heads are chosen anew from the same
    scores.
    """
    explore, path = exploration.explore, exploration.folder / HEADS_NAME
    wanted = {name: exploration.settings[name] for name in ("model", "gguf_file", "dtype", "seed")}
    wanted |= {name: getattr(explore, name) for name in ("head_tokens", "head_repeats")}
    wanted["weights"] = content_of(exploration.model_folder)

    def find() -> RetrievalHeads:
        found = reusable(path, RetrievalHeads.load, wanted, print)
        if found is None:
            found = _search(exploration, wanted)
            keep_old(path)
        found = replace(found, induction_share=explore.induction_share, echo_share=explore.echo_share)
        found.save(path)
        return found

    return from_rank_0(find)


def _search(exploration: Exploration, wanted: dict[str, Any]) -> RetrievalHeads:
    """Measure the scores of all query heads; `wanted` is what they depend on.

    Raises:
        ValueError: some layers of the model were trained with windows.
    """
    model = exploration.load()
    asked = wanted["head_tokens"]
    repeats = wanted["head_repeats"]
    if model.config.layer_windows is not None:
        raise ValueError(
            "some layers of this model were trained with windows: razor cannot run it and needs "
            "no retrieval heads"
        )
    ids = ordinary_tokens(exploration.load_tokenizer(), model.config, asked, repeats, wanted["seed"])
    num_tokens = len(ids) // repeats
    if num_tokens < asked:
        print(
            f"retrieval heads: {num_tokens} distinct tokens instead of {asked}, because the model's context "
            "is too short"
        )
    echo, induction = search_heads(model, ids, num_tokens)
    return RetrievalHeads(
        echo=echo,
        induction=induction,
        num_key_value_heads=model.config.num_key_value_heads,
        provenance=wanted | {"num_tokens": num_tokens, "head_order": model.config.head_order},
    )


def _find(
    exploration: Exploration,
    name: str,
    measure: Any,
    wanted: dict[str, Any],
    say: Say,
    needed: Sequence[str] = (),
) -> MeasuredCosts:
    """Read a measurement from the folder when it is there. Else measure it, by all ranks, and write it.

    An interrupted measurement is continued. A file of other settings is kept under another name.

    Args:
        name: of the file.
        measure: a function (exploration, model, sequences, mean) → tensors by name. Its argument ``mean`` is
            a function (name, measure of one sequence, shape, sequences) → tensor, see `measure_mean`.
        wanted: what the measurement depends on beside the exploration's settings.
        say: receives a line about a file that is used again, or why it is not.
        needed: names of tensors that a file must have to be used again.

    Raises:
        ValueError: texts, models or files do not fit.
    """
    path = exploration.folder / name
    wanted = exploration.settings | wanted | {"weights": content_of(exploration.model_folder)}
    found = from_rank_0(lambda: reusable(path, MeasuredCosts.load, wanted, say, needed))
    if found is not None:
        return found
    model = exploration.load_model()
    sequences = exploration.read()
    provenance = wanted | {
        "num_key_value_heads": model.config.num_key_value_heads,
        "head_dim": model.config.head_dim,
        "tokens_sha256": hashlib.sha256(torch.stack(sequences).numpy().tobytes()).hexdigest(),
    }
    if model.config.layer_windows is not None:
        provenance |= {"layers": planned_layers(model.config), "num_layers": model.config.num_hidden_layers}
    partial = path.with_suffix(f".partial-{sha256_of([provenance, *needed])[:8]}")

    def mean(part: str, measure_one: Any, shape: Sequence[int], texts: Sequence[Any]) -> Tensor:
        return measure_mean(measure_one, shape, texts, partial / part)

    found = MeasuredCosts(measure(exploration, model, sequences, mean), provenance)
    if not dist.is_initialized() or dist.get_rank() == 0:
        keep_old(path)
        found.save(path)
        shutil.rmtree(partial, ignore_errors=True)
    return found


def measure_mean(
    measure: Callable[[S], Tensor], shape: Sequence[int], sequences: Sequence[S], folder: Path
) -> Tensor:
    """The mean of what `measure` gives for each sequence, in fp64.

    The ranks divide the sequences. The bits are the same for any number of ranks and of interruptions.

    Args:
        measure: a function sequence → ``[*shape]``. The sum of its values over all sequences must stay below
            2^23.
        shape: of what `measure` gives.
        sequences: N tensors ``[n]`` of token ids, or prompts; the same list on every rank.
        folder: receives a file per sequence, so that an interrupted measurement can be continued. It is for
            these sequences alone, and all ranks see it. Its name says what is measured. The caller deletes
            it.

    Raises:
        ValueError: there are no sequences, or a file in the folder is damaged.
    """
    if not sequences:
        raise ValueError("no sequence to measure: give longer or more texts in explore.sources")
    files = [folder / f"{index:06d}.safetensors" for index in range(len(sequences))]
    done = from_rank_0(lambda: [index for index, file in enumerate(files) if file.exists()])
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = torch.zeros(tuple(shape), dtype=torch.int64)
    if rank == 0:
        for index in done:
            total += MeasuredCosts.load(files[index]).tensors["units"]
    remaining = sorted({*range(len(sequences))} - {*done})
    with tqdm(
        total=len(files), desc=f"explore, {folder.name}", unit="seq", disable=rank > 0 or is_quiet()
    ) as bar:
        for count, index in enumerate(remaining[rank::world], start=1):
            units = (measure(sequences[index]) / UNIT).round().to(torch.int64)
            MeasuredCosts({"units": units}, {}).save(files[index])
            total += units
            bar.update(min(len(done) + count * world, len(files)) - bar.n)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.double() * UNIT / len(sequences)


def _measure_similarity(
    exploration: Exploration, model: PodForCausalLM, sequences: Sequence[Tensor], mean: Any
) -> dict[str, Tensor]:
    """Measure the attention similarity of all pairs of layers on all sequences."""

    def measure(ids: Tensor) -> Tensor:
        input_ids = ids[None].to(model.device)
        rows = record_attention_rows(model, input_ids, exploration.explore.num_queries)
        return jensen_shannon_similarity(torch.stack(list(rows)))

    layers, heads = len(planned_layers(model.config)), model.config.num_attention_heads
    return {"similarity": mean("similarity", measure, (layers, layers, heads), sequences)}


def _measure_costs(
    exploration: Exploration, model: PodForCausalLM, sequences: Sequence[Tensor], mean: Any
) -> dict[str, Tensor]:
    """Measure the cost of every role on all sequences.

    Where heads may follow, query heads are first matched on a few sequences.
    """
    queries, config = exploration.explore.num_queries, model.config
    layers, heads = len(planned_layers(config)), config.num_attention_heads
    prompts = needle_prompts_of(exploration, config, sequences)
    repeated = []
    if _may_follow(exploration) or 4 in exploration.explore.bits:
        repeated = repeated_sequences(exploration, config)
    followers = _may_follow(exploration)
    shapes = cost_shapes(layers, config.num_key_value_heads, followers)
    tensors: dict[str, Tensor] = {}
    order, sinks = None, None
    if exploration.sinks == "constant":
        some = sequences[:CALIBRATION_SEQUENCES]
        sinks = from_rank_0(lambda: find_sinks(model, some, queries))
        tensors |= stacked(sinks)
    reader = _CostReader(exploration, model, sinks, sequences)
    if followers:
        few = [*sequences[:MATCHING_SEQUENCES], *repeated[:MATCHING_SEQUENCES]]
        shape = layers, layers, heads, heads

        def errors_of(ids: Tensor) -> Tensor:
            return measure_query_head_errors(model, reader.read(ids, is_last=False))

        errors = mean("query heads", errors_of, shape, few)
        order = tensors["order"] = match_query_heads(errors, config.num_key_value_heads)
    sizes = [math.prod(shape) for shape in shapes.values()]

    def flat(ids: Tensor) -> Tensor:
        found = measure_costs(model, reader.read(ids), order)
        return torch.cat([found[name].flatten() for name in shapes])

    for name, ending, texts in (("text", "", sequences), ("repeated", RETRIEVAL, repeated)):
        if not texts:
            continue
        parts = mean(name, flat, (sum(sizes),), texts).split(sizes)
        for (role, shape), part in zip(shapes.items(), parts, strict=True):
            if role != "windows" or not ending:
                tensors[role + ending] = part.view(shape)
    if prompts:
        pairs = layers, config.num_key_value_heads
        alone = mean("retrieval", reader.measure_retrieval, pairs, prompts)
        tensors["windows" + RETRIEVAL] = alone.flatten().diag().view(shapes["windows"])
    return tensors


class _CostReader:
    """Reads texts and prompts for their costs, and keeps what will be needed once more.

    Attributes:
        again: texts that were read and will be needed again, by their identity.
        for_rounds: texts whose final hidden states rounds need.
    """

    def __init__(
        self,
        exploration: Exploration,
        model: PodForCausalLM,
        sinks: Sequence[LayerConstants] | None,
        sequences: Sequence[Tensor],
    ):
        self.exploration, self.model, self.sinks = exploration, model, sinks
        self.again: dict[int, TextWithGradients] = {}
        self.for_rounds = sequences[:ROUND_SEQUENCES] if exploration.explore.rounds else []

    def read(self, ids: Tensor, is_last: bool = True) -> TextWithGradients:
        """Read a text, or take what was read of it; keep it unless this is the last time."""
        found = self.again.pop(id(ids), None)
        if found is None:
            queries = self.exploration.explore.num_queries
            found = TextWithGradients.of(self.model, ids[None].to(self.model.device), queries, self.sinks)
            if any(ids is text for text in self.for_rounds):
                self.exploration.dense.keep(ids, found.final_states(self.model))
        if not is_last:
            self.again[id(ids)] = found
        return found

    def measure_retrieval(self, prompt: Prompt) -> Tensor:
        """What windows cost on a prompt, ``[L, H]``."""
        dense = self.exploration.dense.of(self.model, prompt.input_ids, prompt.answers)
        return measure_retrieval(self.model, prompt, self.sinks, dense)


def needle_prompts_of(
    exploration: Exploration, config: Any, sequences: Sequence[Tensor], held_out: bool = False
) -> list[Prompt]:
    """The prompts on which retrieval is measured; none where the settings want none, or no windows.

    Args:
        sequences: text of the prompts.
        held_out: make `LOSS_PROMPTS` other ones, on which the loss of a plan is measured.
    """
    explore, seed = exploration.explore, exploration.settings["seed"]
    if not explore.retrieval_sequences or not _may_have_windows(exploration):
        return []
    return needle_prompts(
        exploration.load_tokenizer(),
        sequences[::-1] if held_out else sequences,
        count=LOSS_PROMPTS if held_out else explore.retrieval_sequences,
        windows=(exploration.windows["num_sink_tokens"], exploration.windows["num_recent_tokens"]),
        longest=config.max_position_embeddings,
        seed=seed + 1 if held_out else seed,
    )


def repeated_sequences(exploration: Exploration, config: Any) -> list[Tensor]:
    """At most `REPEATED_SEQUENCES` sequences of random ordinary tokens, each repeated `REPEATS` times.

    There are none where the settings want none.
    """
    explore, first = exploration.explore, exploration.settings["seed"]
    if not explore.retrieval_sequences:
        return []  # without loading the tokenizer
    tokenizer = exploration.load_tokenizer()
    num_tokens = explore.sequence_length // REPEATS
    seeds = range(first, first + min(REPEATED_SEQUENCES, explore.retrieval_sequences))
    return [ordinary_tokens(tokenizer, config, num_tokens, REPEATS, seed) for seed in seeds]


def reusable(
    path: Path,
    load: Callable[[Path], Any],
    wanted: dict[str, Any],
    say: Say,
    needed: Sequence[str] = (),
) -> Any:
    """What `load` reads at `path`, or None when the file is missing or does not fit.

    It fits when its provenance has the values `wanted` and it has the tensors `needed`.

    Args:
        say: receives a line that says whether the file is used again, or what differs.
    """
    if not path.exists():
        return None
    found = load(path)
    changed = sorted(key for key, value in wanted.items() if found.provenance.get(key) != value)
    missing = [name for name in needed if name not in found.tensors]
    if missing:
        changed.append(f"roles or bits (it has no {', '.join(missing)})")
    if not changed:
        say(f"explore: {path} fits the settings and is used again")
        return found
    again = "it is measured again, and the old file is kept"
    say(f"explore: {path} differs in {', '.join(changed)} from the recipe: {again}")
    return None


def repeated_tokens(
    num_tokens: int, repeats: int, vocab_size: int, excluded: Iterable[int] = (), seed: int = 0
) -> Tensor:
    """Token ids ``[repeats · K]``: K distinct random tokens outside ``excluded``, always in the same order.

    Args:
        num_tokens: K.
        repeats: how often the K tokens come.
        vocab_size: number of ids to choose from; they begin at 0.
        excluded: ids that are not used.
        seed: of the choice and order.

    Raises:
        ValueError: K is below 2, or fewer than K ids are left.
    """
    candidates = torch.tensor(sorted({*range(vocab_size)} - {*excluded}))
    if num_tokens < 2 or num_tokens > len(candidates):
        raise ValueError(f"num_tokens is {num_tokens}, it must be from 2 to {len(candidates)}")
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[:num_tokens]].repeat(repeats)


def head_scores(
    q: Tensor, k: Tensor, num_tokens: int, block_elements: int = 1 << 24
) -> tuple[Tensor, Tensor]:
    """Echo and induction scores ``[Hq]`` of one layer on ``repeated_tokens``, fp64 on the CPU.

    A is the causal attention, and K the number of distinct tokens. The echo score is the mean of
    ``Σ_r A[i, i - rK]`` over the queries i >= K, and the induction score the mean of
    ``Σ_r A[i, i - rK + 1]``. Both sums are over all earlier copies: ``r >= 1``, ``rK <= i``.

    Args:
        q: ``[Hq, n, d]``, rotated queries.
        k: ``[H, n, d]``, rotated keys.
        num_tokens: K.
        block_elements: logits that are held at a time. Beside them, memory is O(n).

    Raises:
        ValueError: q or k has another shape, or K is not from 1 to n - 1.
    """
    sizes = check_array("q", q, "Hq n d")
    check_groups("q", sizes["Hq"], check_array("k", k, "H n d", sizes)["H"])
    heads, n, _ = q.shape
    if not 1 <= num_tokens < n:
        raise ValueError(
            f"num_tokens is {num_tokens}, it must be from 1 to {n - 1}: below the {n} tokens of q"
        )
    compute = torch.promote_types(q.dtype, torch.float32)
    scaled = q.to(compute).unflatten(0, (k.shape[0], -1)) * q.shape[-1] ** -0.5
    keys = k.to(compute).transpose(1, 2)
    totals = torch.zeros(2, heads, dtype=torch.float64)
    size = max(1, block_elements // (heads * n))
    for start in range(num_tokens, n, size):
        stop = min(start + size, n)
        logits = (scaled[:, :, start:stop].flatten(1, 2) @ keys[:, :, :stop]).view(heads, stop - start, stop)
        query = torch.arange(start, stop, device=q.device)
        future = torch.arange(stop, device=q.device) > query[:, None]
        lse = logits.masked_fill_(future, float("-inf")).logsumexp(-1)
        for back in range(num_tokens, stop, num_tokens):
            first = max(back - start, 0)  # the first query of the block that has a copy this far back
            for ahead, total in enumerate(totals):  # 0 = echo, 1 = induction
                found = logits[:, first:].diagonal(start + first - back + ahead, 1, 2)
                total += (found - lse[:, first:]).exp().double().sum(1).cpu()
    return totals[0] / (n - num_tokens), totals[1] / (n - num_tokens)


def search_heads(model: Any, input_ids: Tensor, num_tokens: int) -> tuple[Any, Any]:
    """Echo and induction scores ``[L][Hq]`` of a dense model on repeated tokens.

    Args:
        input_ids: ``[n]``, from `repeated_tokens`.
        num_tokens: K, the number of distinct tokens among them.
    """
    layers = tqdm(
        record_attention_inputs(model, input_ids[None].to(model.device)),
        total=model.config.num_hidden_layers,
        desc=f"heads, {len(input_ids)} tokens",
        unit="layer",
        disable=is_quiet(),
    )
    scores = [head_scores(inputs.q, inputs.k, num_tokens) for inputs in layers]
    echo = tuple(tuple(one.tolist()) for one, _ in scores)
    induction = tuple(tuple(one.tolist()) for _, one in scores)
    return echo, induction


def ordinary_tokens(tokenizer: Any, config: Any, wanted: int, repeats: int, seed: int) -> Tensor:
    """`repeated_tokens` without special tokens.

    Args:
        wanted: number of distinct tokens, or as many as the context and the vocabulary allow.

    Raises:
        ValueError: context and vocabulary allow fewer than 2 distinct tokens.
    """
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocab = min(len(tokenizer), config.vocab_size)
    special = {id for id in added | set(tokenizer.all_special_ids) if id < vocab}
    context = config.max_position_embeddings
    num_tokens = min(wanted, context // repeats, vocab - len(special))
    if num_tokens < 2:
        raise ValueError(
            f"explore.head_repeats is {repeats}: a context of {context} tokens and {vocab - len(special)} "
            "ordinary tokens leave fewer than 2 distinct ones: lower it"
        )
    return repeated_tokens(num_tokens, repeats, vocab, special, seed)
