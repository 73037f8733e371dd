"""The model `pod` of lm-eval's command line: a method and its budget from lm-eval's model arguments.

`--model_args pretrained=…,method=snapkv,budget=25%` are the arguments of `CommandLM`, which importing this module registers.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model

import pod
from pod.eval.answer.budget import NO_LIMIT, ByteBudgets, Subject, measure_bytes, native_bytes_per_token
from pod.eval.answer.methods import Method, find_method, with_requests
from pod.eval.answer.ranks import Ranks
from pod.eval.answer.store import Store
from pod.eval.lm.model import PodLM
from pod.eval.lm.requests import Encoder
from pod.eval.results import code_identity, with_files
from pod.identity import content_of, plan_of

_RANKS: list[Ranks] = []
POD_BYTES = "pod"


def make_subject(
    model: Any,
    method: str | None = None,
    budget: int | str | None = None,
    reference: Any = None,
    options: dict[str, Any] | None = None,
) -> Subject:
    """A method on a loaded model.

    Args:
        method: a spec of `pod.make_cache`, or with its budget as `snapkv@1024`; None: the layout of the model itself.
        budget: tokens per KV head and layer, a share of the tokens as "25%", or "pod": as many as fill the bytes that PoD holds.
        reference: for the budget "pod": a model with the sharing plan.
        options: the method's own parameters.
    Raises: ValueError for whatever does not go together, by making one cache at once.
    """
    found = _method(method, model, budget)
    options = found.options | (options or {})
    follows = found.takes_budget and found.budget is None
    if follows and reference is None:
        raise ValueError(
            f"method {found.name!r} needs a budget: budget=1024 (tokens), budget=25% (of the tokens seen), or budget=pod "
            "with plan=PLAN.json (as many as fill PoD's bytes)"
        )
    # one forward equals the decode path: no gate skip (tau), no plan that packs
    one_shot = found.one_shot and not options and not model.config.sharing_plan.packs
    measure = None if reference is None else functools.partial(measure_bytes, reference, "pod")
    budgets = ByteBudgets(native_bytes_per_token(model), measure)
    pod.make_cache(model, found.spec, budget=NO_LIMIT if follows else found.fixed_budget(NO_LIMIT), **options)
    return Subject(replace(found, one_shot=one_shot), lambda: model, options, budgets)


def _method(name: str | None, model: Any, budget: int | str | None) -> Method:
    own = model.config.own_method
    if name is None or name == own:
        if budget is not None:
            raise ValueError(f"method {own!r} takes no budget; leave out budget={budget}")
        return Method(name=own, spec=None, model="dense", one_shot=True)
    found = find_method(name)
    if budget is None or (budget == POD_BYTES and found.takes_budget):
        return found
    if found.budget is not None:
        raise ValueError(f"method {name!r} has its budget behind the @; leave out budget={budget}")
    return find_method(f"{name}@{budget}")


class CommandLM(PodLM):
    """A dense model or an export of this project, under a method."""

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        budget: int | str | None = None,
        plan: str | None = None,
        num_sink_tokens: int | None = None,
        num_recent_tokens: int | None = None,
        gguf_file: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        too_long: str = "truncate",
        question_aware: bool = False,
        attention_backend: str = "auto",
        store: str | None = None,
        **options: Any,
    ):
        """
        Args:
            pretrained: folder or hub id: a dense model or an export of this project.
            method: a spec of `pod.make_cache`, as `snapkv` or `pod+snapkv+int4`; default: the layout of the model itself.
            budget: tokens per KV head and layer, a share of the tokens as `25%`, or `pod`: as many as fill PoD's bytes.
            plan: plan.json for the method `pod` on dense weights and for `budget=pod`; an export has its own.
            num_sink_tokens, num_recent_tokens: PoD's windows (tokens), default those that the plan was made
                for.
            gguf_file: name of a GGUF file in `pretrained`; dtype: of the weights, default the checkpoint's.
            batch_size: sequences that run together (a number; `auto` is not supported).
            device: default a GPU where there is one.
            max_length: longest sequence (tokens), default what the model reads; too_long: truncate or error (skip: in recipes).
            question_aware: methods see the question when they compress a prompt (see eval.question_aware).
            store: folder that keeps answers by model, method, budget and prompt: a run that was killed goes on, nothing is asked twice.
            options: parameters of the method (`pod eval --list-methods`).
        Raises: ValueError, before any computation, for whatever does not go together.
        """
        _check(batch_size, max_batch_size, too_long)
        ranks = Ranks()
        _RANKS.append(ranks)
        # for other methods the plan only says how many bytes PoD would hold
        parts = [re.split(r"[\[@]", part)[0].strip() for part in (method or "pod").split("+")]
        model = pod.load_model(
            pretrained,
            plan=plan if {"pod", "pod-unadapted"} & set(parts) else None,
            num_sink_tokens=num_sink_tokens,
            num_recent_tokens=num_recent_tokens,
            dtype=dtype,
            gguf_file=gguf_file,
            attention_backend=attention_backend,
            device=_device(device, ranks),
        )
        tokenizer = pod.load_tokenizer(pretrained, gguf_file=gguf_file)
        options = with_requests(method, options, tokenizer)
        windows = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
        reference = _reference(model, plan, budget, windows)
        subject = make_subject(model, method, budget, reference, options)
        length = int(max_length or model.config.max_position_embeddings)
        encoder = Encoder(tokenizer, length, too_long, question_aware)
        self.identity = {
            "pretrained": content_of(pretrained),
            "method": subject.method.name,
            "budget": budget,
            "plan": None if plan is None else plan_of(plan),
            "windows": [model.config.num_sink_tokens, model.config.num_recent_tokens],
            "model": [gguf_file, str(model.dtype), attention_backend],
            "limits": [length, too_long, question_aware],
            "options": with_files(options),
        }
        kept = Store(None if store is None else Path(store), ranks)
        shelf = kept.shelf(subject.method.name, {**self.identity, "code": code_identity()})
        super().__init__(subject, encoder, int(batch_size), shelf)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results; asks no network."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.dtype),
            "model_revision": None,
            "model_sha": None,
            "pod": self.identity,
        }


register_model("pod")(CommandLM)


def close_ranks() -> None:
    """Leave the process group that a `CommandLM` of this process has joined."""
    while _RANKS:
        _RANKS.pop().close()


def _device(asked: str | None, ranks: Ranks) -> str:
    """lm-eval's command line asks for cuda:0 by itself: that means a GPU where there is one, and each rank its own."""
    if asked is not None and not asked.startswith("cuda"):
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{ranks.local_rank}" if ranks.world_size > 1 else asked or "cuda"


def _reference(model: Any, plan: str | None, budget: int | str | None, windows: dict[str, Any]) -> Any:
    """A model that tells PoD's bytes: the model itself when it has a plan, else the same weights under
    `plan`, with its windows where none are given."""
    if budget != POD_BYTES:
        return None
    if model.config.own_method == "pod":
        return model
    if plan is None:
        raise ValueError("budget=pod needs plan=PLAN.json: it says which bytes PoD would hold")
    return pod.load_model(model, plan=plan, attention_backend=model.config.attention_backend, **windows)


def _check(batch_size: int | str, max_batch_size: int | None, too_long: str) -> None:
    if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
        raise ValueError(
            f"batch_size = {batch_size!r}: a number of sequences is needed (auto and max_batch_size are not supported: what runs "
            "together would depend on the machine)"
        )
    if too_long == "skip":
        raise ValueError(
            "too_long=skip: lm-eval's command line would score the prompts that are left out as wrong; take truncate or error, or run "
            "the tasks by a recipe, which counts them apart (eval.too_long)"
        )
