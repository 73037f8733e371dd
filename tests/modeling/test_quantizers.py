"""Packed keys and values against a quantizer written with Python loops.

They are held against a naive decoder that uses it, too.
"""

import itertools
import math
import random

import oracles_quantizers as oracles
import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder, run_cache
from oracles_pod_selected import PodSelected
from oracles_quantizers import NaiveBuffer, naive_channels, naive_token
from rule_bytes import buffer_nbytes, rule_nbytes

import pod
from pod.modeling.model.group_quantizer import GroupQuantizer
from pod.modeling.model.packed import Packing
from pod.modeling.model.quantized import QuantizedWindow
from pod.modeling.model.window_buffer import WindowBuffer


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unpacked(packing, x):
    packed = packing.pack(x)
    out = torch.full_like(x, math.nan)
    packing.unpack(packed, out)
    return out, packed


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 8), (4, 8), (8, 8), (2, 32), (4, 32), (8, 4)])
@pytest.mark.parametrize("scale", [1.0, 300.0, 1e-3])
def test_numbers_are_those_of_the_naive_quantizer(per_channel, bits, group_size, scale):
    x = randn(2, 2, 32, 16) * scale + randn(1, 1, 1, 16, seed=1) * 10 * scale
    out, (codes, zero, step) = unpacked(Packing(bits=bits, group_size=group_size, per_channel=per_channel), x)
    for row, head in itertools.product(range(2), range(2)):
        tokens = x[row, head]
        if per_channel:
            blocks = [naive_channels(tokens[i : i + group_size], bits) for i in range(0, 32, group_size)]
            expected = torch.cat(blocks)
        else:
            expected = torch.stack([naive_token(token, bits, group_size) for token in tokens])
        assert torch.equal(out[row, head], expected)
    assert codes.dtype == torch.uint8 and codes.shape[3] == 16 * bits // 8
    assert zero.dtype == step.dtype == torch.float16


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_can_be_read_without_our_code(bits):
    """Bytes of four tokens of one head can be read by hand.

    Byte i holds channels i, i + d/P, … of P codes, from its lowest bits on.
    """
    x, width = randn(1, 1, 4, 8, seed=3), bits
    out, (codes, zero, scale) = unpacked(Packing(bits=bits, group_size=4, per_channel=False), x)
    assert codes.shape == (1, 1, 4, width)
    for token in range(4):
        for channel in range(8):
            byte = codes[0, 0, token].tolist()[channel % width]
            code = byte // 2 ** (channel // width * bits) % 2**bits
            value = zero[0, 0, token, channel // 4].item() + code * scale[0, 0, token, channel // 4].item()
            assert out[0, 0, token, channel].item() == value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offset", [0.0, 250.0])
def test_error_is_at_most_half_a_step(dtype, per_channel, bits, offset):
    x = (randn(1, 3, 64, 32, seed=5) + offset).to(dtype)
    out, (_, _, scale) = unpacked(Packing(bits=bits, group_size=32, per_channel=per_channel), x)
    step = scale.double().repeat_interleave(32, dim=2 if per_channel else 3)
    rounding = x.double().abs() * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 4
    rounding += x.double().abs() * torch.finfo(dtype).eps / 2  # of the number that is read
    assert ((out.double() - x.double()).abs() <= step / 2 + rounding).all()
    slack = 0.3 if offset else 0.0
    assert step.max() < 8 / (2**bits - 1) + slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159, 777.77, 2e-5, 65504.0, 1e30, -math.inf])
def test_constant_and_huge_groups(dtype, value):
    """Constant groups read as their value; what fp16 cannot hold saturates at ±65504, never inf or nan."""
    x = torch.full((1, 1, 8, 8), value, dtype=dtype)
    x[0, 0, 1] = torch.linspace(-1, 1, 8)
    x[0, 0, 2] = torch.tensor([-1e30, 1e30] * 4)
    out, (_, zero, scale) = unpacked(Packing(bits=4, group_size=8, per_channel=False), x)
    assert zero.isfinite().all() and scale.isfinite().all()
    expected = x[0, 0, 0].double().clamp(-65504, 65504)
    error = (out[0, 0, 0].double() - expected).abs().max()
    assert error <= abs(expected[0]) * (torch.finfo(dtype).eps + 1e-4) + 3e-8
    assert torch.equal(out[0, 0, 0], out[0, 0, 7])
    saturated = torch.tensor([-65504.0, 65504.0] * 4, dtype=torch.float64)
    most = 370 if dtype == torch.bfloat16 else 70
    assert (out[0, 0, 2].double() - saturated).abs().max() <= most


def test_nan_stays_visible():
    x = randn(1, 1, 4, 8)
    x[0, 0, 1, 2] = math.nan
    out, _ = unpacked(Packing(bits=4, group_size=4, per_channel=False), x)
    assert out[0, 0, 1, 2].isnan() and out[0, 0, 0].isfinite().all()


# -- buffers -------------------------------------------------------------------------------------------------


def slot_positions(buffer, length):
    """Position of the token at each used slot."""
    runs = buffer.runs(0, length, length)
    held = {slot + i: position + i for position, slot, count in runs for i in range(count)}
    return [held[slot] for slot in range(buffer.used_slots(length))]


def naive_read(naive):
    return torch.stack([torch.stack([one.read() for one in row]) for row in naive])


def append_everywhere(buffer, naive, x):
    buffer.append(x, len(naive[0][0].tokens))
    for row, head in itertools.product(range(x.shape[0]), range(x.shape[1])):
        naive[row][head].tokens += [[token, False] for token in x[row, head]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("evicts", [True, False])
def test_random_operations_on_a_store(seed, evicts):
    """append, flush, keep, write, select_rows in any order, 3 heads that keep different slots."""
    chance, rows, heads, dim = random.Random(seed), 2, 3, 8
    bits, size, residual = chance.choice([2, 4, 8]), chance.choice([2, 4]), chance.choice([0, 3, 6])
    quantizer = GroupQuantizer(bits, size, residual)
    part = chance.choice(["keys", "values"])
    buffer = quantizer.tokens(part, evicts)
    per_channel = part == "keys" and not evicts
    naive = [[NaiveBuffer(bits, size, residual, per_channel) for _ in range(heads)] for _ in range(rows)]
    assert buffer.is_empty and buffer.tensors() == []
    for count in range(60):
        length = len(naive[0][0].tokens)
        action = chance.choice(["append", "decode", "decode", "flush"] + ["keep", "write", "rows"] * evicts)
        if action in ("append", "decode") or not length:
            m = 1 if action == "decode" else chance.randrange(1, 9)
            append_everywhere(buffer, naive, randn(rows, heads, m, dim, seed=seed * 100 + count))
            length += m
        if action in ("decode", "flush"):
            buffer.flush(length)
            for one in itertools.chain.from_iterable(naive):
                one.flush()
        elif action == "keep":
            width = chance.randrange(max(1, length - 4), length + 1)
            index = [[sorted(chance.sample(range(length), width)) for _ in row] for row in naive]
            buffer.keep(torch.tensor(index), length)
            for row, head in itertools.product(range(rows), range(heads)):
                naive[row][head].tokens = [naive[row][head].tokens[slot] for slot in index[row][head]]
            length = width
        elif action == "write":
            index = [[chance.sample(range(length), min(2, length)) for _ in row] for row in naive]
            x = randn(rows, heads, min(2, length), dim, seed=seed * 100 + count + 50)
            buffer.write(torch.tensor(index), x)
            for row, head in itertools.product(range(rows), range(heads)):
                for slot, new in zip(index[row][head], x[row, head], strict=True):
                    naive[row][head].write(slot, new)
        elif action == "rows":
            order = [chance.randrange(rows) for _ in range(rows)]
            buffer.select_rows(torch.tensor(order))
            naive = [[copy_of(one) for one in naive[row]] for row in order]
        assert torch.equal(buffer.read(length), naive_read(naive)), (action, count)
        assert buffer.used_slots(length) == length and buffer.dtype == torch.float64
        assert {id(x) for x in buffer.tensors()} == set(tensor_ids(buffer))
    assert any(is_packed for _, is_packed in naive[0][0].tokens)


def tensor_ids(holder):
    """Every tensor that an object refers to, directly or through its parts."""
    for value in vars(holder).values():
        for x in value if isinstance(value, tuple) else [value]:
            if isinstance(x, torch.Tensor):
                yield id(x)
            elif hasattr(x, "__dict__"):
                yield from tensor_ids(x)


def copy_of(naive):
    new = NaiveBuffer(naive.bits, naive.size, naive.residual, naive.per_channel)
    new.tokens = [list(token) for token in naive.tokens]
    return new


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("seed", range(10))
def test_random_operations_on_a_window(seed, part):
    """Against the native ring (slots, positions) and a list of all tokens ever seen (values)."""
    chance, rows, heads, dim = random.Random(seed), 2, 2, 8
    sinks, size = chance.choice([0, 3]), chance.choice([2, 4])
    residual = chance.choice([0, 3])
    recent = residual + size + chance.randrange(1, 9)
    quantizer = GroupQuantizer(4, size, residual)
    buffer, native = quantizer.window(part, sinks, recent), WindowBuffer(sinks, recent)
    assert isinstance(buffer, QuantizedWindow) and buffer.is_empty
    tokens = [[[] for _ in range(heads)] for _ in range(rows)]  # [vector, packed?]
    length = 0
    for count in range(60):
        m = chance.choice([1, 1, 1, 2, 5, 30])
        x = randn(rows, heads, m, dim, seed=seed * 100 + count)
        buffer.append(x, length)
        native.append(x, length)
        length += m
        for row, head in itertools.product(range(rows), range(heads)):
            tokens[row][head] += [[token, False] for token in x[row, head]]
        if chance.random() < 0.7:
            buffer.flush(length)
            stop = sinks + max(0, (length - sinks - residual) // size * size)
            for held in itertools.chain(*tokens):
                for first in range(sinks, stop, size):
                    group = [token for token, _ in held[first : first + size]]
                    if held[first][1]:
                        continue
                    packed = [naive_token(token, 4, size) for token in group]
                    if part == "keys":
                        packed = naive_channels(torch.stack(group), 4)
                    held[first : first + size] = [[token, True] for token in packed]
        positions = slot_positions(native, length)
        if chance.random() < 0.1:
            buffer.select_rows(torch.tensor([1, 1]))
            native.select_rows(torch.tensor([1, 1]))
            tokens = [[[list(token) for token in held] for held in tokens[1]] for _ in range(2)]
        assert slot_positions(buffer, length) == positions
        expected = torch.stack(
            [torch.stack([torch.stack([held[p][0] for p in positions]) for held in row]) for row in tokens]
        )
        assert torch.equal(buffer.read(length), expected), count
        assert {id(x) for x in buffer.tensors()} == set(tensor_ids(buffer))


@pytest.mark.parametrize("kind", ["keys", "values", "evicting keys", "window"])
def test_how_a_prompt_is_chunked_changes_no_bit(kind):
    x = randn(1, 2, 75, 16, dtype=torch.float32)
    stored = []
    for widths in ([75], [1] * 75, [40, 35], [7] * 10 + [5]):
        quantizer, past = GroupQuantizer(4, 8, 10), 0
        buffer = (
            quantizer.window("keys", 4, 30)
            if kind == "window"
            else quantizer.tokens(kind.split()[-1], "evicting" in kind)
        )
        for width in widths:
            buffer.append(x[:, :, past : past + width], past)
            past += width
        buffer.flush(75)
        stored.append(buffer)
    for other in stored[1:]:
        assert torch.equal(stored[0].read(75), other.read(75))
    positions = torch.arange(75)
    if kind == "window":
        positions = torch.tensor(slot_positions(stored[0], 75))
    changed = (stored[0].read(75) != x[:, :, positions]).any(3)[0, 0]
    stop = 4 + 56 if kind == "window" else 64
    assert torch.equal(changed, (positions < stop) & (positions >= (4 if kind == "window" else 0)))


def test_kept_tokens_are_not_packed_again():
    buffer = GroupQuantizer(4, 8, 4).tokens("values", evicts=True)
    buffer.append(randn(1, 2, 40, 16), 0)
    buffer.flush(40)
    before = buffer.read(40)
    index = torch.tensor([[list(range(0, 40, 3)), list(range(26, 40))]])
    buffer.keep(index, 40)
    buffer.flush(14)
    assert torch.equal(buffer.read(14)[0, 0][:11], before[0, 0, ::3][:11])
    assert torch.equal(buffer.read(14)[0, 1][:6], before[0, 1, 26:32])


# -- bytes ---------------------------------------------------------------------------------------------------


def nbytes(buffer):
    return sum(tensor.untyped_storage().nbytes() for tensor in buffer.tensors())


@pytest.mark.parametrize("kind", ["keys", "values", "evicting keys", "window"])
@pytest.mark.parametrize(
    ("bits", "group_size", "per_number"), [(2, 32, 3), (4, 32, 5), (4, 64, 4.5), (8, 64, 8.5)]
)
def test_bytes_of_a_prompt_and_of_4096_decoded_tokens(kind, bits, group_size, per_number):
    """Predicted from the rule within 1 %, at every length; bits per packed number as documented."""
    quantizer = GroupQuantizer(bits, group_size, 128)
    buffer = (
        quantizer.window("keys", 16, 3000)
        if kind == "window"
        else quantizer.tokens(kind.split()[-1], "evicting" in kind)
    )
    x = randn(1, 1, 1, 64, dtype=torch.bfloat16)
    prompt = 2048
    buffer.append(x.expand(-1, -1, prompt, -1), 0)
    buffer.flush(prompt)
    for length in range(prompt + 1, prompt + 4097):
        buffer.append(x, length - 1)
        buffer.flush(length)
        if length % 61 == 0:
            assert buffer_nbytes(buffer, length) <= nbytes(buffer) <= 1.01 * buffer_nbytes(buffer, length)
    packed = (length - 128) // group_size * group_size
    if kind == "window":
        packed = math.ceil((3000 - 128) / group_size) * group_size  # whole groups
    native = (16 if kind == "window" else 0) + 128 + group_size  # slots reserved
    assert buffer_nbytes(buffer, length) == packed * 64 * per_number / 8 + native * 128


def test_growing_a_prompt_piece_by_piece_holds_no_more():
    buffers = []
    for width in (3000, 7):
        buffer = GroupQuantizer(4, 32, 128).tokens("keys")
        for past in range(0, 3000, width):
            buffer.append(randn(1, 2, min(width, 3000 - past), 64, dtype=torch.float32), past)
        assert nbytes(buffer) <= 1.01 * 3000 * 2 * 64 * 4
        buffer.flush(3000)
        buffers.append(buffer)
    assert nbytes(buffers[0]) == nbytes(buffers[1]) < 0.26 * 3000 * 2 * 64 * 4


def test_a_window_holds_no_more_than_itself_while_a_prompt_runs():
    buffer = GroupQuantizer(4, 32, 128).window("keys", 4, 1000)
    for past in range(0, 4000, 5):
        buffer.append(randn(1, 2, 5, 16, dtype=torch.float32), past)
    assert nbytes(buffer) <= (1.02 * 1004 + 31) * 2 * 16 * 4, "a group stays until all of it has left"
    buffer.flush(4000)
    assert nbytes(buffer) == buffer_nbytes(buffer, 4000)


def test_what_was_read_does_not_change_when_the_store_settles():
    """Leads share the keys that they read with layers that attend later."""
    for length in (5, 6, 10, 40):
        buffer = GroupQuantizer(4, 4, 2).tokens("keys")
        buffer.append(randn(1, 1, length, 8), 0)
        read = buffer.read(length)
        buffer.flush(length)
        buffer.append(randn(1, 1, 7, 8, seed=1), length)
        buffer.flush(length + 7)
        assert torch.equal(read, randn(1, 1, length, 8))


# -- decoders ------------------------------------------------------------------------------------------------

SIZES = {"group_size": 4, "residual": 6}


QUANTIZERS = {2: "kivi", 4: "int4", 8: "int8"}


@pytest.mark.parametrize(
    ("name", "bits"), [("llama-g3", 2), ("llama-g3", 4), ("qwen3-g4", 4), ("llama-g1", 8)]
)
def test_full(tools, name, bits):
    family, changes = MODELS[name]
    model = tools.make_pod(family, plan=False, **changes)
    oracle = oracles.PackedFull(model)
    oracle.bits = bits
    assert_agrees(
        model,
        oracle,
        lambda: pod.make_cache(model, QUANTIZERS[bits], **SIZES),
        tools.random_ids(1, 50)[0],
        TURNS,
    )


@pytest.mark.parametrize(
    ("name", "windows", "bits"),
    [("llama-g3", (4, 11), 4), ("qwen3-g3", (0, 13), 4), ("llama-g3", (2, 9), 4), ("llama-g3", (4, 11), 2)],
    ids=str,
)
def test_pod(tools, name, windows, bits):
    """Windows of 9 tokens are no larger than what a packed one holds natively: they stay native."""
    family, changes = MODELS[name]
    model = tools.make_pod(family, windows=windows, **changes)
    ids = tools.random_ids(1, 50)[0]
    full = PodSelected(model, selection=None).run(ids, TURNS)
    oracle, spec = oracles.PackedPod(model, selection=None), f"pod+{QUANTIZERS[bits]}"
    oracle.bits = bits
    assert_agrees(model, oracle, lambda: pod.make_cache(model, spec, **SIZES), ids, TURNS, full=full)


SELECTIONS = {
    "snapkv": (oracles.PackedSnapKV, {"budget": 16, "window": 4, "kernel": 3, "pool": "avg"}),
    "h2o": (oracles.PackedH2O, {"budget": 16}),
    "streamingllm": (oracles.PackedStreamingLLM, {"budget": 18, "num_sink_tokens": 3}),
}


@pytest.mark.parametrize(("selection", "bits"), [*((name, 4) for name in SELECTIONS), ("snapkv", 2)])
def test_selections(tools, selection, bits):
    """Heads keep different tokens, so that each has packed ones of its own."""
    oracle, arguments = SELECTIONS[selection]
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(1, 50)[0]
    full = type(oracle(model, **arguments)).__mro__[2](model, **arguments).run(ids, TURNS)

    def make_cache():
        return pod.make_cache(model, f"{selection}+{QUANTIZERS[bits]}", **arguments, **SIZES)

    packed = oracle(model, **arguments)
    packed.bits = bits
    assert_agrees(model, packed, make_cache, ids, TURNS, full=full)


@torch.no_grad()
def test_how_a_prompt_was_chunked_is_forgotten_by_a_selection_with_long_windows(tools):
    """Followers free aged keys in portions; how many keys wait for that must not decide what is packed."""
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
    }
    model = tools.make_pod("qwen3", windows=(4, 300), **sizes)
    ids, turns = tools.random_ids(1, 604), [("prompt", 600), ("decode", 4)]
    options = {"budget": 550, "window": 8, "residual": 4, "group_size": 2}
    whole, other = (
        run_cache(model, pod.make_cache(model, "pod+snapkv+int4", **options), ids, turns, widths)
        for widths in ((), (599, 1))
    )
    assert (other - whole)[0, -4:].abs().max() <= 1e-9


@torch.no_grad()
@pytest.mark.parametrize("spec", ["kivi", "int4", "pod+int4", "int8"])
def test_padded_rows_equal_rows_alone_over_two_turns(tools, spec):
    model = tools.make_pod("llama", plan=spec.startswith("pod"))
    ids, mask = tools.random_ids(3, 50), torch.ones(3, 50, dtype=torch.long)
    mask[1, :9], mask[2, :21], mask[2, 35:38] = 0, 0, 0  # the second prompt is padded too
    passes = [slice(0, 30)] + [slice(t, t + 1) for t in range(30, 35)] + [slice(35, 42), slice(42, 43)]

    def logits(rows, columns):
        cache, outputs, past = pod.make_cache(model, spec, **SIZES), [], 0
        for part in passes:
            chosen = [c for c in range(part.start, part.stop) if c in columns]
            if chosen:
                past += len(chosen)
                seen = mask[rows][:, [c for c in columns if c < part.stop]]
                outputs.append(model(ids[rows][:, chosen], attention_mask=seen, past_key_values=cache).logits)
        return torch.cat(outputs, 1)

    together = logits([0, 1, 2], list(range(43)))
    for row in range(3):
        real = [c for c in range(43) if mask[row, c]]
        assert (logits([row], real)[0] - together[row, real]).abs().max() <= 1e-9


@pytest.mark.slow
def test_generate_and_beams(tools):
    model = tools.make_pod("llama", plan=True)
    ids, mask = tools.random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, :9], mask[2, :31] = 0, 0
    for more in ({}, {"num_beams": 3}, {"prefill_chunk_size": 7}):
        arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | more
        cache = pod.make_cache(model, "pod+int4", **SIZES)
        together = model.generate(ids, attention_mask=mask, past_key_values=cache, **arguments)
        for row in range(3):
            cache = pod.make_cache(model, "pod+int4", **SIZES)
            real = ids[row][mask[row].bool()][None]
            alone = model.generate(real, past_key_values=cache, **arguments)
            assert torch.equal(together[row, -12:], alone[0, -12:])


@torch.no_grad()
@pytest.mark.parametrize("spec", ["kivi", "int4", "pod+int4", "pod+int8"])
def test_measured_bytes_are_predicted_within_one_percent(tools, spec):
    changes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    }
    model = tools.make_pod("qwen3", torch.float32, windows=(16, 480), plan=spec.startswith("pod"), **changes)
    caches = [
        pod.make_cache(model, spec),
        pod.make_cache(model, "pod" if spec.startswith("pod") else "full"),
    ]
    for cache in caches:
        model(tools.random_ids(1, 4000), past_key_values=cache, logits_to_keep=1)
        model(tools.random_ids(1, 1), past_key_values=cache)
    packed, native = (
        sum(n for part, n in c.nbytes_by_part().items() if part != "bookkeeping") for c in caches
    )
    assert rule_nbytes(caches[0]) <= packed <= 1.01 * rule_nbytes(caches[0])
    assert packed < native * {"kivi": 0.17, "pod+int8": 0.36}.get(spec, 0.25)


@torch.no_grad()
def test_a_long_residual_is_the_native_cache(tools):
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(2, 50)
    turns = [("prompt", 30), ("decode", 20)]
    packed = run_cache(model, pod.make_cache(model, "int4", residual=50), ids, turns)
    assert torch.equal(packed, run_cache(model, pod.make_cache(model, "full"), ids, turns))
    assert (NaiveDecoder(model).run(ids[0], turns) - packed[0]).abs().max() <= 1e-9


def test_refusals(tools):
    model = tools.make_pod("llama", plan=False, head_dim=24)
    for options, message in [
        ({"group_size": 5}, "5 does not divide head_dim = 24; leave it out, or choose one of 2, 3, 4, 6, 8,"),
        ({"group_size": 1}, "at least 2"),
        ({"residual": -1}, "residual = -1 must be at least 0"),
        ({"group": 4}, "did you mean 'group_size'"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, "int4", **options)
    with pytest.raises(ValueError, match="no decode engine here.*in 4 bits"):
        pod.make_cache(model, "full+kivi", capacity=64, group_size=4)
    narrow = tools.make_pod("llama", plan=False, head_dim=6)
    with pytest.raises(
        ValueError, match="kivi: 2 bits of head_dim = 6 channels do not fill whole bytes.*multiple of 4"
    ):
        pod.make_cache(narrow, "kivi", group_size=2)
    assert pod.make_cache(model, "int4", group_size=32) is not None  # one group per token
    with pytest.raises(ValueError, match="rows that are alike"):
        GroupQuantizer(4, 4, 4).tokens("keys").append_ragged(None, None)


# -- bits of a plan -------------------------------------------------------------------------


class PlannedBits(oracles.PackedPod):
    """Layers of 4 bits pack as ``pod+int4`` does, the others do not."""

    bits, size, residual, layers = 4, 32, 128, (0, 3)

    def pack_keys(self, layer, head, entries):
        if layer in self.layers:
            super().pack_keys(layer, head, entries)

    def resting(self, entries, windows):
        packs = any(entries is heads for layer in self.layers for heads in self.entries[layer])
        return super().resting(entries, windows) if packs else []


def planned(tools, bits, windows=(4, 11), **changes):
    stock = tools.make_stock("llama", **changes)
    plan = pod.SharingPlan(tools.lead, bits=bits)
    return pod.load_model(stock, plan=plan, num_sink_tokens=windows[0], num_recent_tokens=windows[1])


@pytest.mark.parametrize("head_dim", [16, 80])  # one group of channels, two of 40
def test_every_layer_holds_the_bits_of_the_plan(tools, head_dim):
    model = planned(tools, [4, 16, 16, 4, 16], head_dim=head_dim)
    ids = tools.random_ids(1, 230)[0]
    turns = [("prompt", 180), ("decode", 12), ("prompt", 38)]
    full = PodSelected(model, selection=None).run(ids, turns)
    make = lambda: pod.make_cache(model)  # noqa: E731
    assert_agrees(model, PlannedBits(model, selection=None), make, ids, turns, full=full)
    every, named = planned(tools, [4] * 5, head_dim=head_dim), tools.make_pod("llama", head_dim=head_dim)
    caches = [pod.make_cache(every, "pod"), pod.make_cache(named, "pod+int4")]
    logits = [run_cache(m, cache, ids[None], turns) for m, cache in zip((every, named), caches, strict=True)]
    assert torch.equal(*logits) and rule_nbytes(caches[0]) == rule_nbytes(caches[1])


@torch.no_grad()
@pytest.mark.parametrize("recent", [128, 600])  # all tokens of a window are native, or most of them packed
@pytest.mark.parametrize(
    ("bits", "head_dim"),
    [([4, 16, 8, 4, 16], 64), ([16, 16, 8, 8, 8], 64), ([4] * 5, 64), ([4] * 5, 80), ([8, 4, 4, 4, 4], 16)],
    ids=str,
)
def test_bytes_of_a_plan_are_those_that_it_says(tools, bits, head_dim, recent):
    """Of a model that computes in 16 bits; groups of channels are 32, 40 and 16."""
    changes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
    }
    stock = tools.make_stock("qwen3", torch.bfloat16, **changes)
    plan = pod.SharingPlan(tools.lead, bits=bits)
    model = pod.load_model(stock, plan=plan, num_sink_tokens=16, num_recent_tokens=recent)
    cache, dense = pod.make_cache(model), pod.make_cache(pod.load_model(stock))
    for each, reader in ((cache, model), (dense, pod.load_model(stock))):
        reader(tools.random_ids(1, 6000), past_key_values=each, logits_to_keep=1)
    held = [sum(n for part, n in c.nbytes_by_part().items() if "keep" not in part) for c in (cache, dense)]
    assert held[0] / held[1] == pytest.approx(1 - model.config.sharing_plan.saving(6000), rel=0.01)


def test_bits_that_are_refused(tools, tmp_path):
    for bits, message in (([4, 4], "for each of 5 layers"), ([4, 4, 4, 4, 2], "16, 8 or 4")):
        with pytest.raises(ValueError, match=message):
            pod.SharingPlan(tools.lead, bits=bits)
    plan = pod.SharingPlan(tools.lead, bits=[4, 16, 16, 4, 16])
    plan.save(tmp_path / "plan.json")
    assert pod.SharingPlan.load(tmp_path / "plan.json") == plan != pod.SharingPlan(tools.lead)
    assert not pod.SharingPlan(pod.SharingPlan.dense(5, 2).lead, bits=[4] * 5).is_dense
    with pytest.raises(ValueError, match="no bits of its own"):
        pod.PodConfig(num_hidden_layers=2, num_key_value_heads=2, layout="window", kv_bits=[4, 4])
