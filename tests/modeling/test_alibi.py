"""Scopes of ALiBi heads: the formula, what lies beyond them in real and in adversarial attention, and a cache that drops it."""

import math

import pytest
import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from pod.modeling.alibi import AlibiWindows, alibi_scopes, alibi_slopes, bloom_scopes


def make_bloom(std=0.08, heads=4, **changes):
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=32, n_layer=3, n_head=heads, initializer_range=std, **changes
    )
    config._attn_implementation = "eager"
    model = transformers.BloomForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "query_key_value.bias" in name:
                parameter.normal_(std=0.05)
    return model


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12, 14])
def test_slopes_are_those_of_a_stock_model(heads):
    stock = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert (alibi_slopes(heads) - stock).abs().max() <= 1e-6


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_scope_equals_the_formula(kv_heads):
    torch.manual_seed(1)
    q, k = torch.randn(6 * 5, 16).double(), torch.randn(kv_heads * 5, 16).double()
    gain, bias = torch.rand(16).double(), torch.randn(16).double()
    slopes = torch.linspace(
        0.2, 0.25, 6
    ).double()  # near each other, so that the norms decide which head sees farthest
    found = alibi_scopes(q, k, gain, slopes, head_dim=5, bias=bias, epsilon=0.01)
    expected = [0.0] * kv_heads
    for head in range(6):
        kv = head * kv_heads // 6
        product = q[head * 5 : head * 5 + 5].T @ k[kv * 5 : kv * 5 + 5]
        norm = torch.linalg.svdvals(product)[0]
        scope = (2 * norm * ((gain**2).sum() + (bias**2).sum()) / math.sqrt(5) - math.log(0.01)) / slopes[
            head
        ]
        expected[kv] = max(expected[kv], math.ceil(scope))
    assert found.tolist() == expected
    strict = alibi_scopes(q, k, gain, slopes, head_dim=5, bias=bias, epsilon=0.01, bound="strict")
    assert bool((strict >= found).all())


def beyond(attention, scopes):
    """Largest single weight and largest sum that ``[H, n, n]`` attention gives to tokens at distance ``scopes[h]`` and more."""
    n = attention.shape[-1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    lost = attention * (distance >= scopes[:, None, None])
    return float(lost.max()), float(lost.sum(-1).max())


@pytest.mark.parametrize("bound", ["paper", "strict"])
@torch.no_grad()
def test_beyond_its_scope_a_bloom_head_sees_nothing(bound):
    model = make_bloom()
    ids = torch.randint(0, 61, (1, 500), generator=torch.Generator().manual_seed(2))
    maps = model(ids, output_attentions=True).attentions
    reached = 0
    for scopes, attention in zip(bloom_scopes(model, 0.01, bound), maps, strict=True):
        reached += int((scopes < 500).sum())
        single, total = beyond(attention[0], scopes)
        assert single <= 0.01 and total <= 0.01
        # and not because nobody looks back at all
        assert beyond(attention[0], torch.full_like(scopes, 5))[1] > 0.3
    assert reached >= 3


@torch.no_grad()
def test_unequal_gains_break_the_printed_bound_and_not_the_strict_one():
    """RMSNorm lets one coordinate with a large gain carry the whole norm: |x|² = D γ_1², not |γ|²."""
    size, head_dim, slope, epsilon, n = 16, 4, torch.tensor([0.5]), 0.01, 200
    gain = torch.ones(size).double()
    gain[0] = 3
    weight = torch.zeros(head_dim, size).double()
    weight[0, 0] = 1 / 6
    hidden = torch.zeros(n, size).double()
    hidden[:, 0] = -1.0
    hidden[0, 0] = 1.0  # one token that all others look for
    x = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt() * gain
    q, k = x @ -weight.T, x @ weight.T
    distance = torch.arange(n)[:, None] - torch.arange(n)
    logits = q @ k.T / math.sqrt(head_dim) - 0.5 * distance
    attention = logits.masked_fill(distance < 0, -math.inf).softmax(-1)[None]
    sizes = {}
    for bound in ("paper", "strict"):
        scopes = alibi_scopes(-weight, weight, gain, slope, head_dim=head_dim, epsilon=epsilon, bound=bound)
        sizes[bound] = beyond(attention, scopes)
    assert sizes["paper"][0] > 2 * epsilon and sizes["strict"][1] <= epsilon


@torch.no_grad()
def run_bloom(model, ids, windows, widths):
    """Logits of a BLOOM model whose attention is done by ``windows``, one ``AlibiWindows`` per layer."""
    outputs, start = [], 0
    transformer = model.transformer
    for width in widths:
        hidden = transformer.word_embeddings_layernorm(
            transformer.word_embeddings(ids[:, start : start + width])
        )
        for block, window in zip(transformer.h, windows, strict=True):
            attention = block.self_attention
            q, k, v = attention._reshape(attention.query_key_value(block.input_layernorm(hidden)))
            out = window.attend(q, k, v).transpose(1, 2).flatten(2)
            hidden = hidden + attention.dense(out)
            hidden = block.mlp(block.post_attention_layernorm(hidden), hidden)
        outputs.append(model.lm_head(transformer.ln_f(hidden)))
        start += width
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("widths", [[300], [120, 180], [150] + [1] * 150], ids=["whole", "two", "decode"])
@torch.no_grad()
def test_windows_of_the_scopes_change_almost_nothing(widths):
    model, slopes = make_bloom(), alibi_slopes(4)
    ids = torch.randint(0, 61, (2, 300), generator=torch.Generator().manual_seed(3))
    stock = model(ids).logits
    whole = [AlibiWindows([300] * 4, slopes) for _ in range(3)]
    # the stock softmax computes in fp32
    assert (run_bloom(model, ids, whole, widths) - stock).abs().max() <= 1e-5
    scopes = bloom_scopes(model, 0.01)
    windows = [AlibiWindows(scope.tolist(), slopes) for scope in scopes]
    logits = run_bloom(model, ids, windows, widths)
    assert (logits - stock).abs().max() <= 0.01 * stock.std()
    token = 2 * 2 * 8 * 8  # rows, key and value, numbers, bytes
    held = sum(min(int(tokens), 300) for scope in scopes for tokens in scope)
    assert held < 0.95 * 300 * 12 and sum(window.predicted_nbytes() for window in windows) == held * token
    measured = sum(x.numel() * x.element_size() for window in windows for x in window.tensors())
    assert abs(measured / (held * token) - 1) < 0.01
    narrow = [AlibiWindows([3] * 4, slopes) for _ in range(3)]
    if len(widths) > 2:
        assert (run_bloom(model, ids, narrow, widths) - stock).abs().max() > 0.05 * stock.std()


def test_shapes_and_numbers_that_do_not_fit_are_refused():
    q, k, gain, slopes = torch.ones(8, 6), torch.ones(4, 6), torch.ones(6), alibi_slopes(4)
    for arguments, options, message in [
        ((q, torch.ones(6, 6), gain, slopes), {}, "no heads of 2"),
        ((q, k, gain, alibi_slopes(3)), {}, "no heads of 2"),
        ((q, k, gain, -slopes), {}, "positive slopes"),
        ((q, k, gain, slopes), {"epsilon": 1.0}, "epsilon = 1.0"),
        ((q, k, gain, slopes), {"bound": "loose"}, "paper or strict"),
    ]:
        with pytest.raises(ValueError, match=message):
            alibi_scopes(*arguments, head_dim=2, **options)
