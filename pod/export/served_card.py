"""The parts of a model card that are about serving engines, for exports of format `vllm`."""

from collections.abc import Iterator, Sequence

from pod.export.served import GRANITE, OWN, Target, target_of, windows_of_layers
from pod.modeling.model.config import PodConfig
from pod.plan.args import ExploreArgs
from pod.plan.engines import BATCHES_IN_FLIGHT, BLOCK_TOKENS, EngineCache

VLLM, TRANSFORMERS, SGLANG = "0.32.0", "5.23.0", "0.5.23"
"""The versions that exports were tried with: vLLM on CPUs, in float32. SGLang's source was only read."""
PLUGIN = "pip install ./integrations/vllm"
"""How to install the plugin, in a clone of pod-kv."""

EIGHT_BITS = "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window"
"""Options of vLLM for a cache in 8 bits, but for layers with windows (benchmarks/serving_fp8.py)."""

BATCH_TOKENS = ExploreArgs.engine_batch_tokens
"""Tokens of prompts that vLLM reads at a time, in the card and in its command."""


def saved_in_vllm(config: PodConfig, n: int) -> float:
    """The share of the original cache that vLLM saves for a request of n tokens, once its prompt is read."""
    own = _cache(config)
    return 1 - own.request_bytes(n, reading=False) / own.dense.request_bytes(n, reading=False)


def sizes_in_vllm(config: PodConfig, lengths: Sequence[int]) -> str:
    """A table of the megabytes that vLLM holds for one request of so many tokens.

    Its columns are the original model, this one while it reads the prompt, this one afterwards, and the share
    that is saved then.
    """
    own = _cache(config)
    lines = ["| tokens | original KV cache, MB (16 bits) | this model, prompt read | then | saved |"]
    lines.append("|---|---|---|---|---|")
    for n in lengths:
        sizes = (
            own.dense.request_bytes(n, reading=False),
            *(own.request_bytes(n, reading=reading) for reading in (True, False)),
        )
        cells = " | ".join(f"{size / 1e6:,.1f}" for size in sizes)
        lines.append(f"| {n:,} | {cells} | {saved_in_vllm(config, n):.1%} |")
    note = (
        f"The sizes are for one request in vLLM, with blocks of {BLOCK_TOKENS} tokens. While a prompt is "
        f"read, layers with windows also hold the tokens of {BATCHES_IN_FLIGHT} batches of {BATCH_TOKENS:,}. "
        "vLLM's own default is up to 16,384 on large GPUs: name the number when you start it."
    )
    return "\n".join(lines) + f"\n\n{note}"


def _cache(config: PodConfig) -> EngineCache:
    """What vLLM holds of a model, all of whose windows are equal and come from its plan."""
    windows = windows_of_layers(config)
    count = sum(window is not None for window in windows)
    return EngineCache(
        num_full=len(windows) - count,
        num_windows=count,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window=max((window for window in windows if window is not None), default=0),
        tokens_in_flight=BATCHES_IN_FLIGHT * BATCH_TOKENS,
    )


def serving(config: PodConfig) -> str:
    """The section of the card that says how to serve the model, and which engines were tried."""
    target = target_of(config)
    install = (
        f"{PLUGIN}  # once, in a clone of pod-kv: vLLM finds the plugin by itself\n"
        if target.needs_plugin
        else ""
    )
    lines = [
        "## How to serve it",
        f"```\n{install}{serve_command('NAME')}  # the folder or hub id of this model\n```",
        _kept(config),
        "Engines that were tried with models of this kind (not with this model itself), in float32. "
        "Greedy tokens and log-likelihoods of prompts were those of pod-kv:",
        "\n".join(["| engine | version | how |", "|---|---|---|", *_engines(target)]),
    ]
    return "\n\n".join(lines)


def serving_limits(config: PodConfig) -> Iterator[str]:
    """Sentences about an 8-bit cache, and about what cannot load this folder.

    Other engines cannot, nor can `pod.load_model`.
    """
    target = target_of(config)
    if config.sink_layers and None in windows_of_layers(config):
        yield (
            "An 8-bit cache harms layers with a constant, which moves all their keys and values (measured "
            "with SmolLM2-135M on a CPU). They hold few tokens, so leave them out of it: "
            f"`{EIGHT_BITS}`. On GPUs this needs compute capability 8.9 or more."
        )
    if target == GRANITE:
        yield (
            f"SGLang {SGLANG} has this architecture, but without biases in attention, "
            "which it skips without a word: it computes another model (read in its source, not run)."
        )
    elif any(window is not None for window in windows_of_layers(config)):
        yield (
            f"Engines that do not read `layer_types`, as SGLang {SGLANG}, compute full attention "
            "in every layer, which is another model and needs the memory of the original one "
            "(read in its source, not run)."
        )
    if target in (GRANITE, OWN):
        yield "pod-kv loads the other export of this model (`export.format=hf`), not this folder."


def serve_command(folder: object) -> str:
    """The command that serves an export of format `vllm`."""
    return f"vllm serve {folder} --max-num-batched-tokens {BATCH_TOKENS}"


def _kept(config: PodConfig) -> str:
    """Sentences that say how many layers keep every token or a window in vLLM, and how many have a sink."""
    windows = windows_of_layers(config)
    lengths = [window for window in windows if window is not None]
    if not lengths:
        return "Every layer keeps every token."
    kept = (
        f"vLLM keeps every token in {len(windows) - len(lengths)} of {len(windows)} layers, and the last "
        f"{lengths[0]:,} tokens in the others; while it reads a prompt, these hold up to "
        f"{BATCHES_IN_FLIGHT} x `--max-num-batched-tokens` more."
    )
    sinks = len(config.sink_layers)
    return f"{kept} In {sinks} layers a constant stands for the first tokens." if sinks else kept


def _engines(target: Target) -> Iterator[str]:
    """The rows of the table of engines."""
    how = "with the plugin" if target.needs_plugin else f"as `{target.architecture}`, without a plugin"
    yield f"| vLLM, CPU | {VLLM} | {how} |"
    if target.is_stock:
        yield f"| transformers | {TRANSFORMERS} | as `{target.model_type}`, without other code |"
    else:
        yield f"| transformers | {TRANSFORMERS} | refuses the folder: it knows no `{target.model_type}` |"
