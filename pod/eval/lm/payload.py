"""Make a task's payload from the samples that lm-eval logs.

`pod.eval.suites.task_base` says what a payload is.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np

from pod.eval.answer.budget import ByteBudgets, CacheSpan
from pod.eval.lm.index import Loaded, Rule
from pod.eval.suites.task_base import scored_payload

# bleu_acc is for truthfulqa_gen, whose other metrics are not between 0 and 1
_PREFERRED = ("acc_norm", "acc", "exact_match", "bleu_acc")
_PERPLEXITIES = ("word_perplexity", "byte_perplexity")
_OF_ALL = {"bits_per_byte", "bleu", "brier_score", "chrf", "f1", "likelihood", "mcc", "perplexity", "ter"}


@dataclass
class Leaf:
    """A leaf task of lm-eval (a task that is no group), with the sizes and counts of its prompts.

    Attributes:
        task: lm-eval's object.
        rule: how its prompts are treated.
        metric: (name, filter or None for the first).
        kind: of the payload.
        spans: of every cache that it needs.
        lengths: length class by document.
        longest: tokens read at most.
        question: text for tables: whether methods see the question when they compress; None where there is no
            question.
        tokens: see `token_counts`.
    """

    name: str
    task: Any
    rule: Rule
    metric: tuple[str, str | None]
    kind: str
    spans: set[CacheSpan] = field(default_factory=set)
    lengths: dict[int, int] = field(default_factory=dict)
    longest: int = 0
    question: str | None = None
    tokens: dict[bool, tuple[int, int]] = field(default_factory=dict)


def token_counts(encoded: list[Any], batch_size: int) -> dict[bool, tuple[int, int]]:
    """(prompt tokens, decode steps) of requests, for two ways of scoring.

    A decode step decodes one token in every row of a batch.

    Returns: under True, for scoring each request by one forward pass; under False, for scoring through the
        decode path.
    """

    def steps(fed: list[int]) -> int:
        """Decode steps of batches of rows of similar length. A batch takes as many as its longest row."""
        return sum(sorted(fed, reverse=True)[::batch_size])

    contexts = {(item.unit, item.context): len(item.context) for item in encoded}
    fed = sum(len(item.context) + len(item.continuation) for item in encoded)
    generated = steps([item.new_tokens for item in encoded if item.new_tokens])
    scored = steps([len(item.continuation) for item in encoded if not item.new_tokens])
    return {False: (sum(contexts.values()), generated + scored), True: (fed, generated)}


def primary_metric(name: str, task: Any, rule: Rule, asked: str | None) -> tuple[tuple[str, str | None], str]:
    """The metric (and its filter) that stands for the task, and the kind of its payload.

    Args:
        asked: the metric that the recipe names, `name` or `name,filter`; None = the task's own.
    Raises:
        ValueError: for a metric that the task does not have, and for one that gives no number per sample.
    """
    wanted = asked or rule.metric
    has = list(task.aggregation())
    if wanted is None:
        per_sample = [metric for metric in has if metric not in _OF_ALL]
        wanted = next((m for m in (*_PREFERRED, *_PERPLEXITIES, *per_sample) if m in has), None)
    if wanted is None:
        raise ValueError(
            f"task {name} cannot be compared here: its metrics ({', '.join(has)}) give no score per sample"
        )
    metric, _, filtered = wanted.partition(",")
    filters = [ensemble.name for ensemble in task._filters]
    if metric not in has or (filtered and filtered not in filters):
        known = f"{', '.join(has)}; filters: {', '.join(filters)}"
        raise ValueError(f"task {name} has no metric {wanted!r}: it has {known}")
    if metric in _OF_ALL:
        raise ValueError(
            f"task {name}: {metric} gives no score per sample, so methods cannot be compared: "
            "choose another metric"
        )
    kind = rule.kind if asked is None else None
    if kind is None:
        kind = _kind_of(metric, task)
    return (metric, filtered or None), kind


def _kind_of(metric: str, task: Any) -> str:
    """The kind of a payload. It is `binary` only where lm-eval's own scores are all 0 or 1."""
    if metric in _PERPLEXITIES:
        return "nll"
    plain = task.config.process_results is None
    return "binary" if plain and metric in ("acc", "acc_norm", "acc_bytes", "exact_match") else "score"


def leaf_payload(
    leaf: Leaf,
    logged: Sequence[Mapping[str, Any]],
    records: Mapping[str, dict[str, Any]],
    *,
    budgets: ByteBudgets,
    prefix: str,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The payload of a leaf task.

    Args:
        logged: samples as lm-eval logs them, one per document and filter.
        records: by request key, from our model class.
        budgets: they state the bytes of PoD and of the dense model.
        prefix: put before the ids of samples; in a group it is the name of the task.
        settings: of the run; they are added to the payload's settings.
    """
    metric, filtered = leaf.metric
    filtered = filtered or (logged[0]["filter"] if logged else None)
    by_doc: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for key, record in records.items():
        by_doc[int(key.split("/")[-3])].append(record)
    samples, skipped, kept = [], [], []
    for row in logged:
        asked = by_doc[row["doc_id"]]
        reason = next((record["skipped"] for record in asked if record["skipped"]), None)
        if reason is None:
            kept.append(row)
        if row["filter"] != filtered:
            continue
        name = f"{prefix}{row['doc_id']}"
        if reason is None and metric in row:
            samples.append({"id": name, **_sample(leaf, row, asked, metric)})
        else:
            skipped.append({"id": name, "reason": reason or f"the task gives it no {metric}"})
    higher = leaf.task.higher_is_better().get(metric, True)
    return scored_payload(
        leaf.kind,
        metric,
        samples,
        higher_is_better=leaf.kind != "nll" and bool(higher),
        bytes_rows=_bytes_rows(leaf, samples, budgets),
        settings=_settings(leaf, filtered, samples) | settings,
        skipped=skipped,
        metrics=_other_metrics(leaf, kept, (metric, filtered)),
    )


def largest(rows: Iterable[dict[str, Any]], *names: str) -> dict[str, Any]:
    """By name, the largest number in these rows; None where no row has a number."""
    known = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: max(found, default=None) for name, found in known.items()}


def _sample(leaf: Leaf, row: Mapping[str, Any], asked: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    value = row[metric]
    nll = leaf.kind == "nll"
    score = {"score": -float(value[0]), "tokens": int(value[1])} if nll else {"score": float(value)}
    return {
        **score,
        **_cluster(leaf, row.get("doc")),
        "prompt_hash": asked[0]["prompt_hash"],
        "length": leaf.lengths.get(row["doc_id"]),
        **largest(asked, "prompt_tokens", "dropped_tokens", "held_tokens", "budget_tokens", "bytes"),
        **_answer(leaf, row),
        "target": _plain(row["target"]),
    }


def _cluster(leaf: Leaf, doc: Any) -> dict[str, str]:
    """The `cluster` of a sample: what it shares with others of its task. Empty if its row has none.

    It is the row's `cluster` (suites in `pod/eval/suites` set it) behind the name of the task, so that tasks
    share no cluster.
    """
    shared = doc.get("cluster") if isinstance(doc, Mapping) else None
    return {} if shared is None else {"cluster": f"{leaf.name}/{shared}"}


def _answer(leaf: Leaf, row: Mapping[str, Any]) -> dict[str, Any]:
    """The model's answer: a generated text, or the likeliest choice with all log-likelihoods (nats).

    It is None for a text that is scored whole.
    """
    if leaf.task.OUTPUT_TYPE == "generate_until":
        return {"answer": row["resps"][0][0], "filtered": _plain(row["filtered_resps"][0])}
    if leaf.task.OUTPUT_TYPE == "loglikelihood_rolling":
        return {"answer": None}
    logprobs = [float(answer[0][0]) for answer in row["resps"]]
    best = int(np.argmax(logprobs))
    return {"answer": row["arguments"][best][1], "logprobs": logprobs}


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON: numpy's numbers become Python's, other objects their text."""
    text = json.dumps(
        value, default=lambda other: other.item() if isinstance(other, np.generic) else str(other)
    )
    return json.loads(text)


def _bytes_rows(leaf: Leaf, samples: list[dict[str, Any]], budgets: ByteBudgets) -> list[dict[str, Any]]:
    """Rows that state what the caches held, one for each length class."""
    rows = []
    for length in sorted({sample["length"] for sample in samples if sample["length"]}):
        same = [sample for sample in samples if sample["length"] == length]
        held = [sample["bytes"] for sample in same if sample["bytes"] is not None]
        most = largest(same, "budget_tokens", "held_tokens")
        stated = budgets.stated(length, most["budget_tokens"], held)
        _correct_early_ends(stated, most["held_tokens"] or length)
        rows.append({"task": leaf.name, "samples": len(same), **stated})
    return rows


def _correct_early_ends(stated: dict[str, Any], tokens: int) -> None:
    """Correct the row `stated`, whose length is a length class, for the tokens that caches really had seen.

    Caches may see fewer tokens, because answers may end long before the last new token; or more, because rows
    of a batch hold what its longest row does. The saving is then taken over a dense cache of the tokens that
    were seen. PoD's bytes are known at the length class only, so their ratio is left out where the two
    numbers of tokens differ by more than 5 %.
    """
    dense = stated["dense_bytes"] // stated["length"] * tokens
    if stated["bytes"] is not None:
        stated |= {"held_tokens": tokens, "saving": 1 - stated["bytes"] / dense}
        if not 0.95 <= tokens / stated["length"] <= 1.05:
            stated["bytes_over_pod"] = None


def _settings(leaf: Leaf, filtered: str | None, samples: list[dict[str, Any]]) -> dict[str, Any]:
    config = leaf.task.config
    generation = config.generation_kwargs or {}
    return {
        "format": "chat template" if leaf.rule.chat_template else "plain text",
        "num_fewshot": config.num_fewshot,
        "truncation": leaf.rule.truncation,
        "question": leaf.question,
        "truncated_samples": sum(sample["dropped_tokens"] > 0 for sample in samples),
        "filter": filtered,
        "new_tokens": generation.get("max_gen_toks") if leaf.task.OUTPUT_TYPE == "generate_until" else None,
        "version": str(leaf.task.VERSION),
        "source": leaf.rule.source or "lm-eval",
        "license": leaf.rule.license,
    }


def _other_metrics(
    leaf: Leaf, rows: Sequence[Mapping[str, Any]], primary: tuple[str, str | None]
) -> dict[str, dict[str, Any]]:
    """Every metric but the primary one over the answered samples, aggregated as the task does it."""
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        for name in row["metrics"]:
            values[name, row["filter"]].append(row[name])
    filters = {filtered for _, filtered in values}
    found = {}
    for (name, filtered), items in values.items():
        if (name, filtered) == primary:
            continue
        aggregate = leaf.task.aggregation().get(name)
        value = _plain(aggregate(items) if aggregate else np.mean(items))
        if isinstance(value, Number):
            found[name if len(filters) == 1 else f"{name} ({filtered})"] = {"value": value, "ci95": None}
    return found


def group_payload(loaded: Loaded, payloads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One payload for a group: the mean of its leaf tasks, weighted by their shares, and each task's value.

    Args:
        payloads: of the leaf tasks, by name.
    Raises:
        ValueError: when the leaf tasks cannot be averaged: one measures perplexity, or higher is better in
            only some of them.
    """
    parts = list(payloads.values())
    kinds = {part["kind"] for part in parts}
    higher = {part["higher_is_better"] for part in parts}
    if "nll" in kinds or len(higher) > 1:
        raise ValueError(f"group {loaded.name} mixes metrics that have no mean: name its tasks one by one")
    samples = [{**sample, "subtask": name} for name, part in payloads.items() for sample in part["samples"]]
    weights = _weights(loaded, payloads)
    names = {part["metric"] for part in parts}
    return scored_payload(
        "binary" if kinds == {"binary"} and loaded.share is None else "score",
        names.pop() if len(names) == 1 else "mean of the tasks' metrics",
        samples,
        skipped=[row for part in parts for row in part["skipped"]],
        bytes_rows=[row for part in parts for row in part["bytes"]],
        settings=_common([part["settings"] for part in parts]),
        higher_is_better=higher.pop(),
        subtasks={
            name: {key: part[key] for key in ("metric", "value", "ci95", "metrics")}
            | {"count": len(part["samples"]), "weight": weights.get(name, 0.0)}
            for name, part in payloads.items()
        },
    )


def _weights(loaded: Loaded, payloads: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The weight of each subtask that has a sample. Weights add to 1."""
    counts = {name: len(part["samples"]) for name, part in payloads.items() if part["samples"]}
    shares = counts if loaded.share is None else {name: loaded.share[name] for name in counts}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def _common(settings: list[dict[str, Any]]) -> dict[str, Any]:
    """One mapping for the settings of all members. A setting that differs is `by task`; counts are added."""
    values = {key: [row[key] for row in settings] for key in settings[0]}
    alike = {
        key: same[0] if all(one == same[0] for one in same) else "by task" for key, same in values.items()
    }
    return alike | {"truncated_samples": sum(values["truncated_samples"])}
