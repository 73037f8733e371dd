"""What FlexAttention is told to compute: blocks against naive masks, no tensor of n x n, how often it is
compiled; and when it is chosen."""

import logging
from types import SimpleNamespace

import flex_eager
import pytest
import torch
from test_chunks import made
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import pod  # noqa: F401  (registers the implementations)
from pod.kernels import flex
from pod.modeling.model import attend as operation
from pod.modeling.model.attend import (
    AUTO_ORDER,
    CAUSAL,
    IMPLEMENTATIONS,
    Call,
    Segment,
    Segments,
    SharedQK,
    Tokens,
    Visibility,
    attend,
    choose,
)

CPU = torch.device("cpu")


def random_segments(seed, batch=3, columns=37):
    """Chunks behind pasts, documents, gaps, rows that share a segment; and ``(B, m, n)``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(0, most + 1, (), generator=generator))

    found, row = [], 0
    while row < batch:
        rows = row, min(batch, row + 1 + draw(1))
        query = key = 0
        while True:
            query, key, past, count = query + draw(3), key + draw(3), draw(9), 1 + draw(11)
            if query + count > columns or key + past + count > columns + 9:
                break
            found.append(Segment(rows, (query, query + count), (key, key + past + count)))
            query, key = query + count, key + past + count
        row = rows[1]
    return Segments(found), (batch, columns, columns + 9)


def naive_mask(segments, shape, see, is_far):
    """``[B·m, B·n]``, token by token from the definitions."""
    batch, m, n = shape
    seen = torch.zeros(batch * m, batch * n, dtype=torch.bool)
    n_r = n if see.num_recent_tokens is None else see.num_recent_tokens
    for segment in segments.all:
        for row in range(*segment.rows):
            for number, column in enumerate(range(*segment.queries)):
                for position, place in enumerate(range(*segment.keys)):
                    distance = segment.past + number - position
                    near = position < see.num_sink_tokens or distance < n_r
                    if (distance >= 0 or not see.causal) and near != is_far:
                        seen[row * m + column, row * n + place] = True
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_blocks_say_what_a_naive_mask_says(monkeypatch, seed):
    """Blocks that are not listed hide everything, whole ones show everything, and the mask is right."""
    block = (4, 8, 16)[seed % 3]
    monkeypatch.setattr(flex, "_BLOCK", block)
    segments, shape = random_segments(seed)
    layout, places = flex.lay_out(segments, shape, CPU), shape[0] * shape[2]
    for see in (CAUSAL, Visibility(causal=False), Visibility(0, 1), Visibility(2, 5), Visibility(9, 90)):
        for is_far in (False, True):
            seen = naive_mask(segments, shape, see, is_far)
            mask = flex.block_mask(flex.runs_of(layout, see, is_far), places)
            assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
            dense = create_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device="cpu")[0, 0]
            assert torch.equal(dense, seen), (see, is_far)
            some, every = tiles(seen, block)
            partial = listed(mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0])
            whole = listed(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0])
            assert not (partial & whole).any()
            assert not (whole & ~every).any()
            assert not (some & ~(partial | whole)).any()


def tiles(seen, block):
    """Which pairs of blocks show something, and which show everything."""
    rows, columns = (-(-size // block) * block for size in seen.shape)
    padded = torch.zeros(rows, columns, dtype=torch.bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    each = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2).flatten(2)
    return each.any(-1), each.all(-1)


def listed(count, index):
    pairs = torch.zeros(index.shape, dtype=torch.bool)
    for row in range(len(count)):
        pairs[row, index[row, : count[row]].long()] = True
    return pairs


@pytest.mark.parametrize("windows", [(0, None), (16, 48), (0, 40), (40, 16)], ids=str)
def test_one_sequence_lists_no_block_in_vain(monkeypatch, windows):
    monkeypatch.setattr(flex, "_BLOCK", 8)
    segments, shape, see = Segments.whole(1, 117, 203), (1, 117, 203), Visibility(*windows)
    for is_far in (False, True):
        runs = flex.runs_of(flex.lay_out(segments, shape, CPU), see, is_far)
        partial, whole = flex.blocks_of(runs, 203)
        some, every = tiles(naive_mask(segments, shape, see, is_far), 8)
        assert torch.equal(partial | whole, some) and torch.equal(whole, every)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    """16K tokens in documents, around the kernels: pairs of blocks, and what the inputs hold."""
    n, blocks = 1 << 14, 1 << 7
    masks = []

    def kernel(q, k, v, block_mask, **options):
        masks.append(block_mask)
        return torch.zeros_like(q), AuxOutput(lse=torch.zeros(q.shape[:-1]))

    monkeypatch.setattr(flex, "flex_attention", kernel)
    inputs = [torch.zeros(1, 2, n, 8) for _ in range(5)]
    call = Call(
        inputs[0], Tokens(*inputs[1:3]), SharedQK(*inputs[3:]), Visibility(16, 1008),
        Segments.of_documents(torch.arange(n)[None] // 3000, 1), 1.0,
    )  # fmt: skip
    with Largest() as largest:
        flex.attend(call)
    assert largest.elements <= 16 * n + 256 < n * n // 900
    assert [mask.kv_indices.shape for mask in masks] == [(1, 1, blocks, blocks)] * 2


def test_masks_are_made_once_in_a_pass(monkeypatch):
    made_masks = []
    original = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *x: made_masks.append(1) or original(*x))
    flex_eager.install(monkeypatch)
    inputs, segments = made(([0], [20])), Segments.whole(1, 20, 20)
    q, k, v, *lead = inputs
    with torch.inference_mode():
        attend(q, Tokens(k, v), SharedQK(*lead), Visibility(2, 5), segments, backend="flex")
    for _ in range(3):  # later layers, with gradients
        leaf = q.clone().requires_grad_()
        attend(leaf, Tokens(k, v), SharedQK(*lead), Visibility(2, 5), segments, backend="flex")[
            0
        ].sum().backward()
    assert len(made_masks) == 2
    attend(q, Tokens(k, v), None, CAUSAL, segments, backend="flex")
    assert len(made_masks) == 3


def test_windows_documents_and_numbers_of_heads_share_what_is_compiled(monkeypatch):
    """Whole graphs, and one more for other numbers of heads; none for other windows, documents or pasts."""
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    flex_eager.install(monkeypatch)
    compiled = torch.compile(flex.attend_to_places, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "_function", lambda device_type: compiled)
    counts = []
    for heads, windows, segments in (
        (5, (2, 9), Segments.whole(1, 32, 32)),
        (3, (2, 9), Segments.whole(1, 32, 32)),
        (4, (0, 5), Segments.whole(1, 32, 32)),
        (2, (3, 7), Segments.of_documents(torch.arange(32)[None] // 10, 1)),
    ):
        q, k, v, *lead = made(([0], [32]), heads=heads)
        leaf = q.requires_grad_()
        out, _ = attend(leaf, Tokens(k, v), SharedQK(*lead), Visibility(*windows), segments, backend="flex")
        torch.autograd.grad(out.sum(), leaf)
        counts.append(len(graphs))
    assert counts == [1, 2, 2, 2]


# -- when it is chosen ---------------------------------------------------------------------------------------


def cuda_call(dtype=torch.float32, head_dim=64, visibility=CAUSAL):
    q = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=dtype, shape=(1, 2, 8, head_dim))
    return Call(q, Tokens(q, q), None, visibility, Segments.whole(1, 8, 8), 1.0)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0, as far as the reasons look."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(operation, "_said", set())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "chosen"),
    [
        (torch.bfloat16, 64, "flash"),
        (torch.float32, 64, "flex"),
        (torch.float32, 80, "flex"),
        (torch.bfloat16, 20, "flex"),  # flash takes multiples of 8
        (torch.bfloat16, 264, "reference"),
        (torch.float32, 8, "reference"),
        (torch.float64, 64, "reference"),
    ],
    ids=str,
)
def test_auto_takes_flash_then_flex_then_the_reference(gpu, dtype, head_dim, chosen):
    found = choose("attention", IMPLEMENTATIONS, AUTO_ORDER[1:], cuda_call(dtype, head_dim), "auto")
    assert found is IMPLEMENTATIONS[chosen]


def test_auto_says_once_what_it_chose_and_why(gpu, caplog):
    with caplog.at_level(logging.INFO):
        for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
            choose("attention", IMPLEMENTATIONS, AUTO_ORDER[1:], cuda_call(dtype), "auto")
        q, k, v, *_ = made(([0], [5]))
        attend(q, Tokens(k, v))  # nothing is said on a CPU
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "attention on cuda runs flex, as flash cannot run: dtype torch.float32 on CUDA (needs float16 or "
            "bfloat16)",
        ),
        ("INFO", "attention on cuda runs flash"),
    ]


def test_a_named_backend_says_why_it_cannot_run(gpu):
    def reason(call):
        with pytest.raises(ValueError) as caught:
            choose("attention", IMPLEMENTATIONS, AUTO_ORDER, call, "flex")
        return str(caught.value)

    assert "head_dim 8 (16 to 256)" in reason(cuda_call(head_dim=8))
    assert "dtype torch.float64 (float32, float16 or bfloat16)" in reason(cuda_call(torch.float64))
    single = cuda_call()
    mixed = single._replace(tokens=Tokens(single.q, cuda_call(torch.bfloat16).q))
    assert "keys or values of another dtype than the queries (torch.float32)" in reason(mixed)
    positions = Visibility(positions=torch.zeros(1, 2, 8))
    assert "tokens with positions of their own" in reason(cuda_call(visibility=positions))
    q = torch.zeros(1, 2, 8, 64)
    with pytest.raises(
        ValueError, match="'flex' cannot run: device cpu .CUDA only: elsewhere it holds n x n"
    ):
        attend(q, Tokens(q, q), backend="flex")
    assert not torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    """Compiled, against fp64, next to the error of the reference in this dtype."""
    for n, head_dim, see in ((63, 64, Visibility(4, 8)), (700, 80, Visibility(16, 100)), (513, 20, CAUSAL)):
        inputs = [x.cuda() for x in made(([0], [n]), d=head_dim)]
        used = inputs if see.num_recent_tokens else inputs[:3]

        def run(backend, dtype, used=used, see=see):
            leaves = [x.to(dtype).requires_grad_() for x in used]
            q, k, v, *lead = leaves
            out, _ = attend(q, Tokens(k, v), SharedQK(*lead) if lead else None, see, backend=backend)
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

        truth = run("reference", torch.float64)
        for exact, a, b in zip(truth, run("flex", dtype), run("reference", dtype), strict=True):
            error, of_reference = ((x.double() - exact).norm() / exact.norm() for x in (a, b))
            assert error <= 2 * (of_reference + torch.finfo(dtype).eps)
