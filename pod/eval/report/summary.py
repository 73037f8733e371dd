"""One row per method out of the result files: what tables, pictures and the demo print."""

import os
from pathlib import Path
from typing import Any

from pod.eval.judge.verdicts import perplexity_change
from pod.eval.results import load_results
from pod.eval.speed.args import NAME as SPEED_RUN

BASE = "full"


def summarise(folder: str | os.PathLike, methods: list[str]) -> list[dict[str, Any]]:
    """Rows in the order of `methods`; a value that was not measured is None.

    Keys: method, title, status, error, model; perplexity, perplexity_ci95, sequences, change, change_ci95 (relative to `full`,
    paired over sequences); passkey, passkey_correct, passkey_prompts, passkey_ci95; length, bytes, dense_bytes, saving,
    bytes_over_pod, budget_tokens (one sequence, at the
    longest length that was measured for all); tokens_per_second, speed_over_full,
    first_token_seconds, speed_length.
    """
    results = load_results(folder, methods)
    speed = load_speed(folder)
    base = results.get(BASE)
    stated = {name: _stated_bytes(result, speed, name) for name, result in results.items()}
    length = _common_length(stated)
    rows = []
    for name, result in results.items():
        row = {key: result.get(key) for key in ("method", "title", "status", "error", "model")}
        row |= _perplexity_columns(result, base) | _passkey_columns(result)
        row |= _byte_columns(stated[name], length) | _speed_columns(speed, name)
        rows.append(row)
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


def _perplexity_columns(result: dict, base: dict | None) -> dict[str, Any]:
    total = result["parts"].get("perplexity", {}).get("total")
    if total is None:
        return dict.fromkeys(("perplexity", "perplexity_ci95", "sequences", "change", "change_ci95"))
    change = _change(result, base)
    return {
        "perplexity": total["perplexity"],
        "perplexity_ci95": total["ci95"],
        "sequences": total["sequences"],
        "change": change.get("change"),
        "change_ci95": change.get("ci95"),
    }


def _change(result: dict, base: dict | None) -> dict[str, Any]:
    """Paired change of perplexity against the base; empty when the two were not scored on the same tokens of the same sequences."""
    own, other = _sums(result), _sums(base or {})
    if not own or {key: row[1:] for key, row in own.items()} != {key: row[1:] for key, row in other.items()}:
        return {}
    found = perplexity_change(
        [row[0] for row in own.values()],
        [other[key][0] for key in own],
        [row[1] for row in own.values()],
    )
    return {"change": found.value, "ci95": found.interval}


def _sums(result: dict) -> dict[str, tuple[float, int, str | None]]:
    """Summed NLL (nats), scored tokens and prompt of every perplexity sequence."""
    samples = result.get("parts", {}).get("perplexity", {}).get("samples", [])
    return {row["id"]: (row["score"], row["tokens"], row.get("prompt_hash")) for row in samples}


def _passkey_columns(result: dict) -> dict[str, Any]:
    part = result["parts"].get("passkey", {})
    return {
        "passkey": part.get("value"),
        "passkey_correct": part.get("correct"),
        "passkey_prompts": part.get("prompts"),
        "passkey_ci95": part.get("ci95"),
    }


def _stated_bytes(result: dict, speed: list[dict], name: str) -> dict[int, dict]:
    """Measured bytes of a method by length (tokens), from whichever task measured them."""
    stated = [row for part in result["parts"].values() for row in part.get("bytes") or []]
    stated += [row["methods"][name]["bytes"] for row in speed if name in row["methods"]]
    return {row["length"]: row for row in stated if row["bytes"]}


def _common_length(stated: dict[str, dict[int, dict]]) -> int | None:
    """The longest length at which every method that has bytes has them, None when there is none."""
    lengths = [set(rows) for rows in stated.values() if rows]
    return max(set.intersection(*lengths), default=None) if lengths else None


def _byte_columns(stated: dict[int, dict], length: int | None) -> dict[str, Any]:
    """Bytes at `length`, else at the longest length of this method."""
    keys = ("length", "bytes", "dense_bytes", "saving", "bytes_over_pod", "budget_tokens")
    if not stated:
        return dict.fromkeys(keys)
    row = stated[length] if length in stated else stated[max(stated)]
    return {key: row[key] for key in keys}


def _speed_columns(speed: list[dict], name: str) -> dict[str, Any]:
    rows = [row for row in speed if name in row["methods"]]
    if not rows:
        return dict.fromkeys(("tokens_per_second", "speed_over_full", "first_token_seconds", "speed_length"))
    longest = max(rows, key=lambda row: row["length"])
    own = longest["methods"][name]
    return {
        "tokens_per_second": own["decode_tokens_per_second"],
        "speed_over_full": own.get("speed_over_full"),
        "first_token_seconds": own["time_to_first_token_seconds"],
        "speed_length": longest["length"],
    }
