"""The model card of an export: what is shared, what that saves, where the weights come from, how they are loaded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pod.modeling.shipped.config import PodConfig

LENGTHS = (2048, 8192, 32_768, 131_072)
"""Tokens at which savings are told, as far as the model reads."""
_PAPERS = {
    "pod": "[Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity]"
    "(https://arxiv.org/abs/2412.02252)",
    "cla": "[Reducing Transformer Key-Value Cache Size with Cross-Layer Attention](https://arxiv.org/abs/2405.12981)",
    "window": "[Longformer: The Long-Document Transformer](https://arxiv.org/abs/2004.05150)",
}
_LOADING = """## How to load it

With transformers alone; the code stands beside the weights.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "path or hub id of this model"
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=30)[0]))
```

`generate()` makes the cache that holds less. `attn_implementation` may be `"sdpa"` (the fastest here), `"flash_attention_2"` or `"eager"`."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights come from, as far as it is known; a card leaves out what is not."""

    base: str | None = None
    """The model that training started from: a hub id, a folder, or as recipes name it."""
    sources: tuple[str, ...] = ()
    """Of the training text, as recipes name them."""
    context_length: int | None = None
    """Tokens of a training sequence."""
    num_tokens: int | None = None
    """Tokens that training read."""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """What the weights may be used for, as the card of the model says that they come from."""

    fields: dict[str, str]
    """`license`, `license_name` and `license_link` of that card."""
    files: tuple[str, ...] = ()
    """Its licence files, by their names in the export."""


def card(
    name: str, config: PodConfig, origin: Origin, licence: Licence, results: list[dict[str, Any]]
) -> str:
    """Markdown with the fields that the hub reads.

    Args:
        name: of the export.
        results: result files of an evaluation, of this model and of the dense one.
    """
    base = _shown(origin.base) if origin.base else None
    fields: dict[str, Any] = {
        **licence.fields,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pod-kv", "kv-cache", config.own_method],
    }
    if base is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        fields["base_model"] = base
    sections = [
        f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n# {name}",
        *_sharing(config, base),
        *_training(origin),
        *_measured(results),
        _LOADING,
        _licence(licence, base),
    ]
    return "\n\n".join(sections) + "\n"


def saved_share(config: PodConfig, n: int) -> float:
    """Share of the bytes of `dense_tokens` in 16 bits that this model's own cache saves at `n` tokens."""
    plan = config.sharing_plan
    if config.layout == "cla":
        return plan.share_followers
    near = min(n, config.num_sink_tokens + config.num_recent_tokens)
    every = plan.saving(n, config.num_sink_tokens, config.num_recent_tokens) * n * plan.num_layers
    # layers that were trained with windows counted as the plan's: they save nothing
    return (every - len(_own_windows(config)) * (n - near)) / dense_tokens(config, n)


def dense_tokens(config: PodConfig, n: int) -> int:
    """Tokens of all layers together that the model holds without a plan at `n` tokens: layers trained with a window hold that window."""
    own = _own_windows(config)
    return n * (config.num_hidden_layers - len(own)) + sum(min(n, window) for window in own)


def _own_windows(config: PodConfig) -> list[int]:
    return [window for window in config.layer_windows or () if window is not None]


def _shown(source: str) -> str:
    """A source without the folders of one machine."""
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _window_pairs(config: PodConfig) -> int:
    """(layer, KV head) pairs of layers that were trained with a window."""
    return len(_own_windows(config)) * config.num_key_value_heads


def _sharing(config: PodConfig, base: str | None) -> Iterator[str]:
    plan, model, own = config.sharing_plan, base or "A language model", _own_windows(config)
    trained = f"{len(own)} of {plan.num_layers} layers were trained to see their last {max(own, default=0):,} tokens and hold these"
    if config.layout == "pod" and not plan.packs and plan.num_leads == plan.num_pairs - _window_pairs(config):
        said = "with the keys and values of every token in every layer: nothing is shared"
        yield f"{model}, {said}; {trained}." if own else f"{model}, {said}."
        return
    most = config.max_position_embeddings
    lengths = [n for n in LENGTHS if n <= most] or [most]
    share = saved_share(config, lengths[-1])
    yield f"{model} with {share:.0%} less KV cache at {lengths[-1]:,} tokens ({_PAPERS[config.layout]})."
    each = 4e-6 * plan.num_key_value_heads * config.head_dim  # MB per layer and token
    rows = [
        f"| {n:,} | {dense:,.1f} | {dense * (1 - saved):,.1f} | {saved:.1%} |"
        for n, dense, saved in ((n, dense_tokens(config, n) * each, saved_share(config, n)) for n in lengths)
    ]
    yield "\n".join(
        ["| tokens | dense KV cache, MB in 16 bits | this model, MB | saved |", "|---|---|---|---|", *rows]
    )
    yield "## Who shares what"
    yield f"{_roles(config)} {trained}." if own else _roles(config)
    signs = [
        "".join(_sign(lead, layer) for layer, lead in enumerate(heads))
        for heads in zip(*plan.lead, strict=True)
    ]
    heads = "\n".join(f"KV head {head:2}  {row}" for head, row in enumerate(signs))
    yield f"Layers from left to right: `L` leads, `f` follows the last lead on its left, `.` keeps its window.\n\n```\n{heads}\n```"


def _sign(lead: int | None, layer: int) -> str:
    return "." if lead is None else "L" if lead == layer else "f"


def _roles(config: PodConfig) -> str:
    plan = config.sharing_plan
    windows = plan.num_windows - _window_pairs(config)
    near = f"{config.num_sink_tokens} first and {config.num_recent_tokens} last tokens"
    follows = "hold nothing and use its keys and values"
    if config.layout != "cla":
        follows = f"use its attention beyond the {near}, and hold values but no distant keys"
    shared = sum(any(lead not in (layer, None) for lead in row) for layer, row in enumerate(plan.lead))
    said = [
        f"Of {plan.num_pairs} (layer, KV head) pairs {plan.num_leads} lead and hold every key and value, {plan.num_followers} in "
        f"{shared} of {plan.num_layers} layers follow a lead below: they {follows}",
        f"; {windows} see and hold the {near} only" if windows else "",
    ]
    if config.kv_bits is not None:
        packed = [f"{bits} bits in {config.kv_bits.count(bits)}" for bits in sorted(set(config.kv_bits))]
        said.append(f". Bits of keys and values: {', '.join(packed)} layers")
    return "".join(said) + "."


def _training(origin: Origin) -> Iterator[str]:
    if not origin.sources:
        return
    read = "" if origin.num_tokens is None else f" on {origin.num_tokens:,} tokens"
    length = "" if origin.context_length is None else f", in sequences of {origin.context_length:,}"
    sources = "\n".join(f"* {_shown(source)}" for source in origin.sources)
    yield f"## Training data\n\nAdapted{read}{length}, of:\n\n{sources}"


def _measured(results: list[dict[str, Any]]) -> Iterator[str]:
    if not results:
        return
    tasks = dict.fromkeys(task for one in results for task, part in one["parts"].items() if "value" in part)
    rows = [
        [task, next(one["parts"][task]["metric"] for one in results if task in one["parts"])]
        + [_value(one["parts"].get(task)) for one in results]
        for task in tasks
    ]
    titles = ["task", "metric", *(one["title"] for one in results)]
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    yield "## Measured\n\n" + "\n".join(lines) + "\n\nIn brackets: 95 % intervals."


def _value(part: dict[str, Any] | None) -> str:
    if part is None:
        return "–"
    low, high = part.get("ci95") or (None, None)
    return f"{part['value']:.4g}" + (f" [{low:.4g}, {high:.4g}]" if low is not None else "")


def _licence(licence: Licence, base: str | None) -> str:
    model = base or "the model that they were made from"
    found = licence.fields["license"]
    known = f"`{found}`" if found != "unknown" else "not told beside it: look it up before you pass them on"
    files = f" ({', '.join(f'`{name}`' for name in licence.files)})" if licence.files else ""
    return f"## Licences\n\nThe weights are under the licence of {model}: {known}{files}. The code is under `LICENSE`."
