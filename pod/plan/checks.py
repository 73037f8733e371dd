"""Check arrays of similarities and costs that users hand in.

Each message says in one line what came, what is allowed, and what to do.
"""

from typing import Any

import numpy as np

_AXES = {"L": "layers", "H": "KV heads", "Hq": "query heads", "q": "queries", "n": "tokens", "d": "head_dim"}


def check_array(name: str, values: Any, axes: str, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """Refuse an array of another shape than ``axes``, else return its sizes by axis.

    Example: axes ``"L L Hq"`` and an array of shape (30, 30, 9) give {"L": 30, "Hq": 9}.

    Args:
        name: of the array, for the message.
        values: anything with a shape.
        axes: one name per dimension. Dimensions of the same name must have the same size, at least 1.
        sizes: sizes that are known already, from other arrays.

    Returns:
        The known sizes and the sizes of this array.

    Raises:
        ValueError: another number of dimensions, sizes that differ from ``sizes`` or from each other, or a
            size of 0.
    """
    found = dict(sizes or {})
    shape = tuple(np.shape(values))
    names = axes.split()
    fits = len(shape) == len(names) and all(size >= 1 for size in shape)
    for axis, size in zip(names, shape, strict=False):
        if found.setdefault(axis, size) != size:
            fits = False
    if not fits:
        known = [f"{axis} = {size}" for axis, size in (sizes or {}).items() if axis in names]
        meaning = [f"{axis}: {_AXES[axis]}" for axis in dict.fromkeys(names) if axis in _AXES]
        raise ValueError(
            f"{name} has shape {list(shape)}, it must be [{', '.join(names)}]"
            f"{' with ' + ', '.join(known) if known else ''} ({', '.join(meaning)}): "
            "bring the axes into this order"
        )
    return found


def check_groups(name: str, query_heads: int, kv_heads: Any) -> None:
    """Raise ``ValueError`` unless the number of query heads is a multiple of the number of KV heads.

    Args:
        name: of the array that has the query heads, for the message.
        query_heads: its number of query heads.
        kv_heads: of the model; it must be an integer of at least 1.
    """
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int | np.integer) or kv_heads < 1:
        raise ValueError(
            f"num_key_value_heads is {kv_heads!r}, it must be an integer of at least 1: "
            "see the model's config"
        )
    if query_heads % kv_heads:
        raise ValueError(
            f"{name} has {query_heads} query heads, which must be a multiple of num_key_value_heads = "
            f"{kv_heads}: give those of the model's config"
        )


def check_similarity(similarity: Any, num_key_value_heads: Any) -> None:
    """Refuse similarities that are not ``[L, L, Hq]``, finite, from 0 to 1 and symmetric (``ValueError``).

    The number of query heads must be a multiple of ``num_key_value_heads``. Similarities must be symmetric in
    the two layers: this finds a wrong order of axes where a model has as many query heads as layers.
    """
    values = np.asarray(similarity, dtype=np.float64)
    sizes = check_array("similarity", values, "L L Hq")
    check_groups("similarity", sizes["Hq"], num_key_value_heads)
    if not np.isfinite(values).all() or values.min() < -1e-6 or values.max() > 1 + 1e-6:
        raise ValueError(
            f"similarity holds values from {values.min():.4g} to {values.max():.4g}, it must be finite and "
            "from 0 to 1: measure it again, or scale it"
        )
    if not np.allclose(values, values.transpose(1, 0, 2), rtol=0, atol=1e-6):
        raise ValueError(
            "similarity is not the same from layer a to b as from b to a, [L, L, Hq] must be: bring the axes "
            "into this order"
        )


def check_costs(name: str, costs: Any, axes: str, sizes: dict[str, int] | None = None) -> dict[str, int]:
    """Refuse costs of another shape, NaN and -inf, else return their sizes as ``check_array`` does.

    A cost is a number, or inf where a role is not allowed. Of costs of pairs of layers (``"L L …"``), only
    the values with lead < layer are looked at.

    Raises:
        ValueError: the shape does not fit, or a value is NaN or -inf.
    """
    found = check_array(name, costs, axes, sizes)
    values = np.asarray(costs, dtype=np.float64)
    if axes.startswith("L L"):
        values = values[np.triu_indices(found["L"], 1)]
    if np.isnan(values).any() or np.isneginf(values).any():
        raise ValueError(
            f"{name} holds NaN or -inf, costs must be numbers, or inf where a role is not "
            "allowed: measure them again"
        )
    return found


def check_threshold(threshold: Any) -> None:
    """Raise ``ValueError`` for a threshold of similarity that is not from 0 to 1."""
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}, it must be from 0 to 1: the paper's is 0.5")
