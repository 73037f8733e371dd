"""Gates: exact against whole matrices, in linear memory, on any ranks; their picture."""

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pod
from pod.modeling.shipped.attend import Segments
from pod.modeling.shipped.step import document_positions
from pod.training.observe.gates import check_gates, gate_picture, proximal_share

LAYOUTS = ["alone", "sp4", "sp2_dp2", "sp2_offload"]


def naive_share(q, k, q_lead, k_lead, sinks, recent, doc_ids):
    """Whole n x n weights, summed over proximal columns; NaN where no column is distant."""
    groups = q.shape[1] // k.shape[1]
    positions = document_positions(doc_ids)
    distance = positions[:, :, None] - positions[:, None]
    visible = (doc_ids[:, :, None] == doc_ids[:, None]) & (doc_ids[:, :, None] >= 0) & (distance >= 0)
    near = visible & ((positions[:, None] < sinks) | (distance < recent))
    own = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    leads = q_lead @ k_lead.repeat_interleave(groups, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    logits = torch.where(near[:, None], own, leads).masked_fill(~visible[:, None], float("-inf"))
    share = (logits.softmax(-1).nan_to_num() * near[:, None]).sum(-1)
    sees_far = (visible & ~near).any(-1)
    return share.masked_fill(~sees_far[:, None], float("nan"))


def make_inputs(batch=2, heads=4, kv_heads=2, n=67, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def draw(count):
        return torch.randn(batch, count, n, dim, generator=generator, dtype=dtype) * 2

    return draw(heads), draw(kv_heads), draw(heads), draw(kv_heads)


DOCUMENTS = torch.tensor([[0] * 30 + [1] * 7 + [2] * 8 + [3] * 22, [5] * 61 + [-1] * 6])


def share(q, k, q_lead, k_lead, sinks, recent, doc_ids, backend="auto"):
    segments = Segments.of_documents(doc_ids, q.shape[0])
    return proximal_share(q, k, q_lead, k_lead, (sinks, recent), segments, backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("sinks", "recent"), [(2, 5), (0, 1), (3, 40), (0, 9), (40, 30)])
def test_gate_is_the_share_of_proximal_weights(sinks, recent, backend):
    inputs = make_inputs()
    got = share(*inputs, sinks, recent, DOCUMENTS, backend)
    expected = naive_share(*inputs, sinks, recent, DOCUMENTS)
    assert torch.equal(got.isnan(), expected.isnan())
    assert expected.isfinite().any() == (sinks + recent < 61)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_gate_without_documents_and_in_half_precision():
    inputs = make_inputs(batch=1, dtype=torch.float32)
    half = [x.bfloat16() for x in inputs]
    whole = torch.zeros(1, 67, dtype=torch.long)
    expected = naive_share(*[x.double() for x in half], 2, 5, whole)
    got = share(*half, 2, 5, whole)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-7, equal_nan=True)


class LargestTensor(TorchDispatchMode):
    """Most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_memory_grows_with_the_row_and_not_with_its_square():
    largest = []
    for n in (256, 1024):
        inputs = make_inputs(batch=1, heads=2, kv_heads=1, n=n, dim=4)
        with LargestTensor() as seen:
            share(*inputs, 2, 8, torch.zeros(1, n, dtype=torch.long))
        largest.append(seen.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 1024 * 1024 // 50


@pytest.mark.parametrize("layout", ["window", "cla"])
def test_layouts_without_a_gate_are_refused(layout):
    config = pod.PodConfig(num_hidden_layers=4, layout=layout)
    with pytest.raises(ValueError, match=f"layout {layout} does not tell apart: set it to 0"):
        check_gates(config)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAYOUTS)
def test_gates_on_ranks_equal_whole_matrices(seeing_results, name):
    plain, seen = seeing_results["plain"], seeing_results[name]
    for got, expected in ((seen["before"]["gates"], "gates_long"), (seen["packed"], "gates_packed")):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(plain[expected]), rtol=1e-6, atol=0)
    lead = tiny.plan_rows()
    followers = [
        gate
        for layer, row in enumerate(plain["gates_long"])
        for head, gate in enumerate(row)
        if lead[layer][head] not in (layer, None)
    ]
    assert seen["before"]["gate"] == pytest.approx(sum(followers) / len(followers), rel=1e-6)


def test_picture_shows_a_cell_per_head_and_dots_followers():
    axes = gate_picture([[0.5 + layer / 20, None] for layer in range(4)], [(1, 0), (2, 0), (2, 1)], 20).axes[
        0
    ]
    shown = axes.images[0].get_array()
    assert shown.shape == (4, 2) and shown.mask[:, 1].all() and not shown.mask[:, 0].any()
    assert set(zip(*axes.lines[0].get_data(), strict=True)) == {(0, 1), (0, 2), (1, 2)}
