"""One row per method out of the result files: what tables, pictures and the demo print."""

import os
from pathlib import Path
from typing import Any

from pod.eval.judge.verdicts import perplexity_change
from pod.eval.results import load_results
from pod.eval.speed.args import NAME as SPEED_RUN

BASE = "full"
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
    results, speed = load_results(folder, methods), load_speed(folder)
    timed = {name: [(row["length"], row["methods"].get(name)) for row in speed] for name in results}
    timed = {name: {length: own for length, own in rows if own} for name, rows in timed.items()}
    stated = {name: _stated_bytes(result, timed[name]) for name, result in results.items()}
    lengths = [set(rows) for rows in stated.values() if rows]
    length = max(set.intersection(*lengths), default=None) if lengths else None
    rows = []
    for name, result in results.items():
        found = {key: result[key] for key in _KEYS[:5] if key in result} | _scores(result, results.get(BASE))
        if held := stated[name]:
            row = held[length if length in held else max(held)]
            found |= {key: row[key] for key in _BYTES}
        if timed[name]:
            longest, own = max(timed[name].items())
            found |= {"tokens_per_second": own["decode_tokens_per_second"], "speed_length": longest}
            found |= {"speed_over_full": own.get("speed_over_full")}
            found |= {"first_token_seconds": own["time_to_first_token_seconds"]}
        rows.append(dict.fromkeys(_KEYS) | found)
    return rows


def load_speed(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """[{"length", "methods": {name: row}}] of the speed run, empty when there is none."""
    if not (Path(folder) / f"{SPEED_RUN}.json").is_file():
        return []
    try:
        content = load_results(folder, [SPEED_RUN])[SPEED_RUN]
    except ValueError:
        return []
    return content["parts"].get(SPEED_RUN, {}).get("lengths", [])


def _scores(result: dict, base: dict | None) -> dict[str, Any]:
    """Perplexity with its paired change, where the two were scored on the same tokens of the same sequences, and passkeys."""
    passkey, total = (result["parts"].get(task, {}) for task in ("passkey", "perplexity"))
    names = {
        "passkey": "value",
        "passkey_correct": "correct",
        "passkey_prompts": "prompts",
        "passkey_ci95": "ci95",
    }
    found = {name: passkey.get(key) for name, key in names.items()}
    if total := total.get("total"):
        found |= {"perplexity_ci95": total["ci95"]} | {key: total[key] for key in ("perplexity", "sequences")}
    own, other = _sums(result), _sums(base or {})
    if own and {key: row[1:] for key, row in own.items()} == {key: row[1:] for key, row in other.items()}:
        sums = [row[0] for row in own.values()], [other[key][0] for key in own]
        change = perplexity_change(*sums, [row[1] for row in own.values()])
        found |= {"change": change.value, "change_ci95": change.interval}
    return found


def _sums(result: dict) -> dict[str, tuple[float, int, str | None]]:
    """Summed NLL (nats), scored tokens and prompt of every perplexity sequence."""
    samples = result.get("parts", {}).get("perplexity", {}).get("samples", [])
    return {row["id"]: (row["score"], row["tokens"], row.get("prompt_hash")) for row in samples}


def _stated_bytes(result: dict, timed: dict[int, dict]) -> dict[int, dict]:
    """Measured bytes of a method by length (tokens), from whichever task measured them."""
    stated = [row for part in result["parts"].values() for row in part.get("bytes") or []]
    stated += [own["bytes"] for own in timed.values()]
    return {row["length"]: row for row in stated if row["bytes"]}
