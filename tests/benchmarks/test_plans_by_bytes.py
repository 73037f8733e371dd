"""The rows of benchmarks/plans_by_bytes.py: what they are called, and how many bytes they hold."""

from dataclasses import replace

import pytest
import torch

import pod
from pod.modeling.retrieval_heads import RetrievalHeads

LAYERS, HEADS, HEAD_DIM, LENGTH = 4, 3, 32, 600


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=61, hidden_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, intermediate_size=64, max_position_embeddings=1024,
        num_sink_tokens=0, num_recent_tokens=8, attention_backend="reference",
    )  # fmt: skip
    return pod.PodForCausalLM(config).bfloat16().eval()


def test_every_row_of_a_case_has_its_own_name_and_files(script):
    plans = script("plans_by_bytes")
    for case in plans.CASES.values():
        names = [row.name for row in plans.rows(case)]
        kept = {script("judge_plans").kept_at(case.folder, name) for name in names}
        files = [
            plans.plan_file(case, kind, share) for kind, shares in case.plans.items() for share in shares
        ]
        assert len(set(names)) == len(kept) == len(names)
        assert len(set(files)) == len(files)


@pytest.mark.parametrize("spec", ["razor", "razor+int4", "h2o", "snapkv+int4"])
def test_a_row_holds_its_share_of_the_bytes(script, model, spec, tmp_path, monkeypatch):
    plans = script("plans_by_bytes")
    scores = torch.rand(LAYERS, HEADS).tolist()
    heads = tmp_path / "heads.json"
    RetrievalHeads(echo=scores, induction=scores, num_key_value_heads=HEADS).save(heads)
    monkeypatch.setattr(plans, "retrieval_heads", lambda case: heads)
    sizes = replace(plans.Sizes(), length=LENGTH)
    case = plans.Case("tiny", pairs=(LAYERS, HEADS), window=48, plans={}, methods={}, sizes=sizes)
    share = 0.4
    row = plans.method_row(case, spec, share)
    budget = None if row.share is None else round(row.share * LENGTH)
    cache = pod.make_cache(model, row.spec, budget=budget, **row.options)
    with torch.no_grad():
        model(torch.randint(61, (1, LENGTH)), past_key_values=cache, use_cache=True)
    dense = 2 * LAYERS * HEADS * HEAD_DIM * LENGTH * 2
    one_head = 1 / (LAYERS * HEADS)
    assert cache.nbytes / dense == pytest.approx(share, abs=one_head)
