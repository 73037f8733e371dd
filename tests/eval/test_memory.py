"""Peak memory: bytes by hand, views of weights, the split, limits."""

import copy

import pytest
import torch

import pod
from pod.measure import measured_memory
from pod.measure.measured_memory import LiveBytes, Meter, measure, weight_bytes

TOKENS = torch.randint(96, (1, 256), generator=torch.Generator().manual_seed(1))
KV_TOKEN = 2 * 4 * 2 * 8 * 8  # K and V, layers, KV heads, head_dim, bytes of float64


def test_live_bytes_by_hand():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first + 1
        assert (live.now, live.peak) == (8000, 8000)
        view = second[:10]
        assert live.peak == 8000
        del first
        third = torch.zeros(500)
        live.restart()
        assert (live.now, live.peak) == (6000, 6000)
        del second  # the view keeps its storage
        live.restart()
        assert live.peak == 6000
        del view, third
        live.restart()
        assert live.peak == 0


def test_views_of_what_was_there_before_count_nothing():
    weight = torch.nn.Parameter(torch.zeros(100, 100))
    with torch.no_grad(), LiveBytes() as live:
        live.ignore([weight])
        transposed = weight.t()
        product = torch.ones(1, 100) @ transposed
        assert live.peak == 2 * 400
    assert product.shape == (1, 100)


def test_limit_ends_the_operation_that_passes_it():
    with LiveBytes(limit=5000), pytest.raises(MemoryError, match="8,000 bytes where 5,000 are allowed"):
        kept = torch.zeros(1000)
        kept = kept + 1


def test_tied_weights_count_once(dense_model):
    model = copy.deepcopy(dense_model)
    before = weight_bytes(model)
    assert before == 8 * sum(parameter.numel() for parameter in model.parameters())
    model.lm_head.weight = torch.nn.Parameter(
        model.model.embed_tokens.weight.data
    )  # another object, the same bytes
    assert weight_bytes(model) == before - 8 * 96 * 32


def test_split_of_the_dense_cache(dense_model):
    found = measure(dense_model, lambda: pod.make_cache(dense_model, "full"), TOKENS, 3)
    assert found["counted_by"] == measured_memory.STORAGES and found["weights"] == weight_bytes(dense_model)
    for phase in ("prefill", "decode"):
        row = found[phase]
        assert row["peak"] == found["weights"] + row["kv"] + row["activations"]
        assert row["kv"] == sum(row["kv_by_part"].values())
    stored = found["decode"]["kv_by_part"]
    # room grows by 1/128 of the length; token ids and lengths are bookkeeping
    assert KV_TOKEN * 259 <= stored["keys"] + stored["values"] <= KV_TOKEN * 264
    # the widest moment of the prompt: hidden states, gate, up and their product of the feed-forward
    assert found["prefill"]["activations"] >= 256 * 8 * (32 + 3 * 48)
    assert found["decode"]["activations"] < 0.1 * found["prefill"]["activations"]


def test_activations_of_a_prompt_grow_with_its_length(dense_model):
    def activations(length: int) -> int:
        row = measure(dense_model, lambda: pod.make_cache(dense_model, "full"), TOKENS[:, :length], 1)
        return row["prefill"]["activations"]

    assert activations(256) == pytest.approx(2 * activations(128), rel=0.02)


def test_what_a_method_drops_is_gone_when_it_decodes(dense_model, pod_model):
    full = measure(dense_model, lambda: pod.make_cache(dense_model, "full"), TOKENS, 2)["decode"]
    cut = measure(dense_model, lambda: pod.make_cache(dense_model, "snapkv", budget=64), TOKENS, 2)["decode"]
    shared = measure(pod_model, lambda: pod.make_cache(pod_model, "pod"), TOKENS, 2)["decode"]
    assert cut["kv"] == pytest.approx(full["kv"] * 66 / 258, rel=0.05)
    saving = pod_model.config.sharing_plan.saving(258, 4, 12)
    assert shared["kv"] == pytest.approx(full["kv"] * (1 - saving), rel=0.02)
    assert set(shared["kv_by_part"]) == {"keys", "values", "window_keys", "bookkeeping"}


def test_decreasing_chunks_take_less_than_fixed_memory(dense_model):
    """IMDC's claim (its Table 4): the memory of reading a long prompt, at one budget and mean chunk."""

    def peak(spec: str) -> int:
        cache = lambda: pod.make_cache(dense_model, spec, budget=96, chunk_size=64)  # noqa: E731
        return measure(dense_model, cache, TOKENS, 1)["prefill"]["peak"]

    assert peak("imdc") < peak("fm")
    assert (
        peak("fm") < measure(dense_model, lambda: pod.make_cache(dense_model), TOKENS, 1)["prefill"]["peak"]
    )


def test_hooks_are_gone_afterwards(dense_model):
    with pytest.raises(RuntimeError, match="no cache"):
        measure(dense_model, _no_cache, TOKENS, 1)
    measure(dense_model, lambda: pod.make_cache(dense_model), TOKENS, 1)
    assert not any(layer._forward_hooks for layer in dense_model.model.layers)


def _no_cache():
    raise RuntimeError("no cache")


def test_meter_restarts(dense_model):
    with Meter(dense_model) as meter:
        kept = torch.zeros(100)
        torch.zeros(1000)
        assert meter.restart() == 4400
        torch.zeros(10)
        assert meter.peak == 440
    assert len(kept) == 100


class Allocator:
    """What torch.cuda tells of an allocator: bytes now and their peak."""

    def __init__(self, monkeypatch, held: int):
        self.now = self.peak = held
        for name, answer in (
            ("synchronize", lambda device=None: None),
            ("memory_allocated", lambda device=None: self.now),
            ("max_memory_allocated", lambda device=None: self.peak),
            ("reset_peak_memory_stats", lambda device=None: setattr(self, "peak", self.now)),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class OnGpu:
    """A model that says it is on a GPU."""

    def parameters(self):
        yield type("Weight", (), {"device": torch.device("cuda")})


def test_meter_asks_the_allocator_on_a_gpu(monkeypatch):
    """The meter asks the allocator on a GPU, here an imitation.

    What others hold does not count, each stretch has its own peak, and a limit is of bytes beyond theirs.
    """
    allocator = Allocator(monkeypatch, held=1000)
    with Meter(OnGpu()) as meter:
        allocator.take(500)
        allocator.take(-400)
        assert meter.restart() == 500
        allocator.take(50)
        assert meter.peak == 150
    with Meter(OnGpu(), limit=400) as meter:
        allocator.take(400)
        assert meter.restart() == 400
        allocator.take(1)
        with pytest.raises(MemoryError, match="401 bytes where 400 are allowed"):
            meter.restart()
