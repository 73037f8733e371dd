"""Longer contexts than a checkpoint was trained with: change its rotary embedding as a recipe says."""

from typing import Any

from pod.modeling.model.config import PodConfig

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"},
}
_DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # those of Llama 3.1


def extend(config: PodConfig, rope: dict[str, Any] | None, max_position_embeddings: int | None) -> None:
    """Change RoPE and the longest context in a model's configuration, as a recipe says.

    Args:
        config: changed in place. The model must not have computed any rotary embedding yet.
        rope: `changes` of `change_rope`; None or empty = none.
        max_position_embeddings: `new_max` of `change_rope`.

    Raises:
        ValueError: as in `change_rope`.
    """
    if rope or max_position_embeddings is not None:
        own = dict(config.rope_parameters), config.max_position_embeddings
        changed = change_rope(*own, rope or {}, max_position_embeddings)
        config.rope_parameters, config.max_position_embeddings = changed


def change_rope(
    rope: dict[str, Any], max_positions: int, changes: dict[str, Any], new_max: int | None = None
) -> tuple[dict[str, Any], int]:
    """RoPE parameters and longest context of a model after `changes`: a higher base, or scaled positions.

    Example: a checkpoint that reads 2,048 tokens reads 8,192 after `{"rope_type": "yarn", "factor": 4.0}`.

    Args:
        rope: RoPE parameters of the checkpoint, as in transformers.
        max_positions: its longest context, in tokens.
        changes: some of `rope_type`, `rope_theta`, and the keys of that type (llama3: Llama 3.1's; yarn:
            Peng et al., 2023). If the type is the checkpoint's own, the checkpoint's other parameters are
            kept.
        new_max: longest context afterwards, in tokens. None = the original length x factor where positions
            are scaled anew. Where only the factor of the checkpoint's own scaling changes, its longest
            context changes in proportion. Where nothing is scaled, it stays as it was.

    Raises:
        ValueError: keys of another type, an unknown type, a missing factor or one below 1, or a longer
            context with nothing else changed.
    """
    own_type = rope.get("rope_type", "default")
    rope_type = changes.get("rope_type", own_type)
    if rope_type not in _KEYS:
        raise ValueError(f"rope_type = {rope_type!r} is not supported; choose one of {', '.join(_KEYS)}")
    for key in changes.keys() - _KEYS[rope_type] - {"rope_type", "rope_theta"}:
        owners = ", ".join(name for name, keys in _KEYS.items() if key in keys) or "no rope_type"
        raise ValueError(f"rope_{key} belongs to {owners}, but rope_type is {rope_type}: leave it out")
    if new_max is not None and new_max > max_positions and not changes:
        raise ValueError(
            f"max_position_embeddings = {new_max}, but the checkpoint's RoPE was trained on {max_positions} "
            "positions: also set rope_theta, or rope_type and rope_factor"
        )
    kept = rope if rope_type == own_type else {"rope_theta": rope["rope_theta"]}
    changed = {**_DEFAULTS.get(rope_type, {}), **kept, **changes, "rope_type": rope_type}
    if rope_type == "default":
        return changed, new_max or max_positions
    # Linear scaling keeps no record of the length before it.
    trained = rope.get("original_max_position_embeddings") or round(max_positions / rope.get("factor", 1.0))
    original = changed.get("original_max_position_embeddings") or trained
    if rope_type != "linear":
        changed["original_max_position_embeddings"] = original
    if "factor" not in changed:
        if new_max is None:
            needs = f"rope_factor, or max_position_embeddings above {original}"
            raise ValueError(f"rope_type = {rope_type} needs {needs}")
        changed["factor"] = new_max / original
    if changed["factor"] < 1:
        raise ValueError(f"rope_factor is {changed['factor']:g}, allowed are 1 and more")
    scaled = changes.keys() & {"rope_type", "factor", "original_max_position_embeddings"}
    if new_max is not None or not scaled:
        return changed, new_max or max_positions
    if rope_type == own_type and "original_max_position_embeddings" not in changes:
        return changed, round(max_positions * changed["factor"] / rope["factor"])
    return changed, round(original * changed["factor"])
