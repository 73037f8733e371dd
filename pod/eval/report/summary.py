"""One row per method of one run as plain data: what the demo prints."""

import os
from typing import Any

from pod.eval.answer.methods import BASE
from pod.eval.report.merge import Entry, merge
from pod.eval.report.tables import bytes_at, common_length, speed_of

_BYTES = ("length", "bytes", "dense_bytes", "saving", "bytes_over_pod", "budget_tokens")
_KEYS = (
    *("method", "title", "status", "error", "model"),
    *("perplexity", "perplexity_ci95", "sequences", "change", "change_ci95"),
    *("passkey", "passkey_correct", "passkey_prompts", "passkey_ci95", *_BYTES),
    *("tokens_per_second", "speed_over_full", "first_token_seconds", "speed_length"),
)


def summarise(folder: str | os.PathLike, methods: list[str]) -> list[dict[str, Any]]:
    """Rows in the order of `methods`; a value that was not measured is None.

    Keys: method, title, status, error, model; perplexity, perplexity_ci95, sequences, change, change_ci95 (relative to `full`,
    paired over sequences); passkey, passkey_correct, passkey_prompts, passkey_ci95; length, bytes, dense_bytes, saving,
    bytes_over_pod, budget_tokens (one sequence, at the longest length that was measured for all); tokens_per_second,
    speed_over_full, first_token_seconds, speed_length.
    """
    comparison = merge([folder])
    entries = {entry.method: entry for entry in comparison.entries}
    shown = [entries[name] for name in methods if name in entries]
    length, rows = common_length(shown), []
    for entry in shown:
        found = {key: entry.content.get(key) for key in _KEYS[:5]} | _scores(entry)
        against = comparison.against(entry, ("perplexity",)) if "perplexity" in entry.parts else None
        if entry is entries.get(BASE) and "perplexity" in entry.parts:
            found |= {"change": 0.0, "change_ci95": [0.0, 0.0]}
        elif against is not None and not against.unpaired and not against.left_out:
            found |= {"change": against.delta, "change_ci95": against.estimate.interval}
        if held := bytes_at(entry, length):
            found |= {key: held[key] for key in _BYTES}
        if timed := speed_of(entry):
            found |= {"tokens_per_second": timed["decode_tokens_per_second"], "speed_length": timed["length"]}
            found |= {"speed_over_full": timed.get("speed_over_full")}
            found |= {"first_token_seconds": timed["time_to_first_token_seconds"]}
        rows.append(dict.fromkeys(_KEYS) | found)
    return rows


def _scores(entry: Entry) -> dict[str, Any]:
    passkey, perplexity = (entry.parts.get(task, {}) for task in ("passkey", "perplexity"))
    total, found = perplexity.get("total", {}), passkey.get("samples")
    return {
        **{"perplexity": total.get("perplexity"), "perplexity_ci95": total.get("ci95")},
        **{"sequences": total.get("sequences"), "passkey": passkey.get("value")},
        "passkey_correct": found and int(sum(sample["score"] for sample in found)),
        "passkey_prompts": found and len(found),
        "passkey_ci95": passkey.get("ci95"),
    }
