"""The registry's entries of layouts (which layers and heads hold what) and codecs (bits per number).

Lists and reports show them in this order.
"""

from typing import Any

from pod.registry.method import Method, Parameter

CAPACITY = {"capacity": Parameter(None, "tokens per row to reserve space for; pod.engine then decodes")}
"""The parameter of layouts that ``pod.engine`` can decode."""
PACKING = {
    # The defaults are the sizes that a plan with bits has: GROUP_SIZE and RESIDUAL of packed_bytes.py.
    "group_size": Parameter(32, "numbers that share a scale: tokens (keys) or channels (values)", least=2),
    "residual": Parameter(
        128, "newest tokens that stay unpacked, and at most group_size - 1 more (tokens)", least=0
    ),
}
OF_CODECS: dict[str, Any] = {
    "axis": "codec",
    "file": "layouts",
    "paper": "KIVI (Liu et al., 2024)",
    "url": "https://arxiv.org/abs/2402.02750",
    "parameters": PACKING,
}
"""What the entries of all codecs have in common."""

LAYOUTS = (
    Method(
        name="full",
        axis="layout",
        file="layouts",
        title="the dense model with its whole cache",
        frees="nothing",
        paper="—",
        parameters=CAPACITY,
        one_shot=True,
        takes_chunks=True,
    ),
    Method(
        name="pod",
        axis="layout",
        file="layouts",
        title="heads keep what a plan says: all tokens, their values alone, or a window; 16 or 4 bits",
        frees="distant keys of heads that follow a lead; no token is dropped",
        paper="PoD (Compressing KV Cache with Inter-Layer Attention Similarity), §2.2",
        url="https://arxiv.org/abs/2412.02252",
        parameters={
            **CAPACITY,
            "tau": Parameter(
                None,
                "gate from which a follower's query head skips distant tokens; None = never",
                least=0.0,
                most=1.0,
            ),
            "extra_slots": Parameter(
                0,
                "extra tokens kept after windows, so that crop and assisted decoding can remove tokens",
                least=0,
            ),
        },
        one_shot=True,
        takes_chunks=True,
    ),
    Method(
        name="cla",
        axis="layout",
        file="layouts",
        title="the first layer of a block keeps keys and values for all of it",
        frees="keys and values of all layers in a block except the first; no token is dropped",
        paper="Cross-layer attention (Brandon et al., 2024); for models trained with layout='cla'",
        url="https://arxiv.org/abs/2405.12981",
        trained=True,
    ),
    Method(
        name="window",
        axis="layout",
        file="layouts",
        title="layers keep the recent tokens only",
        frees="keys and values of tokens that have left the window",
        paper="Window attention (Beltagy et al., 2020); for models trained with layout='window'",
        url="https://arxiv.org/abs/2004.05150",
        parameters=CAPACITY,
        trained=True,
    ),
)
CODECS = (
    Method(
        name="kivi",
        title="stores keys and values in 2 bits",
        frees="14 of 16 bits per number, minus 1 bit for scale and zero in fp16; "
        "the newest tokens stay in 16 bits",
        bits=2,
        **OF_CODECS,
    ),
    Method(
        name="int4",
        title="stores keys and values in 4 bits",
        frees="12 of 16 bits per number, minus 1 bit for scale and zero in fp16; "
        "the newest tokens stay in 16 bits",
        bits=4,
        **OF_CODECS,
    ),
    Method(
        name="int8",
        title="stores keys and values in 8 bits",
        frees="8 of 16 bits per number, minus 1 bit for scale and zero in fp16; "
        "the newest tokens stay in 16 bits",
        bits=8,
        **OF_CODECS,
    ),
)
