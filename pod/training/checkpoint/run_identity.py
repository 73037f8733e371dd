"""What a checkpoint stores besides weights, and the fingerprints of the run that it belongs to."""

import hashlib
import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from pod.files import read_mapping, write_json
from pod.modeling.model.sharing import SharingPlan
from pod.training.args import TrainArgs

SCHEMA_VERSION = 3  # of checkpoint.json; other versions are refused
STATE_NAME = "checkpoint.json"
"""The file in a checkpoint's folder that holds its `TrainState`."""
LATEST_NAME = "latest"
"""The file in a training folder that holds the name of the newest checkpoint."""
_ADVICE = {
    "plan_sha256": ("another sharing plan", "the plan that it was trained with (plan.json in its folder)"),
    "layout": ("another model.layout", "the same model.layout"),
    "windows": ("other windows", "the same model.num_sink_tokens, model.num_recent_tokens and model.sinks"),
    "rope": ("another RoPE", "the same model.rope_* settings and model.max_position_embeddings"),
    "model_sha256": ("another model", "the model that it was started from"),
    "data_sha256": ("other data", "the data that it was trained on"),
    "method": ("another train.method or other LoRA settings", "the same train.method and lora_* settings"),
    "dtype": ("another train.dtype", "the same train.dtype"),
    "rows": (
        "another seed or train.tokens_per_step",
        "the same seed and train.tokens_per_step",
    ),
}

Samples = dict[str, str]
"""Samples of a model's weights, by the weights' names: see `sample_of`."""


@dataclass(kw_only=True)
class TrainState:
    """The part of a checkpoint that is JSON."""

    step: int = 0
    """Optimizer steps that are done, including skipped ones."""
    run: str = ""
    """Identifies the run. It is made anew when a training begins at step 0, and kept when it is resumed.

    A run only ever removes checkpoints of its own.
    """
    updates: int = 0
    """Steps whose update was made."""
    cursor: dict[str, int] = field(default_factory=dict)
    """Position in the data (RowCursor.state_dict), in rows of all ranks.

    Any number of ranks can therefore continue there.
    """
    guard: dict[str, Any] = field(default_factory=dict)
    """What `LossSpikeDetector` remembers of earlier steps (its `state_dict`)."""
    world_size: int = 1
    """Number of ranks that wrote the checkpoint."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of model, plan, data and settings that a resumed run must share: see `identity_of`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe, for the record."""
    lora: dict[str, Any] | None = None
    """LoRA settings; None for full fine-tuning."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding."""
    owes_evaluation: bool = False
    """Whether a signal ended the evaluation after this step: the run then makes it when it is resumed."""

    def save(self, checkpoint: Path) -> None:
        """Write this state into a checkpoint's folder."""
        write_json(checkpoint / STATE_NAME, {"schema": SCHEMA_VERSION, **vars(self)})


def read_state(checkpoint: Path) -> TrainState:
    """The state of a checkpoint folder.

    Raises:
        ValueError: the state is missing, unreadable or of another version.
    """
    file = Path(checkpoint) / STATE_NAME
    content = read_mapping(file)
    if content is None:
        raise ValueError(f"{file} is missing or damaged: {way_back(Path(checkpoint))}")
    if (version := content.pop("schema", None)) != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has checkpoint version {version}, but this program can continue only version "
            f"{SCHEMA_VERSION}: finish the run with the release that wrote it, or set another output_dir"
        )
    return TrainState(**content)


def way_back(checkpoint: Path) -> str:
    """One line for the user: what to do about a checkpoint that cannot be read."""
    folder = checkpoint.parent
    others = {file.parent.name for file in folder.glob(f"step-*/{STATE_NAME}")} - {checkpoint.name}
    if others:
        return f"to continue from {max(others)}, write this name into {folder / LATEST_NAME}"
    return f"there is no other checkpoint in {folder}; remove that folder to begin again"


def sample_of(weight: torch.Tensor) -> str:
    """The shape and 16 values of a weight, as text.

    The values are rounded to bfloat16. A run in bfloat16 starts from such values, while its export loads the
    same model in float32: both must get the same sample.
    """
    flat = weight.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // 16)][:16].bfloat16().float().tolist()
    return f"{tuple(weight.shape)}{values}"


def identity_of(
    config: Any,
    samples: Samples,
    plan: SharingPlan,
    manifest: dict[str, Any],
    method: Any,
    dtype: str,
    rows: tuple[int, int],
) -> dict[str, Any]:
    """Fingerprints that a resumed run must share with its checkpoint, for JSON.

    Args:
        config: of the model.
        samples: of the start model's weights.
        manifest: of the prepared data.
        method: `train.method` and the LoRA settings.
        rows: seed of the order of rows, and how many rows make a step.
    """
    data = {name: manifest[name] for name in ("context_length", "tokenizer_sha256", "shards")}
    identity = {
        # The plan comes before the model: a plan that re-orders heads changes the model's weights too.
        "plan_sha256": plan_sha256(plan),
        **start_identity_of(config, samples),
        "data_sha256": sha256_of(data),
        "method": method,
        "dtype": dtype,
        "rows": rows,
    }
    return json.loads(json.dumps(identity))  # in the form in which it is read again: tuples become lists


def plan_sha256(plan: SharingPlan) -> str:
    """Fingerprint of what a plan decides about training; the bits of caches are not part of it."""
    return sha256_of([plan.lead, plan.head_order] if plan.head_order else plan.lead)


def start_identity_of(config: Any, samples: Samples) -> dict[str, Any]:
    """The part of an identity that the start model decides, for JSON.

    This is layout, windows, RoPE, and a fingerprint of the samples of the model's weights, whose order is the
    model's.
    """
    weights = "".join(f"{name}{sample}" for name, sample in samples.items())
    sinks = ["constant"] if config.sinks == "constant" else []
    start = {
        "layout": config.layout,
        "windows": [config.num_sink_tokens, config.num_recent_tokens, *sinks],
        "rope": {**config.rope_parameters, "max_position_embeddings": config.max_position_embeddings},
        "model_sha256": hashlib.sha256(weights.encode()).hexdigest(),
    }
    return json.loads(json.dumps(start))


def check_identity(state: TrainState, identity: dict[str, Any], refusal: str) -> None:
    """Raise ValueError when a checkpoint does not belong to a run.

    It was then made with another plan, layout, windows, RoPE, model, data, method, dtype or other rows.

    Args:
        state: of the checkpoint.
        identity: of the run, from `identity_of`; or the part of it that is to be compared.
        refusal: the message. `{what}` becomes what differs (`another RoPE`), and `{needed}` what to use.
    """
    for key, value in identity.items():
        default = value if key == "rows" else None  # older checkpoints do not store rows
        if state.identity.get(key, default) != value:
            what, needed = _ADVICE[key]
            raise ValueError(refusal.format(what=what, needed=needed))


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings of training that differ between two resolved recipes: `train.learning_rate 0.1 -> 0.2`.

    A setting that the earlier recipe lacks did not exist then: it had its default.

    Args:
        before: the earlier recipe.
        now: the recipe of this run.
    """
    new = now.get("train") or {}
    old = before.get("train") or new
    old = {one.name: one.default for one in fields(TrainArgs) if one.default is not MISSING} | old
    changed = [name for name in new if name in old and old[name] != new[name]]
    return [f"train.{name} {old[name]} -> {new[name]}" for name in changed]


def sha256_of(content: Any) -> str:
    """SHA-256 of anything that JSON can hold, as 64 hexadecimal digits.

    Values that JSON cannot hold are replaced by their text (`str`).
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
