"""Skips of PoD's gate (`tau`).

They are counted as a naive reading of the paper counts them, and alone as in a batch. Results and report tell
them.
"""

import json
import math
from types import SimpleNamespace

import own_runs
import pytest
import torch
import torch.nn.functional as F

import pod
from pod.eval import runner
from pod.eval.answer import gates, reading
from pod.eval.answer.generate import generate
from pod.eval.suites.buckets import Bucket
from pod.eval.suites.task_base import gate_metrics
from pod.modeling.model import grouped
from pod.modeling.model.layout import PodCacheLayer
from pod.recipe import load_recipe

SINKS, RECENT = 4, 12  # of the models of conftest


class Recorded:
    """Rotated queries of decoded tokens and all keys of a row, by layer, as they come."""

    def __init__(self, monkeypatch):
        self.keys, self.queries = {}, {}
        original = PodCacheLayer.attend_rotated

        def attend_rotated(layer, q, k, v, step):
            at = layer.layer_idx
            self.keys[at] = torch.cat([*([self.keys[at]] if at in self.keys else []), k[0]], dim=1)
            if step.is_decode:
                self.queries.setdefault(at, []).append(q[0, :, 0])
            return original(layer, q, k, v, step)

        monkeypatch.setattr(PodCacheLayer, "attend_rotated", attend_rotated)

    def counts(self, model, first, tau):
        """By name a number per layer, from n × n logits; the first decoded token has position `first`."""
        config, lead, found = model.config, model.config.sharing_plan.lead, []
        size = config.num_attention_heads // config.num_key_value_heads
        for layer in range(config.num_hidden_layers):
            one = dict.fromkeys(
                ("heads", "heads_skipped", "groups", "groups_skipped", "exact", "saved", "dense"), 0
            )
            for step in range(len(self.queries[layer])):
                n = first + step + 1
                far = range(SINKS, n - RECENT)
                if not far:
                    continue
                for head in range(config.num_key_value_heads):
                    one["dense"] += 2 * n * size
                    if lead[layer][head] == layer:
                        one["exact"] += 2 * n * size
                        continue
                    gate = [
                        self.gate(layer, lead[layer][head], head, head * size + g, step, n, far)
                        for g in range(size)
                    ]
                    skips = [share >= tau for share in gate]
                    one["heads"], one["groups"] = one["heads"] + size, one["groups"] + 1
                    one["heads_skipped"] += sum(skips)
                    one["groups_skipped"] += all(skips)
                    one["exact"] += size * (2 * (n - len(far)) + 2 * len(far) - len(far))
                    one["saved"] += sum(skips) * len(far)
            found.append(one)
        return {name: [one[name] for one in found] for name in found[0]}

    def gate(self, layer, lead, head, query, step, n, far):
        own, theirs = (
            (self.keys[at][head, :n] @ self.queries[at][step][query] / math.sqrt(8)).exp()
            for at in (layer, lead)
        )
        near = sum(float(own[j]) for j in range(n) if j not in far)
        return near / (near + sum(float(theirs[j]) for j in far))


@torch.no_grad()
@pytest.mark.parametrize("tau", [0.0, 0.5, 0.8])
def test_counts_are_those_of_a_naive_reading(pod_model, text, tau, monkeypatch):
    recorded, cache = Recorded(monkeypatch), gates.watch(pod.make_cache(pod_model, "pod", tau=tau))
    row = text[:1]
    own_runs.nll_by_decode(pod_model, cache, row, Bucket(start=0, end=40, first=14))
    (found,) = reading.decided(cache)
    wanted = recorded.counts(pod_model, 13, tau)
    # a follower adds its window's logits and values, and the values of the distant tokens whose logits are
    # there
    for name, numbers in wanted.items():
        assert found["decisions"][name] == numbers, name
    skipped, heads = sum(wanted["heads_skipped"]), sum(wanted["heads"])
    assert heads == 23 * 8 and (skipped == heads if tau == 0 else 0 < skipped < heads)
    assert sum(wanted["groups_skipped"]) * 2 < skipped or tau == 0


@torch.no_grad()
@pytest.mark.parametrize("spec", ["pod", "pod+int4"])
def test_what_is_counted_is_what_the_decoder_leaves_out(spec, pod_model, text, monkeypatch):
    done = {"heads_skipped": 0, "groups_skipped": 0}
    original = grouped._distant

    def counting(call, gate, length):
        skipped = gate[:, [call.roles.held.index(head) for head in call.roles.followers]] == 1
        done["heads_skipped"] += int(skipped.sum())
        done["groups_skipped"] += int(skipped.all(-1).sum())
        return original(call, gate, length)

    monkeypatch.setattr(grouped, "_distant", counting)
    cache = gates.watch(pod.make_cache(pod_model, spec, tau=0.6))
    own_runs.nll_by_decode(pod_model, cache, text, Bucket(start=0, end=50, first=30))
    rows = [one["decisions"] for one in reading.decided(cache)]
    for name, number in done.items():
        assert sum(sum(row[name]) for row in rows) == number > 0
    assert [sum(row["groups"]) for row in rows] == [20 * 4] * 3


class Tokenizer:
    pad_token_id, eos_token_id = 0, None

    def decode(self, row, skip_special_tokens):
        return " ".join(map(str, row))


@torch.no_grad()
@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("spec", ["pod", "pod+int4"])
def test_a_row_of_a_padded_batch_counts_what_it_counts_alone(spec, asked, pod_model, text):
    """A row of a padded batch counts what it counts alone.

    Prompts have unlike length, one within the window. One answer ends early, so that padding is decoded
    behind it.
    """
    prompts = [
        SimpleNamespace(token_ids=tuple(text[row, :n].tolist()), num_asked=asked)
        for row, n in enumerate((40, 31, 9))
    ]

    def said(batch):
        return generate(pod_model, Tokenizer(), pod.make_cache(pod_model, spec, tau=0.6), batch, 12)

    plain = [one["answer"].split() for one in said(prompts)]
    end = next(token for token in plain[0][2:6] if token not in plain[0][:2] + plain[1])
    pod_model.generation_config.eos_token_id = int(end)
    try:
        together, alone = said(prompts), [said([prompt])[0] for prompt in prompts]
    finally:
        pod_model.generation_config.eos_token_id = None
    assert len(alone[0]["answer"].split()) <= 5 < len(plain[0])
    assert [one["answer"] for one in together] == [one["answer"] for one in alone]
    assert [one["decisions"] for one in together] == [one["decisions"] for one in alone]
    steps = [sum(one["decisions"]["groups"]) // 4 for one in alone]
    assert steps[0] == len(alone[0]["answer"].split()) and steps[1:] == [11, 4]


def test_rows_keep_their_counts_when_they_are_reordered(pod_model, text):
    cache = gates.watch(pod.make_cache(pod_model, "pod", tau=0.6))
    own_runs.nll_by_decode(pod_model, cache, text, Bucket(start=0, end=40, first=30))
    before = reading.decided(cache)
    cache.batch_select_indices(torch.tensor([2, 0, 2]))
    assert reading.decided(cache) == [before[2], before[0], before[2]]
    assert before[0] != before[2]
    cache.check_integrity()


def test_counts_and_shares_by_hand():
    leads, both = SimpleNamespace(leads=(0, 1), followers=(), windows=()), (0,)
    sizes = {"num_sink_tokens": 4, "num_recent_tokens": 16, "groups": 2}
    first = SimpleNamespace(skips=[], roles=leads, **sizes)
    noted = [[(20, 2, 1), (100, 1, 0), (101, 2, 1), (102, 2, 1)]]
    second = SimpleNamespace(
        skips=noted, roles=SimpleNamespace(leads=(), followers=both, windows=(1,)), **sizes
    )
    found = gates.skipped([first, second], 0, 101)
    assert found == {
        "heads": [0, 4],
        "heads_skipped": [0, 3],
        "groups": [0, 2],
        "groups_skipped": [0, 1],
        "exact": [2 * 2 * 2 * 201, 2 * (2 * 20 + 201) + 2 * 2 * 20 * 2],
        "saved": [0, 80 + 2 * 81],
        "dense": [2 * 2 * 2 * 201] * 2,
    }
    exact, dense = 1608 + 482 + 160, 3216
    assert {name: metric["value"] for name, metric in gate_metrics(found).items()} == {
        "query heads that skip": 0.75,
        "KV heads unread": 0.5,
        "attention saved": 242 / exact,
        "saved over dense": 1 - (exact - 242) / dense,
    }
    assert gates.skipped([first], 0, 101) == {}
    assert gate_metrics({}) == gate_metrics(gates.skipped([first, second], 0, 99)) == {}


def test_perplexity_decodes_with_tau_token_by_token(pod_model, text):
    bucket = Bucket(start=0, end=60, first=50)
    found = own_runs.nll_by_decode(pod_model, pod.make_cache(pod_model, "pod", tau=0.6), text, bucket)
    cache, logits = pod.make_cache(pod_model, "pod", tau=0.6), []
    with torch.no_grad():
        for start, end in [(0, 49), *((p, p + 1) for p in range(49, 59))]:
            logits.append(pod_model(input_ids=text[:, start:end], past_key_values=cache).logits[:, -1])
    for column, of_token in enumerate(logits[1:]):
        wanted = F.cross_entropy(of_token, text[:, 50 + column], reduction="none")
        assert torch.allclose(found[:, column], wanted, atol=1e-9)
    exact = own_runs.nll_by_decode(pod_model, pod.make_cache(pod_model, "pod"), text, bucket)
    assert (found - exact).abs().max() > 1e-3


def test_a_sweep_tells_score_and_attention_saved(tmp_path, monkeypatch):
    """PoD Figure 7 as one run: variants on ordinary tasks, a table of their skips in the report."""
    monkeypatch.setenv("POD_CACHE", str(tmp_path / "cache"))
    place = own_runs.write_place(tmp_path)
    methods = ["pod-unadapted", *(f"pod-unadapted[tau={tau}]" for tau in (0.0, 0.5, 0.9))]
    settings = own_runs.SETTINGS | {
        "output_dir": str(tmp_path),
        "model.plan": str(place / "plan.json"),
        "eval.text": [str(place / "text.txt")],
        "eval.methods": methods,
        "eval.tasks": ["perplexity", "passkey"],
        "eval.text_length": 150,
        "eval.min_context": 64,
        "eval.scored_tokens": 6,
        "eval.text_sequences": 2,
        "eval.passkey_lengths": [420],
        "eval.passkey_depths": [0.0, 1.0],
        "eval.passkey_samples": 1,
        "eval.passkey_new_tokens": 4,
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    results = runner.evaluate(recipe, log=lambda line: None)
    for task, lengths in (("perplexity", [*range(122, 128), *range(144, 150)]), ("passkey", range(421, 424))):
        parts = [results[name]["parts"][task] for name in methods]
        assert "decisions" not in parts[0] and not parts[0].get("metrics")
        shares = [{name: one["value"] for name, one in part["metrics"].items()} for part in parts[1:]]
        assert shares[0]["query heads that skip"] == shares[0]["KV heads unread"] == 1
        if task == "perplexity":  # window 64; 4 leads and 4 followers
            exact = sum(4 * 2 * n + 4 * (64 + n) for n in lengths)
            saved = sum(4 * (n - 64) for n in lengths)
            assert shares[0]["attention saved"] == pytest.approx(saved / exact, rel=1e-12)
            assert shares[0]["saved over dense"] == pytest.approx(
                1 - (exact - saved) / sum(16 * n for n in lengths), rel=1e-12
            )
        for name in shares[0]:
            values = [share[name] for share in shares]
            assert values == sorted(values, reverse=True) and values[2] < values[0]
        assert len({part["value"] for part in parts}) > 1 or task == "passkey"
    page = (tmp_path / "eval" / "report.md").read_text()
    assert "query heads that skip | KV heads unread | attention saved | saved over dense" in page
