"""Token-dropping methods against naive oracles, and the rules of `make_cache`."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import pod
from pod.modeling.model.packed_bytes import GROUP_SIZE, RESIDUAL


def softmax_over(q, k, v, columns):
    return (torch.stack([q @ k[j] for j in columns]) / math.sqrt(q.shape[0])).softmax(0) @ v[columns]


def streaming_oracle(sinks, recent):
    """One query at a time; keys and query re-indexed by their place among the kept tokens."""

    def attend(layer, q, k, v, turn):
        out = torch.zeros_like(q)
        for head in range(q.shape[0]):
            kv = head // (q.shape[0] // k.shape[0])
            for i in range(q.shape[1]):
                kept = [j for j in range(i + 1) if j < sinks or i - j < recent]
                places = torch.arange(len(kept))
                keys = turn(k[kv, kept], places)
                query = turn(q[head, i : i + 1], places[-1:])[0]
                out[head, i] = ((keys @ query) / math.sqrt(q.shape[2])).softmax(0) @ v[kv, kept]
        return out

    return attend


def snapkv_oracle(prompt, budget, window, kernel, pool):
    """Full attention inside the prompt; later tokens see the kept prompt tokens and everything decoded."""

    def attend(layer, q, k, v, turn):
        n, groups = q.shape[1], q.shape[0] // k.shape[0]
        q, k = turn(q, torch.arange(n)), turn(k, torch.arange(n))
        kept = [list(range(prompt))] * k.shape[0]
        if prompt > budget:
            kept = [
                select(q[h * groups : (h + 1) * groups, :prompt], k[h, :prompt]) for h in range(k.shape[0])
            ]
        out = torch.zeros_like(q)
        for head in range(q.shape[0]):
            kv = head // groups
            for i in range(n):
                columns = list(range(i + 1)) if i < prompt else kept[kv] + list(range(prompt, i + 1))
                out[head, i] = softmax_over(q[head, i], k[kv], v[kv], columns)
        return out

    def select(q, k):
        n = k.shape[0]
        total = torch.zeros(n, dtype=torch.float64)
        for head in range(q.shape[0]):
            for i in range(n - window, n):
                logits = (k[: i + 1] @ q[head, i]) / math.sqrt(q.shape[2])
                total[: i + 1] += logits.softmax(0) / q.shape[0]
        prefix = total[: n - window]
        half = kernel // 2
        pooled = []
        for j in range(len(prefix)):
            around = prefix[max(0, j - half) : j + half + 1]
            pooled.append((around.sum() / kernel if pool == "avg" else around.max()).item())
        best = sorted(range(len(pooled)), key=lambda j: (-pooled[j], j))[: budget - window]
        return sorted(best) + list(range(n - window, n))

    return attend


@pytest.mark.parametrize("family", ["llama", "llama-linear-mha", "qwen3-g3"])
@pytest.mark.parametrize("widths", [[33], [20, 13], [5] * 6 + [3], [1] * 33, [16, 17]], ids=str)
@torch.no_grad()
def test_streamingllm(tools, family, widths):
    model = tools.make_pod(family, plan=False)
    ids = tools.random_ids(1, 33)
    expected = tools.naive_logits(model, ids[0], streaming_oracle(3, 9))
    cache, start, outputs = pod.make_cache(model, "streamingllm", budget=12, num_sink_tokens=3), 0, []
    for width in widths:
        outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
        start += width
    assert (torch.cat(outputs, 1)[0] - expected).abs().max() <= 1e-9
    assert (model(ids).logits[0] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3-g3"])
@pytest.mark.parametrize(("kernel", "pool"), [(5, "avg"), (3, "max"), (1, "avg")])
@pytest.mark.parametrize("widths", [[30], [13, 17], [28, 2], [10] * 3], ids=str)
@torch.no_grad()
def test_snapkv(tools, family, kernel, pool, widths):
    model = tools.make_pod(family, plan=False)
    ids = tools.random_ids(1, 40)
    expected = tools.naive_logits(model, ids[0], snapkv_oracle(30, 14, 4, kernel, pool))
    cache = pod.make_cache(model, "snapkv", budget=14, window=4, kernel=kernel, pool=pool)
    cache.begin_prompt(30)
    start, outputs = 0, []
    for width in widths + [1] * 10:
        outputs.append(model(ids[:, start : start + width], past_key_values=cache).logits)
        start += width
    assert (torch.cat(outputs, 1)[0] - expected).abs().max() <= 1e-9
    assert (model(ids).logits[0] - expected).abs().max() > 1e-3
    assert cache.groups[0].layers[0].head_groups[0].held == 24


METHODS = [
    ("full", {}),
    ("pod", {}),
    ("streamingllm", {"budget": 12}),
    ("snapkv", {"budget": 12, "window": 4}),
]


@pytest.mark.parametrize(("spec", "options"), METHODS, ids=[m[0] for m in METHODS])
@pytest.mark.parametrize("chunk", [None, 6])
def test_padded_rows_equal_rows_alone(tools, spec, options, chunk):
    """Through generate(): rows of 40, 31 and 9 tokens."""
    model = tools.make_pod("llama", plan=spec == "pod")
    ids, mask = tools.random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, :9], mask[2, :31] = 0, 0
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": chunk}
    cache = pod.make_cache(model, spec, **options)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **arguments)
    for row in range(3):
        real = ids[row][mask[row].bool()][None]
        alone = model.generate(real, past_key_values=pod.make_cache(model, spec, **options), **arguments)
        assert torch.equal(together[row, -10:], alone[0, -10:])


@pytest.mark.parametrize(("spec", "options"), METHODS[2:], ids=["streamingllm", "snapkv"])
@torch.no_grad()
def test_budget_beyond_the_sequence_is_full_attention(tools, spec, options):
    model = tools.make_pod("llama", plan=False)
    ids = tools.random_ids(2, 50)
    cache = pod.make_cache(model, spec, **(options | {"budget": 60}))
    outputs = [model(ids[:, :30], past_key_values=cache).logits]
    outputs += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(30, 50)]
    assert (torch.cat(outputs, 1) - model(ids).logits).abs().max() <= 1e-12


@torch.no_grad()
def test_second_prompt_is_compressed_again(tools):
    model = tools.make_pod("llama", plan=False)
    cache = pod.make_cache(model, "snapkv", budget=12, window=8)
    ids = tools.random_ids(2, 60)
    model(ids[:, :30], past_key_values=cache)
    model(ids[:, 30:31], past_key_values=cache)
    (group,) = cache.groups[0].layers[2].head_groups
    assert group.held == 13
    out = model(ids[:, 31:35], past_key_values=cache).logits
    assert group.keys.shape[2] == 12 and group.held == 12 and out.isfinite().all()


def test_requests_that_cannot_work_are_refused(tools):
    dense, shared = tools.make_pod("llama", plan=False), tools.make_pod("llama")
    for model, spec, options, message in [
        (dense, "snap", {}, "unknown method 'snap'"),
        (dense, "snapkv+streamingllm", {}, "both decide which tokens stay"),
        (dense, "snapkv", {}, "needs a budget"),
        (dense, "full", {"budget": 4}, "takes no budget"),
        (dense, "snapkv", {"budget": 30}, "must exceed window = 32"),
        (dense, "snapkv", {"budget": 60, "windw": 3}, "did you mean 'window'"),
        (dense, "snapkv", {"budget": 60, "pool": "sum"}, "pool = 'sum'"),
        (dense, "snapkv", {"budget": 60, "kernel": 4}, "must be odd"),
        (dense, "streamingllm", {"budget": 4}, "must exceed num_sink_tokens"),
        (shared, "streamingllm", {"budget": 40}, "without a sharing plan"),
        (shared, "full", {}, "without a sharing plan"),
    ]:
        with pytest.raises(ValueError, match=message):
            pod.make_cache(model, spec, **options)


def test_methods_describe_themselves():
    for name, method in pod.methods().items():
        assert method.name == name and method.paper and method.frees
        assert all(parameter.meaning for parameter in method.parameters.values())


def test_codecs_pack_as_plans_with_bits_do():
    for name in ("kivi", "int4", "int8"):
        defaults = {key: parameter.default for key, parameter in pod.methods()[name].parameters.items()}
        assert defaults == {"group_size": GROUP_SIZE, "residual": RESIDUAL}


CHOICES = [
    (name, key, choice)
    for name, method in pod.methods().items()
    for key, parameter in method.parameters.items()
    for choice in parameter.choices
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "key", "choice"), CHOICES)
def test_every_choice_of_a_parameter_can_be_made(tools, name, key, choice):
    """The registry names the choices, and the method's file says what each of them does."""
    model = tools.make_pod("llama", plan=False)
    options = {"budget": 40} if pod.methods()[name].takes_budget else {}
    small = {"window": 4, "chunk_size": 16, "num_recent_tokens": 10}
    options |= {key: value for key, value in small.items() if key in pod.methods()[name].parameters}
    if (name, choice) == ("simlayerkv", "streaming"):
        options["detector"] = "prefill"  # the other one waits for a generated token
    cache = pod.make_cache(model, name, **options | {key: choice})
    ids = tools.random_ids(1, 60)
    for start, stop in ((0, 55), (55, 56), (56, 57)):
        assert model(ids[:, start:stop], past_key_values=cache).logits.isfinite().all()


@torch.no_grad()
def test_a_refused_prompt_leaves_the_cache_as_it_was(tools):
    """IMDC refuses chunks below one token before anything is fed.

    The cache goes on with a prompt that it can take.
    """
    model = tools.make_pod("llama", plan=False)
    options = {"budget": 40, "chunk_size": 8, "window": 4}
    ids = tools.random_ids(2, 90)
    for fed in (0, 12):  # an empty cache, and one in use
        cache, fresh = (pod.make_cache(model, "imdc", **options) for _ in range(2))
        if fed:
            for one in (cache, fresh):
                model(ids[:, :fed], past_key_values=one)
        with pytest.raises(ValueError, match="imdc"):
            model(ids[:, fed:], past_key_values=cache)
        again, expected = (
            model(ids[:, fed : fed + 20], past_key_values=one).logits for one in (cache, fresh)
        )
        assert torch.equal(again, expected)
        assert cache.lengths.tolist() == [fed + 20] * 2


@torch.no_grad()
def test_padding_behind_a_chunked_prompt_is_refused_where_it_would_change_the_chunks(tools):
    model = tools.make_pod("llama", plan=False)
    ids, mask = tools.random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    cache = pod.make_cache(model, "snapkv", budget=12, window=4, prefill="streaming", chunk_size=7)
    cache.begin_prompt(40)
    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="takes padding on the left only: row 1 has 30 tokens where 40"):
        model(ids[:, 20:], attention_mask=mask, past_key_values=cache)


class TensorsMade(TorchFunctionMode):
    """Counts tensors that are made from Python numbers.

    Each is a copy to the GPU that waits for what was queued before.
    """

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.tensor
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_groups_of_rows_are_sent_to_the_device_once_per_pass(tools):
    """And not once per layer."""
    model, ids = tools.make_pod("llama", plan=False), tools.random_ids(2, 21)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = pod.make_cache(model, "h2o", budget=12)
    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    with TensorsMade() as made:
        model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
    assert len(cache.groups) == 2 and made.count <= 4  # columns and rows, none per layer
