"""The model card of an export.

It says what the model is, what memory it saves, how to load it, what it was trained on, and what its limits
are.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from pod.export.served import check_servable, target_of
from pod.export.served_card import saved_in_vllm, serving, serving_limits, sizes_in_vllm
from pod.modeling.model.config import PodConfig

LENGTHS = (2048, 8192, 32_768, 131_072)
"""The lengths in tokens for which the card shows savings; those beyond the model's context are left out."""
_PAPERS = {
    "pod": "[Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity]"
    "(https://arxiv.org/abs/2412.02252)",
    "cla": "[Reducing Transformer Key-Value Cache Size with Cross-Layer Attention]"
    "(https://arxiv.org/abs/2405.12981)",
    "window": "[Longformer: The Long-Document Transformer](https://arxiv.org/abs/2004.05150)",
}
_IDEAS = {
    "cla": "Groups of neighbouring layers share one set of keys and values.",
    "window": "Every layer sees and keeps only the most recent tokens.",
}
_TEMPLATE = """---
{{ card_data }}
---
{{ sections|join("\n\n") }}"""
_LOADING = """## How to load it

You need transformers only. The modeling code is in this folder.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "path or hub id of this model"
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=30)[0]))
```

`generate()` makes the smaller cache by itself. `attn_implementation` can be `"sdpa"`, \
`"flash_attention_2"` or `"eager"`."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights come from. A card leaves out what is not known (None or empty)."""

    base: str | None = None
    """The model that training started from: a hub id, a folder, or as recipes name it."""
    sources: tuple[str, ...] = ()
    """The sources of the training text, as recipes name them."""
    context_length: int | None = None
    """Tokens of a training sequence."""
    num_tokens: int | None = None
    """Tokens that training read."""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence of the weights, as the card of the base model says it."""

    fields: dict[str, str]
    """The fields `license`, `license_name` and `license_link` of that card."""
    files: tuple[str, ...] = ()
    """The licence files of that model, by their names in the export."""


def card(
    name: str,
    config: PodConfig,
    origin: Origin,
    licence: Licence,
    results: list[dict[str, Any]],
    format: str = "hf",
) -> str:
    """The card as Markdown, with the fields that the hub reads.

    Args:
        name: the name of the export.
        results: contents of an evaluation's result files, of the dense model and of this one; may be empty.
        format: the format of the export, hf or vllm.
    """
    base = _shown(origin.base) if origin.base else None
    is_hub_id = base is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", base)
    fields = ModelCardData(
        license=licence.fields["license"],
        license_name=licence.fields.get("license_name"),
        license_link=licence.fields.get("license_link"),
        base_model=base if is_hub_id else None,
        library_name="transformers" if format == "hf" or target_of(config).is_stock else "vllm",
        pipeline_tag="text-generation",
        tags=["pod-kv", "kv-cache", config.own_method],
    )
    sections = [
        f"# {name}",
        *_savings(config, base, format),
        _LOADING if format == "hf" else serving(config),
        *_heads(config),
        *_training(origin),
        *_measured(results),
        _limits(config, format),
        _licence(licence, base),
    ]
    return str(ModelCard.from_template(fields, template_str=_TEMPLATE, sections=sections)) + "\n"


def saved_share(config: PodConfig, n: int) -> float:
    """The share of bytes that this model's own cache saves at `n` tokens.

    The share is relative to the base model's cache, which holds `dense_tokens` in 16 bits.
    """
    plan = config.sharing_plan
    if config.layout == "cla":
        return plan.share_followers
    near = min(n, config.num_sink_tokens + config.num_recent_tokens)
    every = plan.saving(n, config.num_sink_tokens, config.num_recent_tokens) * n * plan.num_layers
    # `every` counts layers that were trained with windows as if the plan had shortened them: they save
    # nothing.
    return (every - len(_own_windows(config)) * (n - near)) / dense_tokens(config, n)


def dense_tokens(config: PodConfig, n: int) -> int:
    """Tokens that the model's cache holds without a plan after `n` tokens, summed over the layers.

    A layer that was trained with a window holds at most its window.
    """
    own = _own_windows(config)
    return n * (config.num_hidden_layers - len(own)) + sum(min(n, window) for window in own)


def _own_windows(config: PodConfig) -> list[int]:
    """The windows, in tokens, of the layers that were trained with one."""
    return [window for window in config.layer_windows or () if window is not None]


def _shown(source: str) -> str:
    """The name of a source: for a path of this machine, only its last part."""
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _window_pairs(config: PodConfig) -> int:
    """The number of (layer, KV head) pairs in layers that were trained with a window."""
    return len(_own_windows(config)) * config.num_key_value_heads


def _is_dense(config: PodConfig) -> bool:
    """Whether the model keeps all that its base keeps: the plan changes no layer."""
    plan = config.sharing_plan
    leads = plan.num_pairs - _window_pairs(config)
    return config.layout == "pod" and not plan.packs and plan.num_leads == leads


def _trained_windows(config: PodConfig) -> str:
    """A sentence about the layers that were trained with windows; empty where there are none."""
    own = _own_windows(config)
    layers = f"{len(own)} of {config.num_hidden_layers} layers"
    seen = f"were trained to see only their last {max(own, default=0):,} tokens and keep only these"
    return f" {layers} {seen}." if own else ""


def _savings(config: PodConfig, base: str | None, format: str) -> Iterator[str]:
    """Sentences that say what the model is, and a table of its cache and the original one, in megabytes.

    For format vllm the cache is vLLM's, unless some layers were trained with windows.
    """
    model = base or "a language model"
    if _is_dense(config):
        kept = "It keeps the keys and values of every token in every layer: no layer shares them."
        own = f"It shares no keys and values between layers.{_trained_windows(config)}"
        yield f"This is {model} with an ordinary KV cache. {own if _own_windows(config) else kept}"
        return
    most = config.max_position_embeddings
    lengths = [n for n in LENGTHS if n <= most] or [most]
    in_vllm = format == "vllm" and not _own_windows(config)
    share_at = saved_in_vllm if in_vllm else saved_share
    share = share_at(config, lengths[-1])
    saving = f"takes {share:.0%} less memory at {lengths[-1]:,} tokens than the original one"
    paper = f"The method comes from {_PAPERS[config.layout]}."
    yield f"This is {model} with a KV cache that {saving}. {_idea(config)} {paper}"
    if in_vllm:
        yield sizes_in_vllm(config, lengths)
        return
    each = 4e-6 * config.num_key_value_heads * config.head_dim  # MB per layer and token
    rows = [
        f"| {n:,} | {dense:,.1f} | {dense * (1 - saved):,.1f} | {saved:.1%} |"
        for n, dense, saved in ((n, dense_tokens(config, n) * each, saved_share(config, n)) for n in lengths)
    ]
    heads = "| tokens | original KV cache, MB (16 bits) | this model, MB | saved |"
    yield "\n".join([heads, "|---|---|---|---|", *rows])
    yield "The sizes are for one sequence."


def _idea(config: PodConfig) -> str:
    """How memory is saved, in a sentence or two that are true of this plan."""
    if config.layout != "pod":
        return _IDEAS[config.layout]
    plan = config.sharing_plan
    windows = plan.num_windows - _window_pairs(config)
    said = []
    if plan.num_followers:
        said.append("Some attention heads reuse the attention of a lower layer.")
    if windows:
        count = "Some" if plan.num_leads or plan.num_followers else "All"
        by_layer = all(len(set(row)) == 1 for row in plan.lead)
        said.append(f"{count} {'layers' if by_layer else 'attention heads'} keep only nearby tokens.")
    if plan.packs:
        said.append("Keys and values are stored in 4 bits in some layers.")
    return " ".join(said)


def _heads(config: PodConfig) -> Iterator[str]:
    """Which heads keep what, as sentences and as a map."""
    if _is_dense(config):
        return
    plan = config.sharing_plan
    yield "## Which heads keep what"
    yield _roles(config) + _trained_windows(config)
    signs = [
        "".join(_sign(lead, layer) for layer, lead in enumerate(heads))
        for heads in zip(*plan.lead, strict=True)
    ]
    rows = "\n".join(f"KV head {head:2}  {row}" for head, row in enumerate(signs))
    yield (
        "The map shows the first layer on the left. `L` leads, `f` follows the nearest lead on its left, "
        f"`.` keeps nearby tokens only.\n\n```\n{rows}\n```"
    )


def _sign(lead: int | None, layer: int) -> str:
    """The letter of a pair in the map of `_heads`."""
    if lead is None:
        return "."
    return "L" if lead == layer else "f"


def _roles(config: PodConfig) -> str:
    """Sentences that say how many pairs have each role, and what they keep."""
    plan = config.sharing_plan
    windows = plan.num_windows - _window_pairs(config)
    first = f"the first {config.num_sink_tokens} and " if config.num_sink_tokens else ""
    near = f"{first}the last {config.num_recent_tokens} tokens"
    follows = "They store nothing and read its keys and values."
    if config.layout != "cla":
        follows = (
            f"They reuse its attention for all tokens except {near}. "
            "They keep all values, but no distant keys."
        )
    shared = sum(any(lead not in (layer, None) for lead in row) for layer, row in enumerate(plan.lead))
    said = [f"The model has {plan.num_pairs} pairs of a layer and a KV head."]
    if plan.num_leads:
        said.append(f"{plan.num_leads} pairs lead: they keep every key and value.")
    if plan.num_followers:
        where = f"in {shared} of {plan.num_layers} layers"
        said.append(f"{plan.num_followers} pairs {where} follow a lead in a lower layer. {follows}")
    if windows:
        said.append(
            f"{windows} {'pair sees and keeps' if windows == 1 else 'pairs see and keep'} only {near}."
        )
    if config.kv_bits is not None:
        packed = [
            f"{bits} bits in {config.kv_bits.count(bits)} layers" for bits in sorted(set(config.kv_bits))
        ]
        said.append(f"Keys and values are stored in {', '.join(packed)}.")
        if plan.packs:
            said.append(f"At least the newest {config.kv_residual} tokens stay in 16 bits.")
    return " ".join(said)


def _training(origin: Origin) -> Iterator[str]:
    """The section about the training data; none where the sources are not known."""
    if not origin.sources:
        return
    read = "" if origin.num_tokens is None else f" on {origin.num_tokens:,} tokens"
    length = "" if origin.context_length is None else f" in sequences of {origin.context_length:,}"
    sources = "\n".join(f"* {_shown(source)}" for source in origin.sources)
    yield f"## Training data\n\nThe model was trained{read}{length}. The text comes from:\n\n{sources}"


def _measured(results: list[dict[str, Any]]) -> Iterator[str]:
    """The section with a table of results; none without results."""
    if not results:
        return
    tasks = dict.fromkeys(task for one in results for task, part in one["parts"].items() if "value" in part)
    rows = []
    for task in tasks:
        parts = [one["parts"].get(task) for one in results]
        metric = next(part["metric"] for part in parts if part is not None)
        rows.append([task, metric, *map(_value, parts)])
    titles = ["task", "metric", *(one["title"] for one in results)]
    lines = [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
    yield "## Measured\n\n" + "\n".join(lines) + "\n\nBrackets hold 95 % intervals."


def _value(part: dict[str, Any] | None) -> str:
    """A result with its 95 % interval, as text."""
    if part is None:
        return "–"
    low, high = part.get("ci95") or (None, None)
    return f"{part['value']:.4g}" + (f" [{low:.4g}, {high:.4g}]" if low is not None else "")


def _limits(config: PodConfig, format: str) -> str:
    """The section about the limits of the model."""
    lines = [f"The model reads up to {config.max_position_embeddings:,} tokens."]
    shares = not _is_dense(config)
    if shares and format == "hf" and config.layout != "cla" and not config.sharing_plan.packs:
        near = config.num_sink_tokens + config.num_recent_tokens
        lines.append(f"Up to {near:,} tokens the KV cache is as large as the original one.")
    if format == "vllm":
        lines += serving_limits(config)
    else:
        lines += [_engines_of(config)] if shares else []
        lines.append("`trust_remote_code=True` runs the Python code in this folder.")
    return "## Limits\n\n" + "\n".join(f"* {line}" for line in lines)


def _engines_of(config: PodConfig) -> str:
    """A sentence that says whether serving engines run the model, and what they need for it."""
    try:
        check_servable(config)
    except ValueError:
        return "vLLM and SGLang cannot run this cache layout. Use transformers or pod-kv."
    return "vLLM does not load this folder, but the one that `pod export --format vllm` writes of this model."


def _licence(licence: Licence, base: str | None) -> str:
    """The section about the licences of weights and code."""
    model = base or "the model that they were made from"
    found = licence.fields["license"]
    known = f"`{found}`" if found != "unknown" else "unknown here, so look it up before you pass them on"
    files = f" ({', '.join(f'`{name}`' for name in licence.files)})" if licence.files else ""
    weights = f"The weights have the licence of {model}: {known}{files}."
    return f"## Licences\n\n{weights} The file `LICENSE` holds the licence of the code."
