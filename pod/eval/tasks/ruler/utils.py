"""What the YAML files of RULER call. lm-eval loads this file by its path."""

from typing import Any

from pod.eval.tasks import data
from pod.eval.tasks.ruler import metrics, samples


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task.

    metadata: `ruler` of the YAML file {task, length, samples, seed}; `ruler_length`, `ruler_samples` and `ruler_seed` (lm-eval's
    `--metadata`) go before it.
    """
    settings = metadata["ruler"]
    chosen = {key: metadata.get(f"ruler_{key}", settings[key]) for key in ("length", "samples", "seed")}
    for key, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (key != "seed"):
            raise ValueError(f"ruler_{key} must be a whole number above 0, not {value!r}")
    tokenizer = data.load_tokenizer(metadata)
    found = samples.make_rows(
        settings["task"], chosen["length"], tokenizer, chosen["seed"], chosen["samples"]
    )
    return {"test": found}


def score_all(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the answers found."""
    value = metrics.string_match_all(results[0], doc["answers"])
    return {"score": value, "string_match_all": value}


def score_part(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether any of the answers is found."""
    value = metrics.string_match_part(results[0], doc["answers"])
    return {"score": value, "string_match_part": value}
