"""What the tests of the lm-eval model class share.

Tiny models with a tokenizer, requests, and every method with small parameters.
"""

from functools import cache

import torch
from lm_eval.api.instance import Instance

import pod
from pod.eval.answer.budget import ByteBudgets, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.lm.model import PodLM
from pod.eval.lm.requests import RequestEncoder
from pod.models import resolve_model
from pod.notation import parse_budget

PLAN = pod.SharingPlan(lead=[[0, 0], [0, 1], [0, 1], [3, 1]])

SMALL = {
    "full": {},
    "pod": {},
    "cla": {},
    "window": {},
    "streamingllm": {"budget": 20},
    "lm_infinite": {"budget": 20},
    "wa": {"budget": 20},
    "local_window": {"budget": 20},
    "snapkv": {"budget": 20, "window": 6},
    "pyramidkv": {"budget": 20, "window": 4, "kernel": 3},
    "adakv": {"budget": 20, "window": 6},
    "expected_attention": {"budget": 20},
    "kvzip": {"budget": 20, "chunk_size": 25, "repeat_ids": [[5, 6], [7], [8, 9]]},
    "h2o": {"budget": 20, "num_recent_tokens": 6},
    "roco": {"budget": 20, "num_recent_tokens": 4},
    "d2o": {"budget": 20},
    "simlayerkv": {"threshold": 0.0, "num_recent_tokens": 12, "detector": "prefill", "num_last_queries": 4},
    "razor": {"heads": [[0], [], [1], []], "num_recent_tokens": 12},
    "quest": {"budget": 16, "page_size": 4, "num_dense_layers": 1},
    "minicache": {"block": 16},
    "think": {"ratio": 0.5, "queries": 4, "recent": 4},
    "imdc": {"budget": 24, "chunk_size": 20, "window": 4},
    "im": {"budget": 24, "chunk_size": 20, "window": 4},
    "fm": {"budget": 24, "chunk_size": 20, "window": 4},
    "kivi": {"group_size": 8, "residual": 8},
    "int4": {"group_size": 8, "residual": 8},
    "int8": {"group_size": 8, "residual": 8},
}
"""every method of `pod.methods()` with parameters that make it drop or change something at 60 tokens"""


@cache
def tokenizer():
    return pod.load_tokenizer(resolve_model("package:tiny"))


def model(kind: str = "full", dtype: str = "float64"):
    """The random tiny model: `full`, or under a plan or layout."""
    return _model(kind, dtype)


@cache
def _model(kind: str, dtype: str):
    plan = {"pod": PLAN, "cla": pod.SharingPlan(lead=[[0, 0], [0, 0], [2, 2], [2, 2]])}.get(kind)
    windows = {"pod": (4, 12), "window": (0, 16)}.get(kind, (None, None))
    return pod.load_model(
        resolve_model("package:tiny"),
        plan=plan,
        num_sink_tokens=windows[0],
        num_recent_tokens=windows[1],
        layout=kind if kind in ("cla", "window") else None,
        dtype=dtype,
    )


def around(spec: str = "full", kind: str | None = None, dtype: str = "float64", **options) -> PodLM:
    """A PodLM of a method; options of PodLM, the rest goes to the method."""
    kind = kind or (spec if spec in ("pod", "cla", "window") else "full")
    own = {name: options.pop(name) for name in ("batch_size", "answer_cache") if name in options}
    loaded = model(kind, dtype)
    encoder = options.pop("encoder", None) or RequestEncoder(
        tokenizer(), loaded.config.max_position_embeddings
    )
    one_shot = options.pop("one_shot", False)
    params = SMALL.get(spec, {}) | options
    budget = parse_budget(params.pop("budget")) if "budget" in params else None
    method = EvaluatedMethod(
        name=spec, spec=spec, model="dense", takes_budget=budget is not None, budget=budget, one_shot=one_shot
    )
    return PodLM(MethodRunner(method, lambda: loaded, params, ByteBudgets(0)), encoder, **own)


def instance(kind: str, args: tuple, doc: int, idx: int = 0, task: str = "t") -> Instance:
    return Instance(kind, {}, args, idx, (task, doc, 1))


ALPHABET = [chr(code) for code in range(33, 127)]


def text(seed: int, words: int) -> str:
    """5 characters (tokens) per word, all different.

    Where a token stands three times, D2O's nearest key can be a tie that rounding breaks: RoPE makes the
    similarity of a key with its copies k before and k behind it equal.
    """
    order = torch.randperm(len(ALPHABET), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(ALPHABET[place] for place in order[: 5 * words])


def choices(docs: int = 4) -> list[Instance]:
    """Multiple choice requests.

    Ragged contexts, ragged answers, one-token answers, a context without text, and spaces at its end.
    """
    found = []
    for doc in range(docs):
        context = text(doc, 8 + 3 * doc)
        if doc == 2:
            context += " "
        answers = ["A", "B", "C"] if doc % 2 else [" " + text(90 + doc, 1 + i) for i in range(3)]
        found += [instance("loglikelihood", (context, a), doc, i) for i, a in enumerate(answers)]
    found.append(instance("loglikelihood", ("", text(7, 3)), docs))
    return found


def ragged() -> list[Instance]:
    """One answer each after contexts of different lengths in one length class.

    Rows need padding when they run together.
    """
    return [
        instance("loglikelihood", (text(30 + doc, 8 + doc), "Z" * (2 - doc % 2)), 100 + doc)
        for doc in range(3)
    ]


def generations(new_tokens: int = 6) -> list[Instance]:
    settings = {"until": ["\n"], "max_gen_toks": new_tokens, "do_sample": False}
    return [
        instance("generate_until", (text(20 + doc, 7 + 2 * doc), settings), doc, task="g") for doc in range(4)
    ]


def texts() -> list[Instance]:
    return [
        instance("loglikelihood_rolling", (text(40 + doc, 6 + 5 * doc),), doc, task="r") for doc in range(2)
    ]
