"""Scoring: the metric by hand, and one pass equal to the decode path where it is used.

Compression is never bypassed.
"""

import pytest
import torch
import torch.nn.functional as F
from own_runs import nll_by_decode, nll_by_forward

import pod
from pod.eval.answer.methods import EVALUATED_METHODS
from pod.eval.answer.score import forward_error
from pod.eval.suites.buckets import Bucket, position_buckets

BUCKETS = position_buckets(64, 16, 6)


class Bigram:
    """A model whose next token depends on the last one only, through a table; records what it was fed."""

    def __init__(self, vocab: int):
        self.table = torch.randn(
            vocab, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        self.fed: list[int] = []
        self.lm_head = lambda hidden: hidden

    def parameters(self):
        return iter([self.table])

    def model(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        self.fed.append(input_ids.shape[1])
        return type("Output", (), {"last_hidden_state": self.table[input_ids]})


class FakeCache:
    """Holds three rows of nothing."""

    layers, lengths = (), torch.zeros(3, dtype=torch.long)

    def begin_prompt(self, num_columns):
        pass

    def nbytes_by_row(self):
        return [0, 0, 0]


def expected_nll(table, tokens, bucket):
    """-log p(token | previous token) for the scored positions, entry by entry."""
    log_p = table.log_softmax(-1)
    return torch.tensor(
        [[-float(log_p[row[p - 1], row[p]]) for p in range(bucket.first, bucket.end)] for row in tokens],
        dtype=torch.float64,
    )


def test_scored_positions_by_hand(text):
    model = Bigram(96)
    by_forward = nll_by_forward(model, text, BUCKETS)
    for bucket, nll in zip(BUCKETS, by_forward, strict=True):
        assert torch.allclose(nll, expected_nll(model.table, text, bucket), atol=1e-12)
        assert torch.allclose(nll_by_decode(model, FakeCache(), text, bucket), nll, atol=1e-12)


def test_decode_scoring_holds_one_context_token_out_and_steps(text):
    model = Bigram(96)
    nll_by_decode(model, FakeCache(), text, Bucket(start=16, end=32, first=26))
    assert model.fed == [
        25,
        1,
        1,
        1,
        1,
        1,
        1,
    ]  # 25 of 26 context tokens are the prompt; the last token is never fed


@pytest.mark.parametrize("spec", ["full", "pod"])
@pytest.mark.parametrize("bucket", [*BUCKETS, Bucket(start=4, end=64, first=4)])
def test_one_pass_equals_decode_path(spec, bucket, text, dense_model, pod_model):
    model = dense_model if spec == "full" else pod_model
    by_forward = nll_by_forward(model, text, [bucket])[0]
    by_decode = nll_by_decode(model, pod.make_cache(model, spec), text, bucket)
    assert (by_forward - by_decode).abs().max() < 1e-9
    assert forward_error(model, pod.make_cache(model, spec), text, bucket, checked=4) < 1e-9


def test_forward_equals_full_logits(text, dense_model):
    with torch.no_grad():
        logits = dense_model(input_ids=text).logits
    bucket = BUCKETS[-1]
    expected = F.cross_entropy(
        logits[:, bucket.first - 1 : bucket.end - 1].flatten(0, 1),
        text[:, bucket.first : bucket.end].flatten(),
        reduction="none",
    )
    assert torch.allclose(nll_by_forward(dense_model, text, [bucket])[0].flatten(), expected, atol=1e-12)


def test_pod_differs_from_dense_once_there_are_distant_tokens(text, dense_model, pod_model):
    near, far = Bucket(start=4, end=16, first=4), Bucket(start=32, end=64, first=58)
    dense, shared = (nll_by_forward(model, text, [near, far]) for model in (dense_model, pod_model))
    assert (dense[0] - shared[0]).abs().max() < 1e-9
    assert (dense[1] - shared[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name, method in EVALUATED_METHODS.items() if method.takes_budget])
@pytest.mark.parametrize("scored", [6, 1])
def test_budget_below_the_length_changes_scores(name, scored, text, dense_model):
    """Compression is not bypassed, not even when a single token is scored."""
    bucket = Bucket(start=32, end=64, first=64 - scored)
    small = {"snapkv": {"window": 8}, "adakv": {"window": 8}, "imdc": {"window": 8, "chunk_size": 24}}
    small["kvzip"] = {"repeat_ids": [[5, 6], [7], [8, 9]]}
    params = small.get(name, small["imdc"] if name in ("im", "fm") else {})
    full = nll_by_forward(dense_model, text, [bucket])[0]
    roomy = nll_by_decode(dense_model, pod.make_cache(dense_model, name, budget=2000, **params), text, bucket)
    assert (roomy - full).abs().max() < 1e-9
    tight = nll_by_decode(dense_model, pod.make_cache(dense_model, name, budget=20, **params), text, bucket)
    assert (tight[:, 0] - full[:, 0]).abs().min() > 1e-4


def test_batch_scores_equal_rows_alone(text, pod_model):
    bucket = BUCKETS[-1]
    together = nll_by_decode(pod_model, pod.make_cache(pod_model, "pod"), text, bucket)
    for row in range(len(text)):
        alone = nll_by_decode(pod_model, pod.make_cache(pod_model, "pod"), text[row : row + 1], bucket)
        assert (together[row] - alone[0]).abs().max() < 1e-9
