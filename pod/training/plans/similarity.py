"""Attention similarity between layers, per query head, from the rows of the last q queries of long sequences (paper §2.1).

``sim_h(a, b) = 1 - mean JSD₂(S_a, S_b)`` over N sequences and q rows, with logarithms to base 2: 1 = identical, 0 = disjoint.
(The paper's equation 2 prints the mean divergence itself but reads it as 0 = dissimilar, 1 = identical.)

Every sequence contributes an integer, its similarity in units of 2^-40, so that the sum does not depend on the order: one
process, several ranks, and a run that was interrupted and continued with another number of ranks give the same bits.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pod.files import atomic_write_bytes

SIMILARITY_NAME = "similarity.safetensors"
SCHEMA_VERSION = "1"
UNIT = 2.0**-40  # of the integer sums; N up to 2^22 sequences fit into int64
TILE_ELEMENTS = {
    "cpu": 1 << 14,
    "cuda": 1 << 20,
}  # positions compared at a time: in cache on CPU, ~256 MB on a GPU


def jensen_shannon_similarity(rows: Tensor, tile_elements: int | None = None) -> Tensor:
    """Similarity of every pair of layers on one sequence, ``1 - JSD₂`` averaged over the q rows, in fp64.

    With ``f(x) = x log₂ x`` the similarity of two distributions is ``½ Σ f(p + q) - f(p) - f(q)``.

    Args:
        rows: attention probabilities ``[L, Hq, q, n]``; each row is normalised in fp64 first.
        tile_elements: of the q·n positions, how many are compared at a time; extra memory is about
            ``24 · L · tile_elements`` bytes plus one head's rows in fp64.
    Returns: ``[L, L, Hq]`` fp64 on the CPU, symmetric, diagonal 1.
    Raises: ValueError when a row is no distribution.
    """
    if rows.ndim != 4:
        raise ValueError(
            f"attention rows must be [layers, query heads, queries, tokens], got {list(rows.shape)}"
        )
    tile = tile_elements or TILE_ELEMENTS.get(rows.device.type, 1 << 14)
    heads = [_head_similarity(rows[:, head], tile) for head in range(rows.shape[1])]
    return torch.stack(heads, dim=-1).cpu()


def _head_similarity(rows: Tensor, tile: int) -> Tensor:
    """``[L, q, n]`` → ``[L, L]``."""
    rows = rows.double()
    total = rows.sum(dim=-1, keepdim=True)
    if not bool(((total - 1).abs() < 1e-2).all()):
        raise ValueError(
            f"attention rows sum to {total.min().item():.4g}..{total.max().item():.4g} instead of 1: "
            "the model gives NaN or infinite values on this text; try model.dtype=float32"
        )
    num_layers, num_queries = rows.shape[:2]
    flat = (rows / total).flatten(1)
    joint = torch.zeros(num_layers, num_layers, dtype=torch.float64, device=rows.device)
    own = torch.zeros(num_layers, dtype=torch.float64, device=rows.device)
    for part in flat.split(tile, dim=1):
        own += _x_log2_x(part).sum(dim=1)
        for layer in range(num_layers - 1):
            joint[layer, layer + 1 :] += _x_log2_x(part[layer] + part[layer + 1 :]).sum(dim=1)
    similarity = (joint - own[:, None] - own[None, :]) / (2 * num_queries)
    similarity = similarity.clamp_(0, 1).triu_(1)
    return similarity + similarity.T + torch.eye(num_layers, dtype=torch.float64, device=rows.device)


def _x_log2_x(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log2_().mul_(x)


@dataclass(kw_only=True)
class Similarity:
    """A measured similarity tensor with what it was measured on."""

    values: Tensor
    """``[L, L, Hq]`` fp64, the mean over all sequences."""

    num_key_value_heads: int
    """KV heads of the model; each owns Hq / H consecutive query heads."""

    provenance: dict[str, Any] = field(default_factory=dict)
    """Model, sources, n, q, N, seed and fingerprints, as `measured` and `save` got them."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write safetensors with metadata, atomically."""
        metadata = {
            "schema": SCHEMA_VERSION,
            "num_key_value_heads": str(self.num_key_value_heads),
            "provenance": json.dumps(self.provenance, sort_keys=True),
        }
        atomic_write_bytes(path, save({"similarity": self.values.contiguous()}, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Similarity":
        """Read what `save` wrote; ValueError of one line that names the file when it is something else."""
        tensors, metadata = _read(Path(path))
        try:
            if metadata["schema"] != SCHEMA_VERSION:
                raise KeyError("schema")
            return cls(
                values=tensors["similarity"],
                num_key_value_heads=int(metadata["num_key_value_heads"]),
                provenance=json.loads(metadata["provenance"]),
            )
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is not a similarity file of schema {SCHEMA_VERSION} ({error}): delete it and measure again"
            ) from None


@dataclass(kw_only=True)
class PartialSum:
    """What one rank has measured so far: integer sums, and which sequences they hold."""

    path: Path
    fingerprint: str
    total: Tensor | None = None  # int64, in units of UNIT; [L, L, Hq] for similarity
    done: Tensor  # [N] int64, 1 = in the sum

    def add(self, index: int, similarity: Tensor) -> None:
        units = (similarity / UNIT).round().to(torch.int64)
        self.total = units if self.total is None else self.total + units
        self.done[index] += 1

    def merge(self, other: "PartialSum") -> None:
        if other.total is not None:
            self.total = other.total if self.total is None else self.total + other.total
            self.done += other.done

    def save(self) -> None:
        if self.total is None:
            return
        metadata = {"schema": SCHEMA_VERSION, "fingerprint": self.fingerprint}
        tensors = {"total": self.total, "done": self.done}
        atomic_write_bytes(self.path, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: Path, fingerprint: str, num_sequences: int) -> "PartialSum":
        """What lies at `path`, or an empty sum. ValueError when it belongs to another model, text, n, q or N."""
        if not path.exists():
            done = torch.zeros(num_sequences, dtype=torch.int64)
            return cls(path=path, fingerprint=fingerprint, done=done)
        tensors, metadata = _read(path)
        if metadata.get("schema") != SCHEMA_VERSION or not {"total", "done"} <= tensors.keys():
            raise ValueError(
                f"{path} is not a partial similarity of schema {SCHEMA_VERSION}: delete {path.parent}"
            )
        if metadata.get("fingerprint") != fingerprint:
            raise ValueError(
                f"{path} holds the start of a measurement with {_difference(metadata.get('fingerprint', ''), fingerprint)}: "
                f"restore the old settings, or delete {path.parent} to start anew"
            )
        return cls(path=path, fingerprint=fingerprint, total=tensors["total"], done=tensors["done"])


def measure_mean(
    measure: Callable[[Tensor], Tensor],
    sequences: Sequence[Tensor],
    *,
    fingerprint: dict[str, Any],
    partial_dir: str | os.PathLike[str],
    save_every: int = 8,
    progress: Callable[[int, int], Any] | None = None,
) -> Tensor:
    """The mean of what `measure` gives for each sequence (fp64), the same bits for any number of ranks and interruptions.

    With torch.distributed initialised the sequences are divided among the ranks; all ranks get the result.

    Args:
        measure: input_ids ``[1, n]`` → a tensor of at most eight dimensions, the same shape for all, values below 2^12.
        sequences: N tensors ``[n]`` of token ids, the same list on every rank.
        fingerprint: JSON of everything the result depends on; partial sums of another one are refused.
        partial_dir: folder that all ranks share, for partial sums; the caller deletes it once the result is kept.
        save_every: sequences per rank between two saves.
        progress: called with (sequences in the sum, N) after each sequence of this rank; counts all ranks' at the start.
    Raises: ValueError for no sequences, for a foreign partial sum and for rows that are no distributions.
    """
    if not sequences:
        raise ValueError("no sequence to measure similarity on: give longer or more texts in explore.sources")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    text = json.dumps(fingerprint, sort_keys=True)
    partial = _resume(Path(partial_dir), text, len(sequences), rank, world)
    done = _all_reduce(partial.done.clone())
    if int(done.max()) > 1:
        raise ValueError(f"partial sums in {partial_dir} overlap: delete the folder to start anew")
    remaining = torch.nonzero(done == 0).flatten().tolist()
    finished = len(sequences) - len(remaining)
    for count, index in enumerate(remaining[rank::world], start=1):
        partial.add(index, measure(sequences[index].reshape(1, -1)))
        if count % save_every == 0:
            partial.save()
        if progress is not None:
            progress(min(finished + count * world, len(sequences)), len(sequences))
    partial.save()
    return _reduce_total(partial.total, len(sequences))


def _resume(folder: Path, fingerprint: str, num_sequences: int, rank: int, world: int) -> PartialSum:
    """This rank's own partial sum. Rank 0 first takes over the files of ranks that no longer exist."""
    error = ""
    if rank == 0:
        try:
            _adopt_orphans(folder, fingerprint, num_sequences, world)
        except ValueError as refused:
            error = str(refused)
    error = from_first_rank(error)
    if error:
        raise ValueError(error)
    return PartialSum.load(_partial_path(folder, rank), fingerprint, num_sequences)


def _adopt_orphans(folder: Path, fingerprint: str, num_sequences: int, world: int) -> None:
    """Check every partial file, and add those of ranks >= world to rank 0's.

    A crash between the two steps leaves a file whose sequences rank 0 already holds: it is deleted at the next start.
    """
    own = PartialSum.load(_partial_path(folder, 0), fingerprint, num_sequences)
    adopted = []
    for path in sorted(folder.glob("rank-*.safetensors")):
        if path == own.path:
            continue
        other = PartialSum.load(path, fingerprint, num_sequences)
        if bool((other.done <= own.done).all()):
            path.unlink()
        elif int(path.stem.removeprefix("rank-")) >= world:
            own.merge(other)
            adopted.append(path)
    if adopted:
        own.save()
        for path in adopted:
            path.unlink()


def _partial_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _reduce_total(total: Tensor | None, num_sequences: int) -> Tensor:
    """Sum over ranks; a rank without a sequence contributes zeros of the shape that the others have."""
    shape = torch.zeros(8, dtype=torch.int64)
    if total is not None:
        shape[: total.ndim] = torch.tensor(total.shape)
    if dist.is_initialized():
        dist.all_reduce(shape, op=dist.ReduceOp.MAX)
    mine = total if total is not None else torch.zeros(shape[shape > 0].tolist(), dtype=torch.int64)
    return _all_reduce(mine.clone()).double() * UNIT / num_sequences


def _all_reduce(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def from_first_rank(value: Any) -> Any:
    """What rank 0 passed, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def model_fingerprint(model: nn.Module, samples_per_tensor: int = 64) -> str:
    """Hash of every weight's name, shape, type and some of its values: tells checkpoints apart without reading all bytes."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        step = max(1, flat.numel() // samples_per_tensor)
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::step].cpu().double().numpy().tobytes())
    return digest.hexdigest()


def sequence_fingerprint(sequences: Iterable[Tensor]) -> str:
    """Hash of all token ids and of where sequences begin."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence).to_bytes(8, "little"))
        digest.update(sequence.to(torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def _difference(old: str, new: str) -> str:
    """The settings in which two fingerprints differ, as `name old (now new)`."""
    with contextlib.suppress(ValueError):
        before, now = json.loads(old), json.loads(new)
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return "other settings: " + ", ".join(
            f"{key} = {_short(before.get(key))} (now {_short(now.get(key))})" for key in changed
        )
    return "other settings"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: cannot be read as safetensors ({error}); delete it to start anew"
        ) from None
