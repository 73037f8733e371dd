"""Divergence and loss of a plan, as benchmarks/divergence_layers.py computes them."""

import pytest
import torch
from torch.nn import functional as F


def test_figures_equal_their_definition(script, monkeypatch):
    judge = script("divergence_layers")
    monkeypatch.setattr(judge, "BLOCK", 3)
    torch.manual_seed(0)
    head, labels = torch.nn.Linear(8, 11, bias=False), torch.randint(11, (7,))
    dense, own = torch.randn(2, 7, 8)
    divergence, loss = judge.figures(dense, own, head, labels)
    wanted, found = (head(states).detach().log_softmax(-1) for states in (dense, own))
    expected = F.kl_div(found, wanted, reduction="batchmean", log_target=True)
    assert divergence == pytest.approx(expected.item(), rel=1e-5)
    assert loss == pytest.approx(F.nll_loss(found, labels).item(), rel=1e-5)


def test_a_pair_is_compared_text_by_text(script):
    judge = script("divergence_layers")
    kept = [
        {"name": "dense", "divergence": [0.0, 0.0], "loss": [1.0, 3.0]},
        {"name": judge.PAIRS[0][0], "divergence": [0.5, 0.7], "loss": [1.5, 3.3]},
        {"name": judge.PAIRS[0][1], "divergence": [0.2, 0.4], "loss": [1.2, 3.2]},
    ]
    *_, pair = judge.tables(kept)
    cells = [cell.strip() for cell in pair.split("|")[1:-1]]
    assert cells[:2] == list(judge.PAIRS[0])
    assert cells[2] == "0.3000 (0.3000 to 0.3000)"
    assert cells[3].startswith("0.2000 (")
