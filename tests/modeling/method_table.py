"""One row per method and composition: what the tests over all methods need to know.

A new method is one row.
"""

from dataclasses import dataclass, field, replace

SNAP = {"budget": 14, "window": 4, "kernel": 3}
CODEC = {"group_size": 8, "residual": 8}
SIMLAYER = {"num_sink_tokens": 2, "num_recent_tokens": 6}
KVZIP = {"budget": 12, "chunk_size": 10, "num_sink_tokens": 2, "repeat_ids": [[5, 9, 3], [7, 2], [4]]}
RAZOR = {
    "heads": [[0], [1], [], [0, 1], []],
    "num_sink_tokens": 2,
    "num_recent_tokens": 6,
    "compression": 9.0,
}
IMDC = {"budget": 12, "chunk_size": 10, "window": 4, "kernel": 3}
D2O_APART = {"budget": 13, "num_sink_tokens": 2, "gate": 1.65, "similarity": "both", "merge": "average"}
STREAM = {"prefill": "streaming", "chunk_size": 7}
LARGE = {"budget": 512}
LARGE_STREAM = LARGE | {"chunk_size": 600}
ALL = 300  # more tokens than any test of whole rows feeds


@dataclass(frozen=True)
class Row:
    """A spec with small parameters, for prompts of about 40 tokens.

    Attributes:
        spec, options: for ``pod.make_cache``.
        whole: changes to the options with which nothing is dropped or packed, so that the cache must equal
            the model without a cache; None where the rule changes something even then, for the reason in
            ``why``.
        large: changes to the options for a prompt of 2K tokens.
        name: of the test; the spec when empty.
        model: layout of the model: ``dense``, ``pod``, ``cla`` or ``window``.
        saves: least share of the dense bytes that is freed at 2K tokens with ``large``.
    """

    spec: str
    options: dict = field(default_factory=dict)
    whole: dict | None = field(default_factory=lambda: {"budget": ALL})
    large: dict = field(default_factory=lambda: LARGE)
    name: str = ""
    model: str = "dense"
    why: str = ""
    saves: float = 0.7

    @property
    def id(self) -> str:
        return self.name or self.spec


UNPACKED = {"residual": ALL}
LARGE_CODEC = {"group_size": 8, "residual": 64}
LAYOUTS = [
    Row("full", whole={}, large={}, saves=0.0),
    Row("pod", whole={}, large={}, model="pod", saves=0.25),
    Row("cla", whole={}, large={}, model="cla", saves=0.39),
    Row("window", whole={}, large={}, model="window", saves=0.99),
]
SELECTIONS = [
    Row("streamingllm", {"budget": 12, "num_sink_tokens": 3}),
    Row("lm_infinite", {"budget": 12, "num_sink_tokens": 3}),
    Row("wa", {"budget": 12}),
    Row("local_window", {"budget": 12}),
    Row("snapkv", SNAP),
    Row("snapkv", SNAP | STREAM, large=LARGE_STREAM, name="snapkv-streaming"),
    Row("pyramidkv", SNAP | {"beta": 5}, saves=0.6),
    Row("adakv", SNAP),
    Row("adakv", SNAP | STREAM, large=LARGE_STREAM, name="adakv-streaming"),
    Row("expected_attention", {"budget": 14, "num_sink_tokens": 2}),
    Row(
        "expected_attention",
        {"budget": 14, "num_sink_tokens": 2} | STREAM,
        large=LARGE_STREAM,
        name="expected_attention-streaming",
    ),
    Row("kvzip", KVZIP, large=LARGE | {"chunk_size": 2048}),
    Row("h2o", {"budget": 12}),
    Row("h2o", {"budget": 12} | STREAM, large=LARGE_STREAM, name="h2o-streaming"),
    Row("roco", {"budget": 13, "num_sink_tokens": 2, "num_recent_tokens": 3}),
    Row("d2o", {"budget": 13, "num_sink_tokens": 2, "gate": 1.65}, large=LARGE | {"gate": 30.0}),
    Row("d2o", D2O_APART, large=LARGE | {"gate": 30.0}, name="d2o-apart"),
    Row(
        "d2o",
        {"budget": 13, "num_sink_tokens": 2, "gate": 1.65} | STREAM,
        large=LARGE_STREAM,
        name="d2o-streaming",
    ),
    Row(
        "simlayerkv",
        SIMLAYER | {"threshold": 0.35},
        whole={"num_recent_tokens": ALL},
        large={"num_recent_tokens": 512, "threshold": 0.0},
    ),
    Row(
        "simlayerkv",
        SIMLAYER | {"threshold": 0.3, "detector": "prefill", "num_last_queries": 4},
        whole={"num_recent_tokens": ALL},
        large={"num_recent_tokens": 512, "threshold": 0.0},
        name="simlayerkv-prefill",
    ),
    Row("quest", {"budget": 12, "page_size": 4}, large=LARGE | {"page_size": 16}, saves=-0.07),
    Row("think", {"ratio": 0.5, "queries": 5, "recent": 4}, whole={"ratio": 0.0}, large={}, saves=0.18),
    Row(
        "snapkv+think", SNAP | {"ratio": 0.5, "queries": 5, "recent": 4}, whole={"budget": ALL, "ratio": 0.0}
    ),
    Row("razor", RAZOR, whole={"num_recent_tokens": ALL}, large={"num_recent_tokens": 256}, saves=0.5),
    Row("imdc", IMDC, whole={"budget": ALL, "chunk_size": ALL}, large=LARGE | {"chunk_size": 512}),
    Row(
        "imdc(streamingllm)",
        {"budget": 12, "chunk_size": 10, "function": "adaptive"},
        whole={"budget": ALL, "chunk_size": ALL},
        large=LARGE | {"chunk_size": 512},
    ),
    Row(
        "im",
        IMDC | {"function": "sqrt"},
        whole={"budget": ALL, "chunk_size": ALL},
        large=LARGE | {"chunk_size": 512},
    ),
    Row("fm", IMDC, whole={"budget": ALL, "chunk_size": ALL}, large=LARGE | {"chunk_size": 512}),
]
PACKED = [
    Row("kivi", CODEC, whole=UNPACKED, large=LARGE_CODEC, saves=0.65),
    Row("int4", CODEC, whole=UNPACKED, large=LARGE_CODEC, saves=0.6),
    Row("int8", CODEC, whole=UNPACKED, large=LARGE_CODEC, saves=0.5),
    Row("pod+kivi", CODEC, whole=UNPACKED, large=LARGE_CODEC, model="pod"),
    Row("pod+int4", CODEC, whole=UNPACKED, large=LARGE_CODEC, model="pod"),
    Row("cla+int4", CODEC, whole=UNPACKED, large=LARGE_CODEC, model="cla"),
    Row("window+int4", CODEC, whole=UNPACKED, large=LARGE_CODEC, model="window"),
]


def packed(row: Row, codec: str) -> Row:
    """The row's selection with packed keys and values."""
    return Row(
        f"{row.spec}+{codec}",
        row.options | CODEC,
        whole=None if row.whole is None else row.whole | UNPACKED,
        large=row.large | LARGE_CODEC,
        name=f"{row.id}+{codec}",
        model=row.model,
        why=row.why,
        saves=row.saves,
    )


SHARED = [
    Row("pod+snapkv", SNAP | {"budget": 20}, model="pod"),
    Row("pod+pyramidkv", SNAP | {"budget": 20, "beta": 3}, model="pod", saves=0.6),
    Row("pod+expected_attention", {"budget": 20}, model="pod"),
    Row("pod+quest", {"budget": 12, "page_size": 4}, large=LARGE | {"page_size": 16}, model="pod", saves=0.2),
]
TWINS = (  # packed like their neighbours
    "snapkv-streaming",
    "adakv-streaming",
    "expected_attention-streaming",
    "h2o-streaming",
    "simlayerkv-prefill",
    "d2o-apart",
)
COMPOSED = [
    packed(row, "int8" if row.spec in ("wa", "roco", "im") else "int4")
    for row in (*SELECTIONS, *SHARED)
    if row.id not in TWINS
]
MINICACHE = Row("minicache", {"block": 3}, whole={"share": 1.0}, large={}, saves=0.1)
PAIRED = [MINICACHE, packed(replace(MINICACHE, saves=0.6), "int4")]
ROWS = [*LAYOUTS, *SELECTIONS, *PAIRED, *PACKED, *SHARED, *COMPOSED]
