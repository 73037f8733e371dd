"""Scores of tokens from hidden states: cross entropy of the whole logits, in chunks of any size."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from pod.modeling.token_scores import rows_in, token_scores, wide_logits


@pytest.mark.parametrize("rows", [1, 3, 14, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_cross_entropy_in_chunks_of_any_size(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 5, generator=generator, dtype=dtype)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype)
    labels = torch.tensor([[1, 2, -100, 4, 5, 6, 7], [10, 0, 0, -100, -100, 3, 3]])
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    scores = token_scores(partial(wide_logits, weight=weight), hidden, labels, rows)
    torch.testing.assert_close(-scores.logprobs, expected)
    assert torch.equal(scores.likeliest, logits.argmax(-1))


def test_the_loss_of_uniform_logits_is_log_vocabulary():
    targets = torch.zeros(2, 700, dtype=torch.long)
    scores = token_scores(lambda hidden: torch.zeros(len(hidden), 50), torch.zeros(2, 700, 4), targets)
    assert scores.logprobs.shape == scores.likeliest.shape == (2, 700)
    assert torch.allclose(-scores.logprobs, torch.full((2, 700), math.log(50)))


def test_scores_of_16_bits_are_fp32():
    hidden = torch.randn(1, 3, 8, dtype=torch.bfloat16)
    targets = torch.zeros(1, 3, dtype=torch.long)
    scores = token_scores(lambda x: x, hidden, targets)
    assert scores.logprobs.dtype == torch.float32
    assert torch.equal(scores.logprobs, hidden.float().log_softmax(-1)[..., 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [11, 5000])
@torch.no_grad()
def test_logits_of_16_bit_numbers_are_not_rounded(dtype, outputs):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.nn.Parameter(torch.randn(outputs, 64, generator=generator).to(dtype))
    logits = wide_logits(hidden, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_rows_of_logits_that_fit_into_bytes():
    assert rows_in(4 * 11 * 3, 11) == 3
    assert rows_in(4 * 11 * 3 - 1, 11) == 2
    assert rows_in(1, 11) == 1
