"""What a decoded token costs in operations.

It costs the same for one row and eight, and for two KV heads and eight, and few operations.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pod

PROMPT, WARM_UP, TOKENS = (
    72,
    4,
    8,
)  # as many tokens as a group of the codecs has, so that packing one is part of them
DEPTH, MOST = 32, 2000  # layers to which counts are scaled, and the operations allowed there
SELECT = {"budget": 32, "window": 4, "kernel": 3}
CODEC = {"group_size": 8, "residual": 8}
# no simlayerkv, adakv and kvzip: which layers are lazy, and what a head holds, is decided for each row, so
# their cost differs by row
METHODS = {
    "full": {},
    "full-capacity": {"capacity": 128},
    "pod": {},
    "pod-capacity": {"capacity": 128},
    "streamingllm": {"budget": 24, "num_sink_tokens": 4},
    "lm_infinite": {"budget": 24, "num_sink_tokens": 4},
    "wa": {"budget": 24},
    "local_window": {"budget": 24},
    "snapkv": SELECT,
    "pyramidkv": SELECT | {"beta": 4},
    "expected_attention": {"budget": 32},
    "h2o": {"budget": 24},
    "roco": {"budget": 24, "num_sink_tokens": 2, "num_recent_tokens": 4},
    "d2o": {"budget": 24, "num_sink_tokens": 2},
    "razor": {"num_sink_tokens": 4, "num_recent_tokens": 16, "compression": 9.0},
    "quest": {"budget": 24, "page_size": 4},
    "minicache": {"block": 4},
    "imdc": {"budget": 24, "chunk_size": 24, "window": 4, "kernel": 3},
    "int4": CODEC,
    "full+int4-capacity": CODEC | {"capacity": 128},
    "int8": CODEC,
    "pod+snapkv": SELECT,
    "pod+pyramidkv": SELECT | {"beta": 4},
    "pod+expected_attention": {"budget": 32},
    "pod+quest": {"budget": 24, "page_size": 4},
    "pod+int4": CODEC,
    "pod+int4-capacity": CODEC | {"capacity": 128},
    "snapkv+int4": SELECT | CODEC,
    "pod+snapkv+int4": SELECT | CODEC,
    "d2o+int4": {"budget": 24, "num_sink_tokens": 2} | CODEC,
    "razor+int4": {"num_sink_tokens": 4, "num_recent_tokens": 16, "compression": 9.0} | CODEC,
}

# What does not reach the bound yet, and what an operation or two per token still set apart. A row that gets
# there must leave its list.
TOO_MANY = ["pod", "pod-capacity", "int4", "full+int4-capacity", "int8"]
TOO_MANY += [
    "pod+quest",
    "pod+int4",
    "pod+int4-capacity",
    "snapkv+int4",
    "pod+snapkv+int4",
    "d2o",  # 2,105: ties of cosines cost 4 operations per layer
    "d2o+int4",
    "razor+int4",
]
DEPENDS = [
    "pod",
    "pod+int4",
    "local_window",
    "d2o+int4",
    "pod+snapkv+int4",
    "pod+expected_attention",
    "pod+quest",
]
ONE_BY_ONE = [  # groups of rows of one length attend one after the other
    *(
        "full",
        "full-capacity",
        "local_window",
        "snapkv",
        "pyramidkv",
        "expected_attention",
        "h2o",
        "roco",
        "razor",
        "quest",
        "minicache",
        "imdc",
    ),
    *("pod+snapkv", "pod+pyramidkv", "pod+expected_attention", *TOO_MANY),
]

NO_PADDING = ("full+int4-capacity", "pod+int4-capacity")  # refused: rows of packed tokens grow together


class Operations(TorchDispatchMode):
    """Number of operations that compute or copy.

    Views, new memory without content and reads of one number have no kernel.
    """

    WITHOUT_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
    WITHOUT_KERNEL |= {"_local_scalar_dense", "_unsafe_view", "lift_fresh", "resize_"}
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += not func.is_view and name not in self.WITHOUT_KERNEL
        return func(*args, **(kwargs or {}))


def make_model(layers, kv_heads, shares):
    """Random weights; under a plan every other KV head follows the first layer of its pair, the rest lead."""
    lead = [[layer - layer % 2 if head % 2 else layer for head in range(kv_heads)] for layer in range(layers)]
    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        initializer_range=0.2,
        num_sink_tokens=4,
        num_recent_tokens=8,
        lead=lead if shares else None,
    )
    torch.manual_seed(0)
    return pod.PodForCausalLM(config).eval()


@functools.cache
@torch.no_grad()
def operations(name, layers=2, batch=1, kv_heads=2, padding=False):
    """Operations of `TOKENS` decoded tokens behind a prompt; `padding`: rows of unequal length."""
    spec, options = name.removesuffix("-capacity"), dict(METHODS[name])
    model = make_model(layers, kv_heads, "pod" in spec)
    if "razor" in spec:
        options["heads"] = [list(range(kv_heads // 2))] * layers
    ids = torch.randint(3, 61, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, PROMPT + WARM_UP + TOKENS, dtype=torch.long)
    for row in range(batch if padding else 0):
        mask[row, : 3 * row] = 0
    cache = pod.make_cache(model, spec, **options)
    model(ids, attention_mask=mask[:, :PROMPT], past_key_values=cache)
    columns, counter = PROMPT, Operations()
    for number in range(WARM_UP + TOKENS):
        columns += 1
        token = torch.full((batch, 1), 3 + number)
        given = {"attention_mask": mask[:, :columns]} if padding else {}
        if number < WARM_UP:
            model(token, past_key_values=cache, **given)
        else:
            with counter:
                model(token, past_key_values=cache, **given)
    return counter.count


def at_full_depth(name, **batch):
    """Operations per token of 32 layers.

    They are what 4 layers cost, and 28 times the mean of the upper two of them.
    """
    few, more = (operations(name, layers, batch=8, kv_heads=8, **batch) for layers in (2, 4))
    return (more + (more - few) / 2 * (DEPTH - 4)) / TOKENS


def rows(missed, names=METHODS):
    """The methods, with those that miss the bound marked."""
    mark = pytest.mark.xfail(
        strict=True, reason="more operations than the bound: LOG.md, one attention operation"
    )
    return [pytest.param(name, marks=[mark] if name in missed else []) for name in names]


@pytest.mark.parametrize("name", rows(DEPENDS))
def test_a_token_costs_the_same_for_every_batch_and_number_of_heads(name):
    assert operations(name, batch=1) == operations(name, batch=8), "rows"
    assert operations(name, batch=8, kv_heads=2) == operations(name, batch=8, kv_heads=8), "KV heads"


@pytest.mark.parametrize("name", rows(TOO_MANY))
def test_a_token_costs_few_operations(name):
    assert at_full_depth(name) <= MOST


@pytest.mark.parametrize("name", rows(ONE_BY_ONE, [name for name in METHODS if name not in NO_PADDING]))
def test_a_token_of_rows_of_unequal_length_costs_few_operations(name):
    assert at_full_depth(name, padding=True) <= MOST
