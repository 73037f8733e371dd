"""Column sums and last rows of attention.

Loops over the definition, a plain version, the one in blocks, its memory and work.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pod.kernels import statistics
from pod.kernels.statistics import attention_column_sums, attention_rows


def tensors(batch, heads, groups, m, n, d, dtype=torch.float64, seed=0):
    """q ``[B, G·H, m, d]`` and k ``[B, H, n, d]``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads * groups, m, d), (batch, heads, n, d)
    return [torch.randn(s, generator=generator, dtype=torch.float64).mul(1.5).to(dtype) for s in shapes]


def loops(q, k, scale=None):
    """Softmax rows ``[B, Hq, m, n]``, one query at a time."""
    batch, query_heads, m, d = q.shape
    n = k.shape[2]
    scale = 1 / math.sqrt(d) if scale is None else scale
    rows = torch.zeros(batch, query_heads, m, n, dtype=q.dtype)
    for b in range(batch):
        for h in range(query_heads):
            for i in range(m):
                seen = k[b, h * k.shape[1] // query_heads, : n - m + i + 1]
                rows[b, h, i, : len(seen)] = (seen @ q[b, h, i] * scale).softmax(0)
    return rows


def plain_logits(q, k, scale=None):
    """Scaled logits ``[B, Hq, m, n]``, hidden ones ``-inf``, in at least fp32."""
    m, n, scale = q.shape[2], k.shape[2], q.shape[-1] ** -0.5 if scale is None else scale
    compute = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(compute).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.to(compute) @ keys.transpose(2, 3) * scale
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    return logits.masked_fill(hidden, float("-inf"))


def plain_sums(q, k, scale=None):
    """Sums and sums of squares by the whole ``m x n`` matrix."""
    weights = plain_rows(q, k, scale)
    return torch.stack([weights.sum(2), weights.square().sum(2)])


def plain_rows(q, k, scale=None):
    return plain_logits(q, k, scale).softmax(-1)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


SHAPES = [(1, 1), (1, 63), (7, 63), (63, 63), (77, 500), (500, 500)]  # m, n


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("version", ["plain", "blocked"])
def test_the_definition(version, groups, scale):
    q, k = tensors(2, 2, groups, 9, 23, 4)
    truth = loops(q, k, scale)
    exact = {"rtol": 0, "atol": 1e-13}
    if version == "plain":
        rows, (sums, squares) = plain_rows(q, k, scale), plain_sums(q, k, scale)
    else:
        rows = attention_rows(q, k, scale)
        sums, squares = attention_column_sums(q, k, scale, squares=True)
    torch.testing.assert_close(rows, truth, **exact)
    torch.testing.assert_close(sums, truth.sum(2), **exact)
    torch.testing.assert_close(squares, truth.square().sum(2), **exact)


@pytest.fixture(params=["usual blocks", "small blocks"])
def block_elements(request, monkeypatch):
    """With small blocks every loop of the blocked version runs several times, over ragged ends."""
    if request.param == "small blocks":
        monkeypatch.setattr(statistics, "_CPU_ELEMENTS", 1 << 12)
        monkeypatch.setattr(statistics, "_LEAST_ROWS", 45)


@pytest.fixture
def poisoned_memory():
    """What ``torch.empty`` returns holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("block_elements", "poisoned_memory")
def test_blocks_are_as_exact_as_the_plain_version(shape, groups, dtype):
    q, k = tensors(2 if shape[1] < 500 else 1, 2, groups, *shape, 16, dtype)
    exact = q.double(), k.double()
    true_sums, true_squares = plain_sums(*exact)
    true_rows = plain_rows(*exact)
    wide = torch.promote_types(dtype, torch.float32)
    rounding = 1e-14 if dtype == torch.float64 else torch.finfo(wide).eps  # in fp64 the truth has errors too
    sums, squares = attention_column_sums(q, k, squares=True)
    expected = plain_sums(q, k)
    assert sums.dtype == squares.dtype == wide
    assert relative(sums, true_sums) <= 2 * (relative(expected[0], true_sums) + rounding)
    assert relative(squares, true_squares) <= 2 * (relative(expected[1], true_squares) + rounding)
    assert torch.equal(sums, attention_column_sums(q, k))
    rows = attention_rows(q, k)
    assert rows.dtype == wide and rows.shape == true_rows.shape
    limit = 2 * (relative(plain_rows(q, k), true_rows) + rounding)
    assert relative(rows, true_rows) <= limit
    assert not rows[true_rows == 0].any()


class TensorCores(TorchDispatchMode):
    """CUDA's product of 16-bit factors with an fp32 result, which CPUs lack: exact products, fp32 sums."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.baddbmm.dtype_out:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        before, queries, keys, dtype = args
        assert kwargs["beta"] == 0 and before is kwargs["out"]
        assert queries.dtype == keys.dtype and before.dtype == dtype == torch.float32
        return kwargs["out"].copy_((queries.float() @ keys.float()) * kwargs["alpha"])


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("block_elements", "poisoned_memory")
def test_sixteen_bit_factors_are_multiplied_as_they_are(shape, scale, monkeypatch):
    q, k = tensors(1, 2, 3, *shape, 16, torch.bfloat16)
    monkeypatch.setattr(statistics, "_multiplies_narrow", lambda q, k: q.dtype == k.dtype == torch.bfloat16)
    true_sums, true_squares = plain_sums(q.double(), k.double(), scale)
    true_rows = plain_rows(q.double(), k.double(), scale)
    expected = plain_sums(q, k, scale)
    with TensorCores() as cores:
        sums, squares = attention_column_sums(q, k, scale, squares=True)
        rows = attention_rows(q, k, scale)
    assert cores.calls >= 2
    assert sums.dtype == rows.dtype == torch.float32
    rounding = torch.finfo(torch.float32).eps
    assert relative(sums, true_sums) <= 2 * (relative(expected[0], true_sums) + rounding)
    assert relative(squares, true_squares) <= 2 * (relative(expected[1], true_squares) + rounding)
    assert relative(rows, true_rows) <= 2 * (relative(plain_rows(q, k, scale), true_rows) + rounding)


def test_which_factors_are_multiplied_as_they_are():
    def like(dtype, is_cuda=True):
        return SimpleNamespace(dtype=dtype, is_cuda=is_cuda)

    for dtype in (torch.bfloat16, torch.float16):
        assert statistics._multiplies_narrow(like(dtype), like(dtype))
        assert not statistics._multiplies_narrow(like(dtype, is_cuda=False), like(dtype, is_cuda=False))
        assert not statistics._multiplies_narrow(like(dtype), like(torch.float32))
        assert not statistics._multiplies_narrow(like(torch.float32), like(dtype))
    for dtype in (torch.float32, torch.float64):
        assert not statistics._multiplies_narrow(like(dtype), like(dtype))


def test_every_query_gives_away_exactly_one():
    q, k = tensors(1, 2, 3, 200, 333, 8)
    sums = attention_column_sums(q, k)
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 6), 200.0, dtype=torch.float64))
    assert torch.equal(sums[..., -1] > 0, torch.ones(1, 6, dtype=torch.bool))


def test_chunks_of_queries_add_up():
    """Chunks of queries add up to the whole.

    They are accumulated over chunks of a prompt, each with the keys so far: what a method does that never
    sees all queries at once.
    """
    q, k = tensors(2, 2, 2, 90, 90, 8)
    total = torch.zeros(2, 4, 90, dtype=torch.float64)
    for start, end in ((0, 1), (1, 40), (40, 77), (77, 90)):
        total[..., :end] += attention_column_sums(q[:, :, start:end], k[:, :, :end])
    torch.testing.assert_close(total, attention_column_sums(q, k), rtol=0, atol=1e-12)


def test_large_logits_do_not_overflow():
    q, k = tensors(1, 1, 2, 40, 50, 8, torch.float32)
    truth = attention_column_sums(q.double() * 200, k.double())
    assert relative(attention_column_sums(q * 200, k), truth) < 1e-3


def test_views_as_models_make_them():
    """Heads are a transposed view of a projection, keys a part of a larger store; neither may change."""
    q, k = tensors(2, 2, 3, 40, 70, 8)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    store = torch.full((2, 2, 100, 8), float("nan"), dtype=torch.float64)
    store[:, :, :70] = k
    strided.requires_grad_()
    sums = attention_column_sums(strided, store[:, :, :70])
    assert torch.equal(sums, attention_column_sums(q, k)) and not sums.requires_grad
    assert torch.equal(attention_rows(strided, store[:, :, :70]), attention_rows(q, k))
    assert torch.equal(store[:, :, :70], k) and torch.equal(strided.detach(), q)


def test_autocast_does_not_round_the_logits():
    q, k = tensors(1, 2, 2, 40, 70, 16, torch.float32)
    plain = attention_column_sums(q, k), attention_rows(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_column_sums(q, k), plain[0])
        assert torch.equal(attention_rows(q, k), plain[1])


def test_no_queries():
    q, k = tensors(2, 2, 2, 0, 5, 4)
    assert torch.equal(attention_column_sums(q, k), torch.zeros(2, 4, 5, dtype=torch.float64))
    assert attention_rows(q, k).shape == (2, 4, 0, 5)


class Allocations(TorchDispatchMode):
    """Elements of every storage that is made."""

    def __init__(self, *inputs):
        super().__init__()
        self.seen = {x.untyped_storage().data_ptr() for x in inputs}
        self.known = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.seen.add(storage.data_ptr())
                    self.known.append(
                        (storage, storage.nbytes() // x.element_size())
                    )  # alive: its address stays its own
        return out

    @property
    def sizes(self):
        return sorted(size for _, size in self.known)


def test_memory_of_column_sums_is_linear(monkeypatch):
    elements, groups = 1 << 14, 2
    monkeypatch.setattr(statistics, "_CPU_ELEMENTS", elements)
    for n in (1000, 2000):
        q, k = tensors(1, 2, groups, n, n, 8, torch.float32)
        with Allocations(q, k) as allocations:
            attention_column_sums(q, k, squares=True)
        # two buffers of at most 32 rows (the size of a block is above `elements` here), or the 4·H·G·n sums
        assert allocations.sizes[-1] <= 2 * max(elements, 32 * n)
        assert sum(allocations.sizes) < n * n  # all that was ever made is less than one head's matrix
        if n == 1000:
            with Allocations(q, k) as allocations:
                plain_sums(q, k)
            assert allocations.sizes[-1] >= 4 * n * n  # the measure sees a matrix when there is one


def test_memory_of_rows_is_the_result(monkeypatch):
    elements = 1 << 14
    monkeypatch.setattr(statistics, "_CPU_ELEMENTS", elements)
    q, k = tensors(2, 4, 2, 16, 1500, 8, torch.float32)
    with Allocations(q, k) as allocations:
        out = attention_rows(q, k)
    assert allocations.sizes[-1] == out.numel()
    assert allocations.sizes[-2] <= 32 * 1500


def test_work_is_half_of_the_square():
    q, k = tensors(1, 1, 1, 4096, 4096, 8, torch.float32)
    with FlopCounterMode(display=False) as counter:
        attention_column_sums(q, k)
    assert 0.5 <= counter.get_total_flops() / (2 * 8 * 4096**2) <= 0.53


def test_shapes_that_do_not_fit_are_no_shapes_of_a_layer():
    q, k = tensors(1, 2, 2, 4, 8, 4)
    for bad in ((q.new_zeros(1, 4, 9, 4), k), (q[:, :3], k), (q, k[..., :3])):
        for function in (attention_rows, attention_column_sums):
            with pytest.raises(AssertionError):
                function(*bad)
