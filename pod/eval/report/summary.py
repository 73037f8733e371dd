"""One row per method of one run as plain data: what the demo prints."""

import os
from typing import Any

from pod.eval.report.merge import merge
from pod.eval.report.tables import bytes_at, common_length, saving_of, speed_of


def summarise(folder: str | os.PathLike, methods: list[str]) -> list[dict[str, Any]]:
    """Rows in the order of `methods`; a value that was not measured is None.

    Keys: method, title, status, error, model; perplexity and passkey, both with …_ci95 and …_samples; change, change_ci95 (of
    perplexity, relative to `full`, paired over sequences); length, bytes, dense_bytes, budget_tokens, saving (one sequence, at the
    longest length that was measured for all); tokens_per_second, speed_over_full, first_token_seconds, speed_length.
    """
    comparison = merge([folder])
    entries = {entry.method: entry for entry in comparison.entries}
    shown, rows = [entries[name] for name in methods if name in entries], []
    for entry in shown:
        row = {key: entry.content.get(key) for key in ("method", "title", "status", "error", "model")}
        for task in ("perplexity", "passkey"):
            part = entry.parts.get(task) or {"samples": []}
            row |= {task: part.get("value"), f"{task}_ci95": part.get("ci95")}
            row[f"{task}_samples"] = len(part["samples"])
        against = comparison.against(entry, ("perplexity",))
        whole = against is not None and not against.unpaired and not against.left_out
        row |= {"change": against.delta if whole else None}
        row |= {"change_ci95": against.estimate.interval if whole else None}
        held, timed = bytes_at(entry, common_length(shown)), speed_of(entry)
        row |= {key: held and held[key] for key in ("length", "bytes", "dense_bytes", "budget_tokens")}
        row |= {"saving": held and saving_of(held), "speed_over_full": timed.get("speed_over_full")}
        row |= {
            "tokens_per_second": timed.get("decode_tokens_per_second"),
            "speed_length": timed.get("length"),
        }
        rows.append(row | {"first_token_seconds": timed.get("time_to_first_token_seconds")})
    return rows
