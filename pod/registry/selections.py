"""The registry's entries of selections (which tokens stay) and channels (which channels of keys stay).

A method of the axis ``channels`` works on the tokens that a selection keeps. Lists and reports show the
entries in this order.
"""

from typing import Any

from pod.registry.method import Method, Parameter

# -- what several entries have in common ---------------------------------------------------------------------

PREFILL = {
    "prefill": Parameter(
        "exact",
        "exact: compress when the prompt ends; streaming: after every chunk_size tokens of it",
        choices=("exact", "streaming"),
    ),
    "chunk_size": Parameter(
        512, "tokens of a prompt after which streaming prefill compresses (tokens)", least=1
    ),
}
"""Parameters of methods that can also compress while they read a prompt."""
SINKS = {"num_sink_tokens": Parameter(4, "first tokens that are always kept (tokens)", least=0)}


def ranking(window: int, kernel: int, pool: str) -> dict[str, Parameter]:
    """The parameters of SnapKV's ranking of the prompt's tokens, with these defaults.

    Args:
        window: tokens at the end of the prompt whose attention ranks the others.
        kernel: tokens over which the scores are pooled.
        pool: how they are pooled, ``avg`` or ``max``.
    """
    return {
        "window": Parameter(
            window, "observation window at the end of the prompt, always kept (tokens)", least=1
        ),
        "kernel": Parameter(kernel, "width of the pooling over neighbouring tokens (tokens)", least=1),
        "pool": Parameter(pool, "avg or max", choices=("avg", "max")),
    }


MEMORY = {
    "chunk_size": Parameter(1024, "largest mean chunk (tokens)", least=1),
    **ranking(window=32, kernel=5, pool="avg"),
    "num_sink_tokens": Parameter(4, "first slots that the streamingllm pruner keeps (tokens)", least=0),
}
"""Parameters of ``imdc``, ``im`` and ``fm``, which read a prompt in chunks into a memory."""
MEMORY_GROWTH = {
    "function": Parameter(
        "linear",
        "growth of the memory: linear, sqrt, square, square-sqrt, adaptive",
        choices=("linear", "sqrt", "square", "square-sqrt", "adaptive"),
    ),
    "update": Parameter(
        True, "compress memory and chunk together; False: compress the chunk and append it (B.4)"
    ),
}
"""Further parameters of ``imdc`` and ``im``, whose memory grows."""
OF_MEMORIES: dict[str, Any] = {
    "axis": "selection",
    "file": "imdc",
    "paper": 'IMDC, "Memorize Step by Step" (Zeng et al., 2024)',
    "url": "https://aclanthology.org/2024.emnlp-main.1169",
    "takes_budget": True,
    "inner": ("snapkv", "streamingllm"),
    "refuses_pod": "each layer counts positions in its own memory, so layers have no common distant keys",
    "reads_any_length": True,
    "reads_in_chunks": True,
}
"""What the entries of ``imdc``, ``im`` and ``fm`` have in common."""

# Reasons why methods cannot be combined with the layout pod (`Method.refuses_pod`).
NO_DISTANT_TOKENS = "this method keeps no distant tokens whose keys layers could share"
OWN_STATISTICS = (
    "each layer drops tokens by its own statistics, while followers read the keys and logits of their lead "
    "slot by slot"
)
MOVES_BUDGET = (
    "this method moves budget between the heads of a layer; followers copy the choice of their lead, so "
    "their layers could exceed the budget"
)

# -- the entries ---------------------------------------------------------------------------------------------

SELECTIONS = (
    Method(
        name="streamingllm",
        axis="selection",
        file="windowed",
        title="keeps the first and the recent tokens",
        frees="keys and values of all tokens but the first and the recent ones",
        paper="StreamingLLM (Xiao et al., 2024)",
        url="https://arxiv.org/abs/2309.17453",
        parameters=SINKS,
        takes_budget=True,
        refuses_pod=NO_DISTANT_TOKENS,
        grows=False,
        reads_any_length=True,
        takes_chunks=True,
    ),
    Method(
        name="lm_infinite",
        axis="selection",
        file="windowed",
        title="keeps the first and the recent tokens, with capped distances",
        frees="keys and values of all tokens but the first and the recent ones",
        paper="LM-Infinite (Han et al., 2024)",
        url="https://arxiv.org/abs/2308.16137",
        parameters=SINKS,
        takes_budget=True,
        refuses_pod=NO_DISTANT_TOKENS,
        grows=False,
        reads_any_length=True,
        takes_chunks=True,
    ),
    Method(
        name="wa",
        axis="selection",
        file="windowed",
        title="keeps the recent tokens only, while it reads the prompt too",
        frees="keys and values of all tokens but the recent ones",
        paper="Window attention (Beltagy et al., 2020), PoD's baseline WA",
        url="https://arxiv.org/abs/2004.05150",
        takes_budget=True,
        refuses_pod=NO_DISTANT_TOKENS,
        grows=False,
        takes_chunks=True,
    ),
    Method(
        name="local_window",
        axis="selection",
        file="sliding",
        title="reads the whole prompt, then keeps the recent tokens only",
        frees="keys and values of all tokens but the recent ones, once the prompt has ended",
        paper="Local window, a baseline of the D2O paper (Wan et al., 2024)",
        url="https://arxiv.org/abs/2406.13035",
        parameters=PREFILL,
        takes_budget=True,
        refuses_pod=NO_DISTANT_TOKENS,
        grows=False,
    ),
    Method(
        name="snapkv",
        axis="selection",
        file="shared_selection",
        title="keeps tokens to which the end of the prompt attends",
        frees="prompt tokens that the end of the prompt does not attend to; decoded tokens stay",
        paper="SnapKV (Li et al., 2024)",
        url="https://arxiv.org/abs/2404.14469",
        parameters=ranking(window=32, kernel=5, pool="avg") | PREFILL,
        takes_budget=True,
    ),
    Method(
        name="pyramidkv",
        axis="selection",
        file="pyramidkv",
        title="like snapkv, with fewer tokens in higher layers",
        frees="prompt tokens that the end of the prompt does not attend to, more of them in higher layers",
        paper="PyramidKV (Cai et al., 2024)",
        url="https://arxiv.org/abs/2406.02069",
        parameters={
            **ranking(window=8, kernel=7, pool="max"),
            "beta": Parameter(20, "mean budget over the last layer's", least=1),
            **PREFILL,
        },
        takes_budget=True,
    ),
    Method(
        name="adakv",
        axis="selection",
        file="adakv",
        title="like snapkv, with more tokens in heads that need them",
        frees="prompt tokens that the end of the prompt does not attend to, "
        "fewer of them in heads that attend to many",
        paper="Ada-KV (Feng et al., 2024), Algorithms 1 and 2, with SnapKV's scores",
        url="https://arxiv.org/abs/2407.11550",
        parameters={
            **ranking(window=32, kernel=7, pool="max"),
            "safeguard": Parameter(
                0.2, "share of the budget that every head has, whatever the others need", least=0, most=1
            ),
            **PREFILL,
        },
        takes_budget=True,
        refuses_pod=MOVES_BUDGET,
    ),
    Method(
        name="expected_attention",
        axis="selection",
        file="expected_attention",
        title="keeps tokens to which future queries are expected to attend",
        frees="prompt tokens to which future queries are not expected to attend; decoded tokens stay",
        paper="Expected Attention (Devoto et al., 2025)",
        url="https://arxiv.org/abs/2510.00636",
        parameters={
            "num_sink_tokens": Parameter(4, "first tokens, always kept and not observed (tokens)", least=0),
            "num_future_positions": Parameter(
                512, "positions behind the prompt over which RoPE is averaged (tokens)", least=1
            ),
            "epsilon": Parameter(
                0.01, "added to the expected weight before it is multiplied by the value's norm", least=0
            ),
            **PREFILL,
        },
        takes_budget=True,
    ),
    Method(
        name="kvzip",
        axis="selection",
        file="kvzip",
        title="keeps tokens that the model reads when it repeats the text",
        frees="tokens to which the model does not attend when it repeats the text; "
        "later prompts and decoded tokens stay",
        paper="KVzip (Kim et al., 2025)",
        url="https://arxiv.org/abs/2505.23416",
        parameters={
            "repeat_ids": Parameter(
                None,
                "the request to repeat the text, as three lists of token ids; "
                "None: made by the tokenizer in the model's folder",
            ),
            "chunk_size": Parameter(2048, "the model repeats this many tokens at a time (tokens)", least=1),
            "num_sink_tokens": Parameter(4, "first tokens, always kept (tokens)", least=1),
        },
        takes_budget=True,
        refuses_pod=MOVES_BUDGET,
    ),
    Method(
        name="h2o",
        axis="selection",
        file="h2o",
        title="keeps the recent tokens and those with the most attention so far",
        frees="keys and values of all tokens but the recent ones and those with the most accumulated "
        "attention",
        paper="H2O (Zhang et al., 2023)",
        url="https://arxiv.org/abs/2306.14048",
        parameters={
            "num_recent_tokens": Parameter(
                None, "last tokens, always kept; None = half the budget (tokens)", least=1
            ),
            **PREFILL,
        },
        takes_budget=True,
        refuses_pod=OWN_STATISTICS,
        grows=False,
    ),
    Method(
        name="roco",
        axis="selection",
        file="roco",
        title="keeps tokens with high mean attention, or attention that varies a lot",
        frees="keys and values of the tokens with the lowest mean attention, unless it varies a lot",
        paper="RoCo (Ren and Zhu, 2024)",
        url="https://arxiv.org/abs/2402.06262",
        parameters={
            "num_sink_tokens": Parameter(4, "first tokens, always kept (tokens)", least=0),
            "num_recent_tokens": Parameter(10, "last tokens, always kept (tokens)", least=1),
            "protect_prefill": Parameter(
                0.1, "share of the budget protected by deviation when a prompt ends", least=0, most=1
            ),
            "protect_decode": Parameter(
                0.3, "share of the budget protected by deviation after a decoded token", least=0, most=1
            ),
            **PREFILL,
        },
        takes_budget=True,
        refuses_pod=OWN_STATISTICS,
        grows=False,
    ),
    Method(
        name="d2o",
        axis="selection",
        file="d2o",
        title="merges dropped tokens into similar ones that it keeps",
        frees="tokens with the least accumulated attention, after merging them into similar ones; "
        "dense layers keep more",
        paper="D2O (Wan et al., 2024)",
        url="https://arxiv.org/abs/2406.13035",
        parameters={
            "num_sink_tokens": Parameter(4, "first tokens, always kept (tokens)", least=0),
            "alpha": Parameter(
                3.0, "budget of a layer with dense attention over that of the others", least=1, most=1000
            ),
            "gate": Parameter(
                100.0,
                "variance of attention sums above which a layer is not dense; grows with the prompt",
            ),
            "normalize_gate": Parameter(
                False, "compare the gate with variance / tokens, from 0 to 1 at any length"
            ),
            "beta": Parameter(
                0.5, "weight of the newest similarity in the merging threshold", least=0, most=1
            ),
            "recent_share": Parameter(
                0.25,
                "recent tokens among all but the sinks: M / (N + M), so 3:1 is 0.25",
                least=0,
                most=1,
            ),
            "budget_rule": Parameter(
                "total",
                "total: all layers together fill the budget; printed: S = budget, and alpha S for dense "
                "layers",
                choices=("total", "printed"),
            ),
            "similarity": Parameter(
                "keys",
                "what to compare before a merge; both: keys with keys, values with values",
                choices=("keys", "values", "both"),
            ),
            "merge": Parameter(
                "weighted",
                "weights in a merge: by similarity, or all equal",
                choices=("weighted", "average"),
            ),
            **PREFILL,
        },
        takes_budget=True,
        refuses_pod="d2o merges keys in each layer separately, while followers read the keys of their lead",
        grows=False,
    ),
    Method(
        name="imdc",
        title="reads the prompt in shrinking chunks into a growing memory",
        frees="tokens that a pruner drops after each chunk of a prompt; "
        "memories grow to the budget as chunks shrink",
        parameters=MEMORY | MEMORY_GROWTH,
        **OF_MEMORIES,
    ),
    Method(
        name="im",
        title="reads the prompt in chunks into a growing memory",
        frees="tokens that a pruner drops after each chunk of a prompt; memories grow to the budget",
        parameters=MEMORY | MEMORY_GROWTH,
        **OF_MEMORIES,
    ),
    Method(
        name="fm",
        title="reads the prompt in chunks into a fixed memory",
        frees="tokens that a pruner drops after each chunk of a prompt; memories are of one size",
        parameters=MEMORY,
        **OF_MEMORIES,
    ),
    Method(
        name="quest",
        axis="selection",
        file="quest",
        title="keeps all tokens and reads only the best pages",
        frees="nothing: all tokens stay, and page bounds add 1 / page_size to the bytes. Decoding reads only "
        "budget tokens per query head. A codec unpacks all tokens first, so it saves bytes but no time",
        paper="Quest (Tang et al., 2024)",
        url="https://arxiv.org/abs/2406.10774",
        parameters={
            "page_size": Parameter(
                16, "consecutive tokens that are read or skipped together (tokens)", least=1
            ),
            "num_dense_layers": Parameter(2, "first layers, which read every token (layers)", least=0),
        },
        takes_budget=True,
    ),
    Method(
        name="simlayerkv",
        axis="selection",
        file="simlayerkv",
        title="lazy layers keep only a window",
        frees="tokens between the first and the last ones, in layers that attend to little else; "
        "the other layers keep all",
        paper="SimLayerKV (Zhang et al., 2024), §5, eqs. 1 to 3",
        url="https://arxiv.org/abs/2410.13846",
        parameters={
            "threshold": Parameter(
                0.9,
                "attention share of lazy layers (Llama-2 0.65, Llama-3 0.9, Mistral 0.8, Qwen 0.85)",
            ),
            "num_sink_tokens": Parameter(4, "first tokens that a lazy layer holds (tokens)", least=0),
            "num_recent_tokens": Parameter(1024, "last tokens that a lazy layer holds (tokens)", least=1),
            "detector": Parameter(
                "decode",
                "decode: judge by the first generated token; prefill: by the prompt's end",
                choices=("decode", "prefill"),
            ),
            "num_last_queries": Parameter(
                32, "prefill detector: queries at the prompt's end to average over (tokens)", least=1
            ),
            "exempt_last_layer": Parameter(
                False, "whether the last layer holds everything (the authors' Qwen setting)"
            ),
            "lazy_layers": Parameter(
                None, "lazy layers in place of those that a detector finds, as [0, 3] (a list)"
            ),
            "num_lazy_layers": Parameter(
                None, "draw this number of lazy_layers, or of all layers, at random (layers)", least=0
            ),
            "seed": Parameter(0, "seed of that draw"),
            **PREFILL,
        },
        refuses_pod="the method decides while it runs which layers keep their tokens, so no layer can rely "
        "on the keys of another",
    ),
    Method(
        name="razor",
        axis="selection",
        file="razor",
        title="retrieval heads keep all tokens, the others a window",
        frees="tokens between the first and the last ones in KV heads without a retrieval head; "
        "grows with the prompt by 1/compression",
        paper="RazorAttention (2024), §3.2, Algorithm 1, eqs. 4 and 5",
        url="https://arxiv.org/abs/2407.15891",
        parameters={
            "heads": Parameter(
                None, "file of `pod explore --heads`, gates (.tsv), a plan, lists of KV heads, or random"
            ),
            "share": Parameter(
                None,
                "share of KV heads that hold all, best first; None = the file's choice",
                least=0.0,
                most=1.0,
            ),
            "seed": Parameter(0, "seed of random heads; without share these are 15 % of all", least=0),
            "num_sink_tokens": Parameter(4, "first tokens that the other heads hold (tokens)", least=0),
            "num_recent_tokens": Parameter(
                4000, "recent tokens that the other heads hold at least (tokens)", least=1
            ),
            "compression": Parameter(
                5.0, "the others hold at least 1/compression of what a prompt's end has seen", least=1
            ),
            "compensation": Parameter(True, "keep the mean of all dropped tokens as one token"),
        },
        refuses_pod="followers have no distant keys of their own, so there is nothing to keep or to average",
    ),
    Method(
        name="minicache",
        axis="selection",
        file="minicache",
        title="pairs of layers share the directions of their keys and values",
        frees="one of two directions per token in the pairs of the deeper half of the layers "
        "(1.3 times fewer bytes at d = 128); no token is dropped",
        paper="MiniCache (Liu et al., 2024)",
        url="https://arxiv.org/abs/2405.14366",
        parameters={
            "block": Parameter(128, "decoded tokens that are merged at once (tokens)", least=1),
            "share": Parameter(
                0.05,
                "tokens of each merge that stay native, those with the largest angle (share)",
                least=0,
                most=1,
            ),
            "retained": Parameter(
                None, "total number of tokens that stay native; overrides share (tokens)", least=0
            ),
            "t": Parameter(
                0.6,
                "where the shared direction lies, from the shallower (0) to the deeper layer's (1)",
                least=0,
                most=1,
            ),
        },
        refuses_pod="both methods share between layers, so no two layers have keys of their own to merge",
    ),
)
CHANNELS = (
    Method(
        name="think",
        axis="channels",
        file="think",
        title="drops the least important channels of the prompt's keys",
        frees="a share (ratio) of the channels in the prompt's keys, a fifth of the bytes at 0.4; "
        "no token is dropped",
        paper="ThinK (Xu et al., 2024)",
        url="https://arxiv.org/abs/2407.21018",
        parameters={
            "ratio": Parameter(
                0.4, "share of key channels dropped; with a codec in whole bytes (share)", least=0, most=0.99
            ),
            "queries": Parameter(32, "last queries of the prompt that choose the channels (tokens)", least=1),
            "recent": Parameter(32, "tokens at the end of a prompt whose keys stay whole (tokens)", least=0),
        },
        behind=("snapkv", "pyramidkv", "adakv", "expected_attention"),
        refuses_pod="some heads of this layout keep no distant keys, and ThinK drops channels of keys",
    ),
)
