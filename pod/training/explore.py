"""From a recipe's settings to a similarity file: what is measured, on which text, and when an earlier file serves again."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.data import DataArgs, long_sequences
from pod.data.job import OF_READING, OF_SPLIT
from pod.files import sha256_file
from pod.modeling.loading import load_model, load_tokenizer
from pod.modeling.recording import record_attention_rows
from pod.modeling.shipped.llama import PodForCausalLM
from pod.training.explore_args import ExploreArgs
from pod.training.planning import num_non_lead_for
from pod.training.similarity import (
    Similarity,
    measure_similarity,
    model_fingerprint,
    sequence_fingerprint,
)

SIMILARITY_NAME = "similarity.safetensors"
PARTIAL_NAME = "similarity.partial"
DATA_SETTINGS = (*OF_READING, "boundary_tokens", *(name for name in OF_SPLIT if name != "sources"))
WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin"}


def settings_of(model: dict[str, Any], explore: ExploreArgs, data: DataArgs, seed: int) -> dict[str, Any]:
    """Everything that a similarity depends on, as JSON. model: path, gguf_file and dtype as in the recipe, and what changes
    its positions (rope, max_position_embeddings), if anything does."""
    sources = explore.sources or data.sources
    positions = {name: model[name] for name in ("rope", "max_position_embeddings") if model.get(name)}
    return positions | {
        "model": model["path"],
        "gguf_file": model["gguf_file"],
        "dtype": model["dtype"],
        "sources": list(sources),
        "split": "all" if explore.sources else "held_out",
        "data": {name: getattr(data, name) for name in DATA_SETTINGS},
        "num_sequences": explore.num_sequences,
        "sequence_length": explore.sequence_length,
        "num_queries": explore.num_queries,
        "seed": seed,
    }


def find_similarity(
    folder: str | os.PathLike[str],
    settings: dict[str, Any],
    model_folder: str,
    explore: ExploreArgs,
    data: DataArgs,
    say: Callable[[str], None] = print,
    prepared: Path | None = None,
) -> Similarity:
    """The similarity of these settings: read from `folder` when it is there, else measured (by all ranks) and written.

    A file of other settings is kept under another name. An interrupted measurement is continued.

    Args:
        folder: shared by all ranks; receives similarity.safetensors.
        model_folder: folder or hub id of the dense model.
        prepared: folder of prepared data; of the same sources, its held-out text is used instead of reading them all.
    Raises: ValueError for texts, models and partial files that do not fit.
    """
    path = Path(folder) / SIMILARITY_NAME
    rank = dist.get_rank() if dist.is_initialized() else 0
    say = say if rank == 0 else quiet
    wanted = settings | {"weights": weights_stamp(model_folder)}
    found = from_first_rank(_reusable(path, wanted, say) if rank == 0 else None)
    if found is not None:
        return found
    found = _measure(Path(folder), settings, wanted, model_folder, explore, data, say, prepared)
    if rank == 0:
        keep_old(path)
        found.save(path)
        shutil.rmtree(Path(folder) / PARTIAL_NAME, ignore_errors=True)
    return found


def from_first_rank(value: Any) -> Any:
    """What rank 0 passed, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _measure(
    folder: Path,
    settings: dict[str, Any],
    wanted: dict[str, Any],
    model_folder: str,
    explore: ExploreArgs,
    data: DataArgs,
    say: Callable[[str], None],
    prepared: Path | None,
) -> Similarity:
    model = load_dense(model_folder, settings)
    check_model(model.config, explore)
    sequences, split = read_sequences(
        explore, data, model_folder, settings["gguf_file"], settings["seed"], say, prepared
    )
    fingerprint = settings | {
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }
    bar = tqdm(total=len(sequences), desc="similarity", unit="seq", disable=say is quiet)

    def rows(input_ids: Tensor) -> Iterator[Tensor]:
        return record_attention_rows(model, input_ids.to(model.device), explore.num_queries)

    with bar:
        values = measure_similarity(
            rows,
            sequences,
            fingerprint=fingerprint,
            partial_dir=folder / PARTIAL_NAME,
            save_every=explore.save_every,
            progress=partial(advance, bar),
        )
    return Similarity(
        values=values,
        num_key_value_heads=model.config.num_key_value_heads,
        provenance=wanted | fingerprint | {"split_used": split},
    )


def load_dense(
    model_folder: str,
    settings: dict[str, Any],
    num_sink_tokens: int | None = None,
    num_recent_tokens: int | None = None,
) -> PodForCausalLM:
    """The dense model of these settings on this rank's device; windows as in `load_model`."""
    return load_model(
        model_folder,
        gguf_file=settings["gguf_file"],
        dtype=getattr(torch, settings["dtype"]),
        device=_device(),
        rope=settings.get("rope"),
        max_position_embeddings=settings.get("max_position_embeddings"),
        num_sink_tokens=num_sink_tokens,
        num_recent_tokens=num_recent_tokens,
    )


def quiet(line: str) -> None:
    """Ranks other than 0 say nothing."""


def advance(bar: tqdm, done: int, total: int) -> None:
    bar.update(done - bar.n)


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
        say(f"similarity: measured on training text, held-out text does not suffice ({error})")
    return list(torch.from_numpy(tokens)), split


def check_model(config: Any, explore: ExploreArgs) -> None:
    """Refuse, before hours of measuring, a length the model cannot read and a saving its layers cannot reach."""
    if explore.sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"explore.sequence_length is {explore.sequence_length}, the model reads {config.max_position_embeddings} "
            "tokens: lower it, or extend the model first"
        )
    if explore.algorithm == "dp":
        num_non_lead_for(explore.target_saving, config.num_hidden_layers, config.num_key_value_heads)


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


def _reusable(path: Path, wanted: dict[str, Any], say: Callable[[str], None]) -> Similarity | None:
    if not path.exists():
        return None
    found = Similarity.load(path)
    changed = sorted(key for key, value in wanted.items() if found.provenance.get(key) != value)
    if not changed:
        say(f"similarity: {path} is of these settings, nothing is measured again")
        return found
    say(f"similarity: {path} differs in {', '.join(changed)}: measuring again, the old file is kept")
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
    head = 8 * layers * q * n  # bytes, one head in fp64
    tensor = 8 * layers * layers * heads  # bytes
    lines = [
        f"similarity: one forward pass over {explore.num_sequences} x {n} = {explore.num_sequences * n} tokens, "
        "divided among the ranks",
        f"memory per rank: the model, {rows / 1e6:.0f} MB of attention rows ({layers} layers x {heads} heads x {q} x {n} fp32), "
        f"{3 * head / 1e6:.0f} MB to compare them",
        f"disk: {3 * tensor / 1e6:.1f} MB for the similarity and its partial sums, three pictures",
    ]
    if explore.cost != "similarity":
        backward = " and one backward pass with checkpointing" if explore.cost == "loss" else ""
        lines.append(
            f"cost {explore.cost}: one more forward pass{backward} over the same tokens, same memory"
        )
    if explore.refine_evaluations:
        count = min(explore.refine_sequences, explore.num_sequences)
        held = 4 * layers * n * config.hidden_size * count  # bytes, fp32
        lines.append(
            f"refinement: up to {explore.refine_evaluations} forward passes over {count} x {n} tokens, {held / 1e6:.0f} MB of "
            "hidden states (half in bfloat16), divided among the ranks"
        )
    return "\n".join(lines)
