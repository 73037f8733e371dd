"""Products with packed tokens against fp64 arithmetic on the same codes, unpacked one number at a time."""

import itertools
import math

import pytest
import torch
from host_reads import none_allowed

import pod
from pod.modeling.model import packed as packed_tokens
from pod.modeling.model.packed import Packed, Packing
from pod.modeling.model.quantized import PackedTokens

NAN = math.nan


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def meaning(x: Packed, length: int) -> torch.Tensor:
    """``[B, h, length, d]`` in fp64: what the bytes say, by the words of ``Packed``."""
    batch, heads, _, d = x.shape
    out = torch.full((batch, heads, length, d), NAN, dtype=torch.float64)
    bits = 8 * x.codes.shape[3] // d
    for b, h, p in itertools.product(range(batch), range(heads), range(length)):
        if p >= x.packed_lengths.view(batch, -1)[b, min(h, x.packed_lengths.view(batch, -1).shape[1] - 1)]:
            out[b, h, p] = x.tail[b, h, (p - x.tail_start) % x.tail.shape[2]].double()
            continue
        row = x.codes[b, h, p].long()
        numbers = torch.cat([row // 2**low % 2**bits for low in range(0, 8, bits)])
        if x.per_channel:
            zero, scale = x.zero[b, h, p // x.group_size], x.scale[b, h, p // x.group_size]
        else:
            width = d // x.zero.shape[3]
            zero, scale = (y[b, h, p].repeat_interleave(width) for y in (x.zero, x.scale))
        out[b, h, p] = zero.double() + numbers.double() * scale.double()
    return out


def packed(n, d, packing, residual, dtype=torch.float32, batch=2, heads=3, offset=0.0, capacity=0):
    """A flushed buffer of ``n`` tokens, and the tokens."""
    buffer = PackedTokens(packing, residual, capacity)
    x = (randn(batch, heads, n, d, seed=n) + offset).to(dtype)
    buffer.append(x, 0)
    buffer.flush(n)
    return buffer, x


def assert_products(stored: Packed, n: int, dtype: torch.dtype, tolerance: float, groups=3):
    batch, heads, _, d = stored.shape
    numbers = meaning(stored, n)
    q = randn(batch, heads, groups, d, seed=1, dtype=dtype)
    out = torch.full((batch, heads, groups, n), NAN, dtype=dtype)
    stored.scores(q, out)
    expected = q.double() @ numbers.transpose(2, 3)
    size = q.double().abs() @ numbers.abs().transpose(2, 3)
    assert ((out - expected).abs() <= tolerance * size.amax()).all()
    assert (out - expected).norm() <= tolerance * expected.norm()
    for start, stop in ((0, n), (3, n - 2), (n - 3, n), (5, 5)):
        weights = randn(batch, heads, groups, n, seed=2, dtype=dtype)[..., start:stop].softmax(-1)
        found = stored.weighted(weights, start, stop)
        expected = weights.double() @ numbers[:, :, start:stop]
        assert found.dtype == dtype and (found - expected).norm() <= tolerance * expected.norm()


CASES = [
    (4, 32, True, 64, 300, 128),
    (4, 32, False, 64, 300, 128),
    (4, 32, False, 96, 70, 5),  # three groups: one reaches across the halves of a byte
    (4, 64, False, 32, 130, 0),  # one group of all channels
    (4, 32, False, 80, 70, 5),  # groups of 40
    (4, 32, False, 112, 70, 5),  # groups of 28
    (2, 32, False, 80, 70, 5),
    (4, 16, True, 10, 90, 7),  # rows of codes that are no multiple of four bytes
    (4, 2, False, 10, 41, 7),
    (2, 32, True, 64, 300, 128),
    (2, 32, False, 64, 300, 128),
    (2, 32, False, 96, 70, 5),  # groups reach across the quarters of a byte
    (2, 16, True, 12, 90, 7),  # rows of codes that are no multiple of four bytes
    (2, 64, False, 32, 130, 0),
    (8, 32, True, 64, 200, 20),
    (8, 16, False, 48, 100, 20),
]


@pytest.mark.parametrize("tile", [64, 1 << 20], ids=["many tiles", "one tile"])
@pytest.mark.parametrize(("bits", "size", "per_channel", "d", "n", "residual"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-14)], ids=str)
def test_products(monkeypatch, tile, bits, size, per_channel, d, n, residual, dtype, tolerance):
    monkeypatch.setattr(packed_tokens, "tile_elements", lambda device: tile)
    packing = Packing(bits=bits, group_size=size, per_channel=per_channel)
    buffer, _ = packed(n, d, packing, residual)
    assert isinstance(buffer.stored, Packed)
    assert_products(buffer.stored, n, dtype, tolerance)


def test_products_of_2048_tokens_far_from_zero():
    """Scales fold into queries and weights without loss, also where zeros are large."""
    for per_channel in (True, False):
        buffer, _ = packed(
            2100, 64, Packing(bits=4, group_size=32, per_channel=per_channel), 128, offset=30.0
        )
        assert isinstance(buffer.stored, Packed)
        assert_products(buffer.stored, 2100, torch.float32, 1e-5)


def test_sums_of_8192_tokens_lose_no_digits():
    """Sums of 8192 tokens lose no digits.

    Counted from the smallest numbers of the groups, parts of 2.0 would cancel to 0.01, with a hundred times
    this error.
    """
    buffer, _ = packed(8192, 64, Packing(bits=4, group_size=32, per_channel=False), 128, batch=1, heads=1)
    stored = buffer.stored
    assert isinstance(stored, Packed)
    weights = randn(1, 1, 3, 8192, seed=1).softmax(-1)
    expected = weights.double() @ meaning(stored, 8192)
    assert (stored.weighted(weights, 0, 8192) - expected).norm() <= 5e-6 * expected.norm()


@pytest.mark.parametrize("d", [64, 128])
def test_16_bit_models(d):
    """Products of bf16 queries are exact but for the rounding of the output: computed in fp32."""
    buffer, _ = packed(2048, d, Packing(bits=4, group_size=32, per_channel=False), 128, torch.bfloat16, 1, 2)
    assert isinstance(buffer.stored, Packed)
    weights = (3 * randn(1, 2, 4, 2048, seed=3)).softmax(-1)
    expected = weights.double() @ meaning(buffer.stored, 2048)
    rounding = (expected.bfloat16() - expected).norm()
    found = buffer.stored.weighted(weights, 0, 2048).bfloat16()
    assert (found - expected).norm() <= 1.1 * rounding


@pytest.mark.parametrize("capacity", [0, 200])
@pytest.mark.parametrize("per_channel", [True, False])
def test_products_while_tokens_come(per_channel, capacity):
    """At rest, behind a decoded token, and inside a second prompt; slots without a token are spoilt."""
    packing = Packing(bits=4, group_size=8, per_channel=per_channel)
    buffer, _ = packed(50, 16, packing, 10, capacity=capacity)
    for count, m in enumerate((1, 1, 1, 30, 5, 1)):
        length = buffer.length
        buffer.append(randn(2, 3, m, 16, seed=count), length)
        stored = buffer.stored
        assert isinstance(stored, Packed) and stored.bounds == (buffer.newest.first, buffer.packed_stop)
        spoilt = [x.clone() for x in (stored.zero, stored.scale)]
        for x in spoilt:
            x[:, :, buffer.packed_stop // packing.shared :] = NAN
        stored = stored._replace(zero=spoilt[0], scale=spoilt[1])
        assert torch.equal(buffer.read(length + m).double(), meaning(stored, length + m).float().double())
        assert_products(stored, length + m, torch.float32, 1e-5)
        if m < 30:
            buffer.flush(length + m)


def test_products_after_heads_kept_different_tokens():
    buffer, _ = packed(60, 16, Packing(bits=4, group_size=8, per_channel=False), 10)
    kept = [[torch.arange(30) + 5 * (h + 2 * b) for h in range(3)] for b in range(2)]
    buffer.keep(torch.stack([torch.stack(row) for row in kept]), 60)
    assert isinstance(buffer.stored, Packed) and buffer.stored.packed_lengths.shape == (2, 3)
    assert_products(buffer.stored, 30, torch.float32, 1e-5)
    assert_products(buffer.stored.heads(slice(1, 3)).rows(slice(0, 1)), 30, torch.float32, 1e-5)


def held_by(buffer: PackedTokens) -> torch.Tensor:
    stored = buffer.stored
    return meaning(stored, buffer.length) if isinstance(stored, Packed) else stored.double()


def test_a_token_that_leaves_with_each_decoded_one_makes_no_host_wait():
    """Other tokens in each head, packed and native ones: what stays keeps its codes until it is packed."""
    buffer, _ = packed(30, 16, Packing(bits=4, group_size=8, per_channel=False), 10)
    generator = torch.Generator().manual_seed(5)
    for step in range(25):
        buffer.append(randn(2, 3, 1, 16, seed=100 + step), 30)
        before = held_by(buffer)
        gone = torch.randint(0, 31, (2, 3, 1), generator=generator)
        index = torch.arange(30) + (torch.arange(30) >= gone)
        with none_allowed():
            buffer.keep(index, 31)
        expected = before.gather(2, index[..., None].expand(-1, -1, -1, 16))
        assert torch.equal(held_by(buffer), expected)
        buffer.check_integrity()
        with none_allowed():
            buffer.flush(30)
        buffer.check_integrity()
        found = held_by(buffer)
        native = torch.arange(30) >= buffer.packed_lengths.view(2, -1)[..., None]
        assert buffer.packed_lengths.min() >= 16
        assert torch.equal(found[native.expand(2, 3, -1)], expected[native.expand(2, 3, -1)])
        assert (found - expected).abs().max() < 0.35  # half a step of 15 between the numbers of a group
        assert_products(buffer.stored, 30, torch.float32, 1e-5)


@pytest.mark.parametrize("slots", [[0], [29], [3, 3, 25, 29, 3], [28, 29], [1, 2]], ids=str)
def test_writing_makes_no_host_wait(slots):
    """Packed slots and native ones, slots that come twice, heads that differ in what is packed."""
    buffer, _ = packed(60, 16, Packing(bits=4, group_size=8, per_channel=False), 10)
    index = torch.arange(30) + 5 * torch.arange(6).view(2, 3, 1)
    buffer.keep(index, 60)
    before = held_by(buffer)
    places = torch.tensor(slots).expand(2, 3, -1)
    new = randn(2, 3, 30, 16, seed=7).gather(2, places[..., None].expand(-1, -1, -1, 16))
    with none_allowed():
        buffer.write(places, new)
    after = held_by(buffer)
    for row, head in itertools.product(range(2), range(3)):
        for slot in range(30):
            if slot not in slots:
                assert torch.equal(after[row, head, slot], before[row, head, slot])
                continue
            x = new[row, head, slots.index(slot)].double()
            if slot >= buffer.packed_lengths[row, head]:
                assert torch.equal(after[row, head, slot], x)
            else:
                assert (after[row, head, slot] - x).abs().max() <= (x.max() - x.min()) / 30 + 1e-2


@pytest.mark.parametrize("spec", ["int4", "kivi", "pod+int4"])
def test_a_prompt_in_pieces_is_the_same_with_gradients_switched_on(tools, spec):
    """Packed tokens get no gradients. Fewer codes than tokens once crashed the process here."""
    model = tools.make_pod("llama") if spec.startswith("pod") else pod.load_model(tools.make_stock("llama"))
    ids = tools.random_ids(2, 310)
    logits = []
    for is_enabled in (False, True):
        with torch.set_grad_enabled(is_enabled):
            cache = pod.make_cache(model, spec)
            model(ids[:, :300], past_key_values=cache)
            logits.append(model(ids[:, 300:], past_key_values=cache).logits)
    assert logits[1].requires_grad
    torch.testing.assert_close(logits[0], logits[1].detach(), rtol=1e-5, atol=1e-5)
    logits[1].sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)
