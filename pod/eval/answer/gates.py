"""Count how much of attention PoD's gate lets decoding skip (`tau`, PoD appendix B.4).

A cache's layers note it while tokens are decoded. `skipped` counts heads and multiply-adds from these notes.
"""

from typing import Any

Counts = dict[str, list[float | None]]


def watch(cache: Any) -> Any:
    """Let the layers of a new cache note what gates skip, if it has a `tau`. `skipped` reads the notes.

    Returns: the same cache.
    """
    for one in getattr(cache, "budget_caches", ()):  # their layers are made when the first rows come
        one.make_child = lambda *arguments, make=one.make_child: _watched(make(*arguments))
    for layer in cache.layers:
        _watched(layer)
    return cache


def _watched(layer: Any) -> Any:
    if hasattr(layer, "skips") and layer.tau is not None:
        layer.skips = []
    return layer


def skipped(layers: list[Any], row: int, end: int) -> Counts:
    """What one row has skipped: by name a number per layer. It is empty where nothing was noted.

    Only tokens that were decoded with distant tokens before them count.

    Args:
        layers: those of a cache that `watch` got.
        row: number of the row in the batch.
        end: only the row's first `end` tokens count.
    Returns:
        heads, groups: query heads of followers, and their KV heads.
        heads_skipped, groups_skipped: those whose gate reached tau. A group counts when all its query heads
            did; only then the distant values stay unread.
        exact, saved, dense: multiply-adds of attention in units of head_dim, over all heads: of PoD without
            skipping, of what is left out, and of the dense model.
    """
    noted = [layer for layer in layers if getattr(layer, "skips", None)]
    if not noted:
        return {}
    window = noted[0].num_sink_tokens + noted[0].num_recent_tokens
    tokens = [n for n, _, _ in noted[0].skips[row] if window < n <= end]
    found = []
    for layer in layers:
        size = layer.groups
        leads = len(layer.roles.leads)
        followers = len(layer.roles.followers)
        windows = len(layer.roles.windows)
        done = [one for one in layer.skips[row] if window < one[0] <= end] if layer.skips else []
        of_tokens = (
            (leads, 2 * sum(tokens)),
            (followers, sum(tokens) + window * len(tokens)),
            (windows, 2 * window * len(tokens)),
        )
        found.append(
            {
                "heads": size * followers * len(tokens),
                "heads_skipped": sum(heads for _, heads, _ in done),
                "groups": followers * len(tokens),
                "groups_skipped": sum(groups for _, _, groups in done),
                "exact": size * sum(number * each for number, each in of_tokens),
                "saved": sum(heads * (length - window) for length, heads, _ in done),
                "dense": size * (leads + followers + windows) * 2 * sum(tokens),
            }
        )
    return {name: [counts[name] for counts in found] for name in found[0]}
