"""Windows in the unit: attention in parts, bytes, cost, unbounded decoding, rows, packed windows, refusals.

Logits against naive oracles are in test_oracles_windows.py and test_oracles_ranked.py.
"""

import pytest
import torch
from oracle_tools import TURNS, run_cache
from oracles_ranked import LocalWindow
from oracles_windows import LMInfinite, StreamingLLM, WindowAttention
from rule_bytes import rule_nbytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.modeling.model import flash
from pod.modeling.model.attend import EVERYTHING, Tokens, Visibility, attend, merge
from pod.modeling.model.grouped import attend_slots

WINDOWS = {
    "streamingllm": {"num_sink_tokens": 3},
    "lm_infinite": {"num_sink_tokens": 3},
    "wa": {},
    "local_window": {},
}


def one_head_model(head_dim=8, longest=32768):
    """One layer and one head: what costs is the window."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        initializer_range=0.5,
    )
    return pod.load_model(LlamaForCausalLM(config).eval())


def payload(cache):
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


def one_softmax(q, k, v, window, other_q, other_k, other_v, bias=0.0):
    """Over a window of the keys and all of the other part, n×n in fp64; both scaled by 0.3."""
    groups = q.shape[1] // k.shape[1]
    q, other_q = q.double(), other_q.double()
    k, v, other_k, other_v = (x.double().repeat_interleave(groups, 1) for x in (k, v, other_k, other_v))
    m, n = q.shape[2], k.shape[2]
    distance = torch.arange(n - m, n)[:, None] - torch.arange(n)
    near = (q @ k.transpose(2, 3) * 0.3).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    logits = torch.cat((near, other_q @ other_k.transpose(2, 3) * 0.3 + bias), -1)
    return logits.softmax(-1) @ torch.cat((v, other_v), 2), logits.logsumexp(-1), logits.softmax(-1)


def random_parts(dtype, groups, m, n):
    """Queries, keys and values, and another part of 4 tokens that is seen with other queries.

    Its logits reach ±30.
    """
    generator = torch.Generator().manual_seed(m + n)
    heads = 2 * groups, 2, 2
    near = (
        torch.randn(2, h, length, 16, generator=generator) for h, length in zip(heads, (m, n, n), strict=True)
    )
    other = (
        torch.randn(2, h, length, 16, generator=generator) for h, length in zip(heads, (m, 4, 4), strict=True)
    )
    q, k, v, other_q, other_k, other_v = (x.to(dtype) for x in (*near, *other))
    return q, k, v, 3 * other_q, 3 * other_k, other_v


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 0.04)]


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("m", "n", "window"),
    [(1, 1, None), (7, 7, None), (300, 420, None), (300, 500, 60), (1, 9, 4), (130, 130, 5)],
)
def test_parts_of_a_window_equal_one_softmax(dtype, limit, groups, m, n, window):
    """Ragged strips, a window, and a part with queries of its own, in every precision."""
    q, k, v, other_q, other_k, other_v = random_parts(dtype, groups, m, n)
    near = attend(q, Tokens(k, v), visibility=Visibility(num_recent_tokens=window), scale=0.3)
    far = attend(other_q, Tokens(other_k, other_v), visibility=EVERYTHING, scale=0.3)
    out, lse = merge([near, far])
    expected, expected_lse, _ = one_softmax(q, k, v, window or n, other_q, other_k, other_v)
    assert out.dtype == dtype and (out - expected).abs().max() <= limit
    assert (lse - expected_lse).abs().max() <= 20 * limit  # of up to 60


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
@pytest.mark.parametrize("groups", [1, 3])
def test_tokens_beside_the_slots_are_part_of_the_same_softmax(dtype, limit, groups):
    q, k, v, _, other_k, other_v = random_parts(dtype, groups, 1, 37)
    out, lse, weights = attend_slots(q, k, v, 0.3, also=[(Tokens(other_k, other_v), 2.5)])
    expected = one_softmax(q, k, v, 37, q, other_k, other_v, bias=2.5)
    assert out.dtype == dtype and (out - expected[0]).abs().max() <= limit
    assert (lse - expected[1]).abs().max() <= limit
    assert (weights.flatten(1, 2) - expected[2][:, :, 0]).abs().max() <= min(limit, 1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_through_merged_parts(groups):
    """Gradients through merged parts are exact, and so are those of a decoded token.

    Parts of `reference` have log-sum-exps with gradients, so that a merge has exact ones.
    """
    tensors = [x.requires_grad_() for x in random_parts(torch.float64, groups, 5, 9)]
    q, k, v, other_q, other_k, other_v = tensors
    see = Visibility(num_recent_tokens=3)
    near = attend(q, Tokens(k, v), None, see, scale=0.3, backend="reference")
    far = attend(other_q, Tokens(other_k, other_v), None, EVERYTHING, scale=0.3, backend="reference")
    direction = torch.randn(near[0].shape, dtype=torch.float64)
    found = torch.autograd.grad((merge([near, far])[0] * direction).sum(), tensors)
    exact = torch.autograd.grad(
        (one_softmax(q, k, v, 3, other_q, other_k, other_v)[0] * direction).sum(), tensors
    )
    assert max((a - b).abs().max() for a, b in zip(found, exact, strict=True)) <= 1e-12
    one, tensors = q[:, :, :1], [q, k, v, other_k, other_v]
    found = attend_slots(one, k, v, 0.3, also=[(Tokens(other_k, other_v), 0.5)])[0].sum()
    exact = one_softmax(one, k, v, 9, one, other_k, other_v, bias=0.5)[0].sum()
    pairs = zip(*(torch.autograd.grad(x, tensors) for x in (found, exact)), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) <= 1e-12


@torch.no_grad()
def test_streamingllm_saves_seven_eighths_at_32k():
    """16+4080 of 32,768 tokens, by bytes really held."""
    model = one_head_model()
    cache = pod.make_cache(model, "streamingllm", budget=4096, num_sink_tokens=16)
    ids = torch.randint(64, (1, 32768), generator=torch.Generator().manual_seed(0))
    for part in ids.split(20000, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    every_token = 2 * 32768 * 8 * 4  # keys and values, one head of 8 numbers of 4 bytes
    assert 1 - payload(cache) / every_token == 0.875
    assert rule_nbytes(cache) == payload(cache)


@pytest.mark.parametrize("family", ["qwen2-yarn", "llama-tied-biased-llama3"])
@pytest.mark.parametrize("spec", WINDOWS)
@torch.no_grad()
def test_scaled_rotations(tools, spec, family):
    """YaRN multiplies every rotated key and query by a factor, at distance 0 as well."""
    oracle = {"streamingllm": StreamingLLM, "lm_infinite": LMInfinite, "wa": WindowAttention}.get(
        spec, LocalWindow
    )
    model, ids, options = (
        tools.make_pod(family, plan=False),
        tools.random_ids(1, 50),
        WINDOWS[spec] | {"budget": 12},
    )
    expected = oracle(model, **options).run(ids[0], TURNS)
    for cut in ((), (7,)):
        out = run_cache(model, pod.make_cache(model, spec, **options), ids, TURNS, cut)[0]
        assert (out - expected).abs().max() <= 1e-9


class Largest(TorchDispatchMode):
    """Largest number of elements that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("spec", WINDOWS)
@torch.no_grad()
def test_nothing_grows_with_the_square(spec):
    """Twice the prompt doubles the largest tensor at most, and none has length × window numbers."""
    model, sizes = one_head_model(), []
    for length in (2048, 4096):
        cache = pod.make_cache(model, spec, budget=512, **WINDOWS[spec])
        with Largest() as largest:
            model.model(torch.randint(64, (1, length)), past_key_values=cache)
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] and sizes[1] < 4096 * 512


@pytest.mark.parametrize("spec", WINDOWS)
@torch.no_grad()
def test_decoding_never_grows(tools, spec):
    """200 tokens behind a full window of 12: the same bytes, the predicted ones, and finite logits."""
    model = tools.make_pod("llama", plan=False)
    cache, ids = pod.make_cache(model, spec, budget=12, **WINDOWS[spec]), tools.random_ids(1, 230)
    model(ids[:, :30], past_key_values=cache)
    full = 2 * 5 * 2 * 12 * 8 * 8  # keys and values, layers, KV heads, slots, head_dim, bytes
    for t in range(30, 230):
        out = model(ids[:, t : t + 1], past_key_values=cache).logits
        assert payload(cache) == full == rule_nbytes(cache)
    assert out.isfinite().all()


@torch.no_grad()
def test_local_window_holds_the_prompt_until_it_ends(tools):
    model = tools.make_pod("llama", plan=False)
    cache, ids = pod.make_cache(model, "local_window", budget=12), tools.random_ids(1, 60)
    cache.begin_prompt(50)
    slot = 2 * 5 * 2 * 8 * 8
    for end, held in [(20, 20), (49, 49), (50, 12), (51, 12)]:
        model(ids[:, cache.get_seq_length() : end], past_key_values=cache)
        assert payload(cache) == pytest.approx(held * slot, rel=0.06)  # one slot to grow into
        assert rule_nbytes(cache) == held * slot


@pytest.mark.parametrize("spec", WINDOWS)
@torch.no_grad()
def test_rows_can_be_reordered_and_repeated(tools, spec):
    """After a swap and a repetition every row goes on as it does alone."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(2, 50)

    def start(rows):
        cache = pod.make_cache(model, spec, budget=12, **WINDOWS[spec])
        model(ids[rows, :33], past_key_values=cache)
        return cache

    cache = start([0, 1])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    together = model(ids[[1, 1, 0, 0], 33:], past_key_values=cache).logits
    for row, rows in ((1, together[:2]), (0, together[2:])):
        alone = model(ids[[row], 33:], past_key_values=start([row])).logits
        assert (rows - alone).abs().max() <= 1e-9


@pytest.mark.parametrize("spec", WINDOWS)
@torch.no_grad()
def test_packed_windows(tools, spec):
    """Any cut of the prompts gives the same logits; fewer bytes than native, and the predicted ones."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 50)
    options = {"budget": 24, "group_size": 4, "residual": 4} | WINDOWS[spec]
    outputs = []
    for cut in ((), (7,), (1,)):
        cache = pod.make_cache(model, f"{spec}+int8", **options)
        outputs.append(run_cache(model, cache, ids, TURNS, cut))
        assert payload(cache) == pytest.approx(rule_nbytes(cache), rel=0.02)
    assert max((out - outputs[0]).abs().max() for out in outputs) <= 1e-9
    native = pod.make_cache(model, spec, budget=24, **WINDOWS[spec])
    exact = run_cache(model, native, ids, TURNS, ())
    assert payload(cache) < 0.7 * payload(native)
    assert 1e-6 < (outputs[0] - exact).abs().max() < 0.5


@torch.no_grad()
def test_window_code_depends_on_its_parts(tools, monkeypatch):
    """The result of strips of 32 rows is that of one strip, and a wrong band is seen."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(1, 300)

    def logits():
        return model(ids, past_key_values=pod.make_cache(model, "lm_infinite", budget=70)).logits

    expected = logits()
    monkeypatch.setattr(flash, "_STRIP_ROWS", 13)
    assert (logits() - expected).abs().max() <= 1e-9
    mask = flash._strip_mask
    monkeypatch.setattr(flash, "_strip_mask", lambda rows, *sizes: mask(rows, *sizes).roll(1, 1))
    assert (logits() - expected).abs().max() > 1e-6


def test_refusals(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for model, spec, options, message in [
        (dense, "streamingllm", {"budget": 4}, "budget = 4 must exceed num_sink_tokens = 4"),
        (dense, "lm_infinite", {"budget": 9, "num_sink_tokens": 9}, "must exceed num_sink_tokens = 9"),
        (
            dense,
            "lm_infinite",
            {"budget": 9, "num_sink_tokens": -1},
            "num_sink_tokens = -1 must be at least 0",
        ),
        (dense, "wa", {}, "needs a budget"),
        (dense, "wa", {"budget": 0}, "a budget is at least 1 token, got 0"),
        (dense, "local_window", {"budget": 9, "prefill": "chunked"}, "choose exact or streaming"),
        (shared, "pod+streamingllm", {"budget": 40}, "no distant token"),
        (shared, "pod+wa", {"budget": 40}, "no distant token"),
        (dense, "wa+streamingllm", {"budget": 40}, "both decide which tokens stay"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, spec, **options)
