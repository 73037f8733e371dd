"""fm, im and imdc against their oracle: schedules by equations 1–9, then logits."""

import math
import random
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder, run_cache
from oracles_imdc import Chunked, adaptive_sizes, make_schedule, memory_sizes, real_chunks
from test_imdc_schedule import chunk_sizes

import pod
from pod.modeling.methods import imdc

GROWTHS = ("linear", "sqrt", "square", "square-sqrt", "adaptive")
EQUATIONS = {  # eqs. 1, 9, 8 as printed
    "linear": lambda i, n, m0, m: (m - m0) * i / (n - 1) + m0,
    "sqrt": lambda i, n, m0, m: (m - m0) * math.sqrt(i) / math.sqrt(n - 1) + m0,
    "square": lambda i, n, m0, m: (m - m0) * i**2 / (n - 1) ** 2 + m0,
}


def random_schedules(count):
    draw = random.Random(0)
    for _ in range(count):
        mode, growth = draw.choice(["fm", "im", "imdc"]), draw.choice(GROWTHS)
        chunk, layers = draw.choice([draw.randint(1, 40), draw.randint(500, 1500)]), draw.randint(1, 7)
        budget = max(1, int(chunk * draw.choice([0.2, 1, 1.3, 1.9, 3])) + draw.randint(-1, 1))
        prompt = draw.randint(1, chunk * draw.choice([1, 3, 12, 70]))
        held = draw.choice([0, 0, draw.randint(1, 2 * budget)])
        yield mode, growth, prompt, chunk, budget, layers, held


@pytest.mark.parametrize("growth", EQUATIONS)
def test_memory_follows_its_equation(growth):
    draw = random.Random(1)
    for _ in range(300):
        n, budget = draw.randint(2, 90), draw.randint(1, 5000)
        sizes = [row[0] for row in memory_sizes("im", growth, n, budget, 1)]
        exact = [EQUATIONS[growth](i, n, budget / n, budget) for i in range(n)]
        assert all(abs(a - b) <= 0.5 + 1e-9 or a == 1 for a, b in zip(sizes, exact, strict=True))
        assert sizes == sorted(sizes) and sizes[-1] == budget
        linear = [row[0] for row in memory_sizes("im", "linear", n, budget, 1)]
        order = zip(sizes, linear, strict=True)
        assert all(a <= b if growth == "square" else a >= b for a, b in order)  # SQUARE <= LINEAR <= SQRT


def test_square_sqrt_is_square_below_and_sqrt_above():
    for layers in (1, 4, 5):
        both = memory_sizes("im", "square-sqrt", 9, 200, layers)
        square, sqrt = (memory_sizes("im", growth, 9, 200, layers) for growth in ("square", "sqrt"))
        half = layers // 2
        assert [row[:half] for row in both] == [row[:half] for row in square]
        assert [row[half:] for row in both] == [row[half:] for row in sqrt]


def test_decremental_chunks_follow_equations_5_to_7():
    """Mean c, first chunk c, and a KV length that stays at c + m̂ from the second chunk on."""
    for mode, growth, prompt, chunk, budget, layers, held in random_schedules(400):
        n = math.ceil(Fraction(prompt, chunk))
        if mode != "imdc" or n < 2:
            continue
        sizes = memory_sizes(mode, growth, n, budget, layers, held)
        mean, chunks = Fraction(prompt, n), real_chunks(mode, prompt, n, sizes)
        memory = [Fraction(sum(row), layers) for row in sizes]
        lengths = [chunks[i] + memory[i - 1] for i in range(1, n)]
        assert sum(chunks) == n * mean == prompt and chunks[0] == mean
        assert set(lengths) == {sum(mean + memory[i - 1] for i in range(1, n)) / (n - 1)}


def test_schedules_equal_the_oracle_and_sum_to_the_prompt():
    refused = compressed = 0
    for mode, growth, prompt, chunk, budget, layers, held in random_schedules(1500):
        settings = imdc.Settings(mode, growth, budget, chunk, layers)
        try:
            expected = make_schedule(mode, growth, prompt, chunk, budget, layers, held)
        except ValueError:
            with pytest.raises(ValueError, match="chunk_size"):
                imdc.prompt_schedule(settings, prompt, held)
            refused += 1
            continue
        ours = imdc.prompt_schedule(settings, prompt, held)
        if expected is None:
            assert ours.memory is None and chunk_sizes(ours) == [prompt]
            continue
        compressed += 1
        assert chunk_sizes(ours) == expected.widths and [*zip(*ours.memory, strict=True)] == [
            *map(tuple, expected.sizes)
        ]
        assert sum(chunk_sizes(ours)) == prompt and min(chunk_sizes(ours)) >= 1
        assert expected.sizes[-1] == [budget] * layers
    assert refused > 10 and compressed > 500


def test_the_example_of_the_sheet_is_refused():
    """c = 1024, m_max = 4096, n = 32: the last chunk would have about -896 tokens."""
    sizes = memory_sizes("imdc", "linear", 32, 4096, 1)
    assert real_chunks("imdc", 32 * 1024, 32, sizes)[-1] == -896
    with pytest.raises(ValueError):
        make_schedule("imdc", "linear", 32 * 1024, 1024, 4096, 1)


def test_adaptive_shares_equal_the_oracle():
    """Clamped to what each layer has, the rest shared; the total is kept whenever the layers can hold it."""
    draw = random.Random(2)
    for _ in range(2000):
        layers, base = draw.randint(1, 8), draw.randint(1, 60)
        lowest = draw.randint(1, base)
        there = [draw.randint(lowest, 90) for _ in range(layers)]
        ratios = [Fraction(draw.choice([0, 1, 5, draw.randint(0, 40)]), 40) for _ in range(layers)]
        if not sum(ratios):
            continue
        sizes = adaptive_sizes(layers * base, lowest, ratios, there)
        assert tuple(sizes) == imdc.share_by_retention(layers * base, ratios, there, lowest)
        assert all(min(lowest, a) <= size <= a for size, a in zip(sizes, there, strict=True))
        can = sum(a if p else min(lowest, a) for p, a in zip(ratios, there, strict=True))
        assert sum(sizes) == min(layers * base, can) or (min(there) < base and sum(sizes) == sum(there))
    even = adaptive_sizes(40, 2, [Fraction(1, 5)] * 4, [50] * 4)
    assert even == [10] * 4 and adaptive_sizes(
        40, 2, [Fraction(1), Fraction(3)] + [Fraction(0)] * 2, [50] * 4
    ) == [9, 27, 2, 2]


COMMON = {"budget": 10, "chunk_size": 6, "window": 2, "kernel": 3, "num_sink_tokens": 2}
MODES = [("fm", "linear"), *((mode, growth) for mode in ("im", "imdc") for growth in GROWTHS)]
SMALL_FIRST = [
    ("prompt", 3),
    ("decode", 2),
    ("prompt", 26),
    ("decode", 4),
    ("prompt", 1),
    ("decode", 1),
    ("prompt", 13),
]


def pair(model, mode, growth, pruner, **options):
    """Oracle and a maker of caches."""
    oracle = Chunked(model, mode=mode, growth=growth, pruner=pruner, **options)
    function = {} if mode == "fm" else {"function": growth}
    return oracle, lambda: pod.make_cache(model, f"{mode}({pruner})", **function, **options)


@pytest.mark.parametrize("pruner", ["snapkv", "streamingllm"])
@pytest.mark.parametrize(("mode", "growth"), MODES)
def test_equals_the_oracle(tools, mode, growth, pruner):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    oracle, make = pair(model, mode, growth, pruner, **COMMON)
    cache = assert_agrees(model, oracle, make, ids, TURNS)
    (group,) = cache.groups
    assert [layer.held for layer in group.layers] == [heads[0] for heads in oracle.held()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("mode", "growth"), [("imdc", "square-sqrt"), ("imdc", "adaptive"), ("fm", "linear")]
)
def test_families(tools, mode, growth, name):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, plan=False, **changes), tools.random_ids(1, 50)[0]
    oracle, make = pair(model, mode, growth, "snapkv", **COMMON)
    assert_agrees(model, oracle, make, ids, TURNS, ((), (7,)))


@pytest.mark.parametrize("growth", ["linear", "sqrt", "adaptive"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 4, "pool": "max"}, {"budget": 17, "chunk_size": 26, "kernel": 1}], ids=str
)
def test_later_prompts_start_from_the_memory_they_find(tools, growth, options):
    """A short first prompt that stays whole, a memory that is full, a prompt of one token, one chunk."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    oracle, make = pair(model, "imdc", growth, "snapkv", **(COMMON | options))
    assert_agrees(model, oracle, make, ids, SMALL_FIRST, ((), (4,), (1,)))


@pytest.mark.parametrize("turns", [TURNS, SMALL_FIRST], ids=["usual", "small-first"])
@pytest.mark.parametrize("pruner", ["snapkv", "streamingllm"])
@pytest.mark.parametrize(("mode", "growth"), [("im", "linear"), ("imdc", "adaptive"), ("im", "square-sqrt")])
def test_a_memory_that_is_not_updated(tools, mode, growth, pruner, turns):
    """Appendix B.4: memories, chunks of which nothing fits, and later prompts that find the memory full."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    oracle, make = pair(model, mode, growth, pruner, **(COMMON | {"update": False}))
    cache = assert_agrees(model, oracle, make, ids, turns, ((), (7,)))
    assert [layer.held for layer in cache.groups[0].layers] == [heads[0] for heads in oracle.held()]


@torch.no_grad()
def test_what_is_not_updated_is_never_forgotten(tools):
    """The first chunk's memory stands first after every later chunk, and the memory grows as planned."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 60)
    cache = pod.make_cache(model, "im", budget=20, chunk_size=12, window=2, update=False)
    cache.begin_prompt(60)
    memories = []
    for start in range(0, 60, 12):
        model(ids[:, start : start + 12], past_key_values=cache)
        layers = cache.groups[0].layers
        assert [layer.held for layer in layers] == [4 * (start // 12 + 1)] * 5
        memories.append([layer.tokens.keys.read(layer.held).clone() for layer in layers])
    for before, after in pairwise(memories):
        assert all(torch.equal(a, b[:, :, : a.shape[2]]) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("family", ["qwen2-yarn", "llama-tied-biased-llama3"])
def test_scaled_rope(tools, family):
    model, ids = tools.make_pod(family, plan=False), tools.random_ids(1, 50)[0]
    oracle, make = pair(model, "imdc", "sqrt", "snapkv", **COMMON)
    assert_agrees(model, oracle, make, ids, TURNS, ((), (7,)))


@torch.no_grad()
def test_adaptive_layers_differ_and_keep_the_total(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 60)[0]
    oracle = Chunked(model, mode="imdc", growth="adaptive", **(COMMON | {"budget": 14, "chunk_size": 10}))
    oracle.run(ids, [("prompt", 60)])
    sizes = [memory for _, memory in oracle.log]
    assert len({size for row in sizes for size in row}) > 4 and any(len(set(row)) > 1 for row in sizes)
    assert sum(sizes[-1]) == 5 * 14


@torch.no_grad()
def test_prompt_that_fits_is_full_attention(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)[0]
    full = NaiveDecoder(model).run(ids, TURNS)
    for mode in ("fm", "im", "imdc"):
        oracle, make = pair(model, mode, "linear", "snapkv", **(COMMON | {"budget": 50}))
        assert (oracle.run(ids, TURNS) - full).abs().max() <= 1e-12
        assert (run_cache(model, make(), ids[None], TURNS, (7,))[0] - full).abs().max() <= 1e-9


@torch.no_grad()
def test_chunk_below_one_token_is_refused_before_it_is_fed(tools):
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 90)
    cache = pod.make_cache(model, "imdc", budget=16, chunk_size=4, window=2)
    with pytest.raises(ValueError, match="chunk"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError):
        make_schedule("imdc", "linear", 90, 4, 16, 5)
