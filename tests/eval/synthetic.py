"""Made-up result files of schema 2 in the shape of real ones.

They are for tests of the report and for looking at its page.

python tests/eval/synthetic.py FOLDER writes two runs into FOLDER/run_a and FOLDER/run_b.
"""

import json
import random
import sys
from pathlib import Path

from pod.eval.statistics.comparison import perplexity_of
from pod.eval.suites.task_base import scored_payload

BYTES_PER_TOKEN = 131072
SHARES = {
    "full": 1.0,
    "pod": 0.68,
    "pod-unadapted": 0.68,
    "snapkv": 0.67,
    "streamingllm": 0.68,
    "h2o": 0.68,
    "razor": 0.55,
    "snapkv@12.5%": 0.14,
    "snapkv@25%": 0.26,
    "snapkv@50%": 0.51,
}
SKILL = {  # how much of a full answer a method gives
    "full": 1.0,
    "pod": 0.99,
    "pod-unadapted": 0.9,
    "snapkv": 0.96,
    "streamingllm": 0.72,
    "h2o": 0.8,
    "razor": 0.93,
    "snapkv@12.5%": 0.84,
    "snapkv@25%": 0.9,
    "snapkv@50%": 0.95,
}
LONGBENCH = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "gov_report", "trec", "lcc"]
RULER = ["niah_single_1", "niah_multikey_1", "vt", "cwe", "qa_1"]
ENVIRONMENT = {
    "date": "2026-11-22T04:00:00+00:00",
    "python": "3.11.2",
    "versions": {"pod-kv": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.3.0"},
    "commit": "0123456789abcdef",
    "hardware": {"cpu": "Some CPU @ 2.40GHz", "cores": 2, "threads": 1, "gpu": None},
}


def stated(method, length):
    """What a result says about its bytes."""
    dense, pod = BYTES_PER_TOKEN * length, round(0.68 * BYTES_PER_TOKEN * length)
    measured = None if method in ("full", "pod") else round(SHARES[method] * dense)
    return {
        "length": length,
        "budget_tokens": None
        if method in ("full", "pod", "pod-unadapted", "razor")
        else int(SHARES[method] * length),
        "pod_bytes": pod,
        "dense_bytes": dense,
        "bytes": measured,
        "bytes_over_pod": None if measured is None else measured / pod,
        "saving": None if measured is None else 1 - measured / dense,
    }


def perplexity(method, sequences=8, salt=""):
    """Position buckets of 128 scored tokens; harder with position for methods that drop tokens."""
    rng = random.Random("perplexity")
    extra = {"full": 0.0, "pod": 0.03, "pod-unadapted": 0.35}.get(method, 0.6 * (1 - SKILL[method]) + 0.05)
    ends = [512, 1024, 2048]
    rows = []
    for number in range(sequences):
        base = [2.2 + 0.25 * rng.random() - 0.1 * place for place in range(len(ends))]
        noise = random.Random(f"{method}{number}")
        rows.append(
            [
                128 * (value + extra * (place + 1) / 3 * (0.9 + 0.2 * noise.random()))
                for place, value in enumerate(base)
            ]
        )
    buckets = []
    for place, end in enumerate(ends):
        summary = perplexity_of([row[place] for row in rows], [128] * sequences)
        bucket = {"start": end // 2, "end": end, "first": end - 128}
        buckets.append({**bucket, **summary, "bytes": stated(method, end)})
    total = perplexity_of([sum(row) for row in rows], [384] * sequences)
    return {
        "scored_by": "one forward pass" if method in ("full", "pod") else "decode path, token by token",
        "decode_path_check": {"tokens": 8, "length": 1024, "max_abs_difference_nats": 1.2e-5}
        if method == "pod"
        else None,
        "kind": "nll",
        "metric": "perplexity",
        "higher_is_better": False,
        "value": total["perplexity"],
        "ci95": total["ci95"],
        "samples": [
            {
                "id": str(i),
                "score": sum(row),
                "tokens": 384,
                "prompt_hash": f"text{salt}{i}",
                "prompt_tokens": 2048,
                "buckets": row,
            }
            for i, row in enumerate(rows)
        ],
        "skipped": [],
        "bytes": [bucket["bytes"] for bucket in buckets],
        "settings": {"sequences": sequences, "length": 2048},
        "buckets": buckets,
        "total": total,
    }


def needles(method):
    """Depth × length; methods that drop tokens lose needles outside their window."""
    rng, samples, cells = random.Random(f"niah{method}"), [], []
    lengths, depths = [1024, 2048, 4096, 8192], [0.0, 0.25, 0.5, 0.75, 1.0]
    for length in lengths:
        for depth in depths:
            chance = SKILL[method] if depth < 1 and length > 1024 else 0.99
            if method in ("streamingllm", "h2o") and 0 < depth < 1 and length > 2048:
                chance = 0.1
            found = [float(rng.random() < chance) for _ in range(3)]
            cells.append({"length": length, "depth": depth, "value": sum(found) / 3, "count": 3})
            samples += [
                {
                    "id": f"{length}/{depth}/{i}",
                    "score": score,
                    "prompt_hash": f"{length}{depth}{i}",
                    "prompt_tokens": length,
                }
                for i, score in enumerate(found)
            ]
    settings = {"needles": 1, "haystack": "essays", "chat_template": False}
    rows = [stated(method, length) for length in lengths]
    return scored_payload("binary", "recall", samples, bytes_rows=rows, settings=settings, cells=cells)


def scores(method, task, count=30, skipped=0, template=False, level=0.5):
    """A scored task of lm-eval's kind; a share of samples changes with the method."""
    samples = []
    for i in range(count - skipped):
        truth, own = random.Random(f"{task}{i}"), random.Random(f"{method}{task}{i}")
        score = min(1.0, max(0.0, truth.gauss(level, 0.2)))
        score = score if own.random() < SKILL[method] ** 2 else 0.4 * score
        prompt = f"{task}{i}{'chat' if template else ''}"
        samples.append({"id": str(i), "score": score, "prompt_hash": prompt, "prompt_tokens": 3000 + 100 * i})
    skips = [{"id": str(count - 1 - i), "reason": "longer than the model reads"} for i in range(skipped)]
    return scored_payload(
        "score",
        "rouge_l" if "report" in task else "qa_f1",
        samples,
        skipped=skips,
        bytes_rows=[stated(method, 4096), stated(method, 8192)],
        settings={"chat_template": template, "truncation": "middle", "limit": count},
        metrics={
            "exact_match": {"value": 0.7 * sum(s["score"] for s in samples) / len(samples), "ci95": None}
        },
    )


def choices(method, task="mmlu_anatomy", count=40):
    """A 0/1 task."""
    samples = []
    for i in range(count):
        right = random.Random(f"{task}{i}").random() < 0.62
        if random.Random(f"{method}{task}{i}").random() > SKILL[method]:
            right = not right
        samples.append(
            {"id": str(i), "score": float(right), "prompt_hash": f"{task}{i}", "prompt_tokens": 400}
        )
    return scored_payload(
        "binary",
        "acc",
        samples,
        bytes_rows=[stated(method, 512)],
        settings={"fewshot": 5},
    )


def group(method):
    """A group of lm-eval with a value per subtask."""
    parts = {"history": 12, "physics": 18}
    samples, subtasks = [], {}
    for name, count in parts.items():
        own = choices(method, name, count)
        samples += [{**sample, "id": f"{name}/{sample['id']}", "subtask": name} for sample in own["samples"]]
        subtasks[name] = {"metric": "acc", "value": own["value"], "ci95": own["ci95"], "count": count}
    payload = choices(method, "history", 12)
    value = sum(part["value"] for part in subtasks.values()) / len(subtasks)
    return {**payload, "value": value, "ci95": None, "samples": samples, "subtasks": subtasks}


def curves(method):
    """A task whose payload brings a curve."""
    payload = scores(method, "tau_curve", 10)
    line = {"title": "Score by gate threshold", "x_label": "τ", "y_label": "score"}
    line |= {"x": [0.5, 0.7, 0.9], "y": [40.0 * SKILL[method], 44.0, 45.0], "low": None, "high": None}
    return {**payload, "curves": [line]}


def payload_of(values):
    """A scored task with these scores and nothing else."""
    samples = [{"id": str(i), "score": value, "prompt_hash": f"p{i}"} for i, value in enumerate(values)]
    return scored_payload("score", "m", samples)


def write(folder, **files):
    """A run's folder from method files."""
    (folder / "eval").mkdir(parents=True)
    for name, content in files.items():
        (folder / "eval" / f"{name}.json").write_text(json.dumps(content))
    return folder


def payload(values, kind="score", **more):
    """Samples 0, 1, … with these scores."""
    samples = [{"id": str(i), "score": value, "prompt_hash": f"p{i}"} for i, value in enumerate(values)]
    part = {
        "kind": kind,
        "metric": "m",
        "higher_is_better": True,
        "value": sum(values) / len(values),
        "ci95": None,
    }
    return part | {"samples": samples, "skipped": [], "bytes": [], "settings": {}} | more


def result_file(method, parts, path="meta-llama/Meta-Llama-3-8B-Instruct", **more):
    """A method's file. parts: payloads by task."""
    adapted = method == "pod"
    model = {
        "kind": "adapted" if adapted else "dense",
        "path": "runs/x/export" if adapted else path,
        "dtype": "bfloat16",
    }
    if method == "pod-unadapted":
        model["kind"] = "unadapted"
    return {
        "schema": 2,
        "method": method,
        "status": "finished",
        "failed": {},
        "title": f"what {method} is",
        "spec": method,
        "row": f"{method} of {path}",
        "seed": 0,
        "config": {"tasks": list(parts), "method_options": {}},
        "model": model,
        "environment": ENVIRONMENT,
        "refused": {},
        "parts": {name: {"fingerprint": name, "seconds": 1.0, **part} for name, part in parts.items()},
        **more,
    }


def speed_parts(methods, length=2048):
    """Decode speed, bytes, memory and largest batches: the part `efficiency` by method."""
    parts = {}
    for method in methods:
        rate = 12.0 * (1 + 0.4 * (1 - SHARES[method]))
        spread = {"median": rate, "min": 0.95 * rate, "max": 1.04 * rate, "repeats": 5}
        held = stated(method, length)
        held["bytes"] = held["bytes"] or (held["dense_bytes"] if method == "full" else held["pod_bytes"])
        held["bytes_over_pod"] = held["bytes"] / held["pod_bytes"]
        memory = {"peak": 9 * 10**9, "kv": held["bytes"], "activations": 4 * 10**8}
        row = {
            "length": length,
            "decode_tokens_per_second": spread,
            "speed_over_full": {key: value / 12.0 for key, value in spread.items() if key != "repeats"},
            "time_to_first_token_seconds": 1.5,
            "bytes": held,
            "bytes_by_part": {"keys": held["bytes"] * 45 // 100, "values": held["bytes"] * 55 // 100},
            "memory": {
                "counted_by": "live storages",
                "weights": 8 * 10**9,
                "prefill": memory,
                "decode": memory,
            },
        }
        pair = {"prompt": 2048, "generated": 8192, "limit_bytes": 2**34}
        pair |= {"batch": int(10 / SHARES[method]), "batch_over_full": 1 / SHARES[method]}
        parts[method] = {"lengths": [row], "max_batch": [pair], "environment": ENVIRONMENT}
    return parts


def write_runs(folder):
    """Two runs: one of six methods on everything, one of SnapKV at three budgets. Returns their folders."""
    first, second = Path(folder) / "run_a", Path(folder) / "run_b"
    methods = ["full", "pod", "pod-unadapted", "snapkv", "streamingllm", "razor"]
    files = {}
    for method in methods:
        parts = {
            "perplexity": perplexity(method),
            "niah": needles(method),
            "mmlu_anatomy": choices(method),
            "mmlu": group(method),
        }
        for task in LONGBENCH:
            parts[f"pod_longbench_{task}"] = scores(method, task, skipped=3 if task == "gov_report" else 0)
        for task in RULER:
            parts[f"pod_ruler_4k_{task}"] = scores(method, task, level=0.85)
        parts["tau_curve"] = curves(method)
        files[method] = result_file(method, parts)
    del files["razor"]["parts"]["tau_curve"]
    files["razor"]["refused"] = {"tau_curve": "razor has no gate: only PoD methods skip distant tokens"}
    del files["streamingllm"]["parts"]["mmlu"]
    files["streamingllm"] |= {
        "status": "failed",
        "failed": {"mmlu": "out of memory"},
    }
    for method, part in speed_parts(methods).items():
        files[method]["parts"]["efficiency"] = part
    _write(first / "eval", files)
    budgets = {}
    for method in ("full", "snapkv@12.5%", "snapkv@25%", "snapkv@50%"):
        parts = {
            f"pod_longbench_{task}": scores(method, task, template=task == "trec") for task in LONGBENCH[1:]
        }
        parts = parts if method == "full" else {"niah": needles(method), **parts}
        budgets[method] = result_file(method, parts)
    del budgets["full"]
    _write(second / "eval", budgets)
    return first, second


def _write(folder, files):
    folder.mkdir(parents=True)
    for method, content in files.items():
        name = method.replace("%", "p")
        (folder / f"{name}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    print(*write_runs(sys.argv[1]))
