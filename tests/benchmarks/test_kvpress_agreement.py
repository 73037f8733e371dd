"""The other library's choices, by hand: what the comparison with kvpress calls a difference of rules."""

import torch


def kept(mask):
    return [[row.nonzero().flatten().tolist() for row in layer] for layer in mask]


def test_the_best_of_each_layer(script):
    scores = torch.tensor([[[3.0, 1.0, 2.0, 4.0]], [[1.0, 1.0, 0.0, 2.0]]])
    assert kept(script("kvpress_agreement").best(scores, [1, 2])) == [[[3]], [[0, 3]]]


def test_pyramids(script):
    """Budgets fall from layer to layer as in kvpress.

    40 of 100 tokens in 3 layers: from 80 - 20 = 60 down to 20. A last layer of 20 is less than a window of
    21. A first one of 94 is more than 100 - 8.
    """
    rule, scores = script("kvpress_agreement").pyramid, torch.rand(3, 1, 100)
    assert rule(scores, 40, window=8, beta=2).sum((1, 2)).tolist() == [60, 40, 20]
    assert rule(scores, 40, window=21, beta=2).sum((1, 2)).tolist() == [40, 40, 40]
    assert rule(scores, 60, window=8, beta=5).sum((1, 2)).tolist() == [92, 60, 28]


def test_a_safeguard_is_a_share_of_the_budget(script):
    """Two heads that keep 2 tokens on average: the second is guaranteed its best one."""
    scores = torch.tensor([[[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 0.0, 0.0]]])
    rule = script("kvpress_agreement").safeguarded
    assert kept(rule(scores, 2, 0.5)) == [[[0, 1, 2], [1]]]
    assert kept(rule(scores, 2, 0.0)) == [[[0, 1, 2, 3], []]]
