"""The model `pod` of lm-eval's command line. Its cache method comes from lm-eval's model arguments.

`--model_args pretrained=…,method=snapkv[window=16]@25%` gives the arguments of `CommandLM`. Importing this
module registers that class with lm-eval.
"""

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model

import pod
from pod.eval.answer.answer_cache import AnswerFolder
from pod.eval.answer.budget import ByteBudgets, MethodRunner, measure_bytes, native_bytes_per_token
from pod.eval.answer.methods import EvaluatedMethod, find_method, with_repeat_ids
from pod.eval.answer.ranks import Ranks
from pod.eval.lm.model import PodLM
from pod.eval.lm.requests import RequestEncoder
from pod.eval.results import code_identity, with_files
from pod.identity import content_of, plan_of
from pod.notation import NO_LIMIT, parse
from pod.tokenizer import template_arguments, with_template_variables

_RANKS: list[Ranks] = []
_log = logging.getLogger(__name__)


def make_runner(
    model: Any, method: EvaluatedMethod, reference: Any = None, options: dict[str, Any] | None = None
) -> MethodRunner:
    """A method on a loaded model.

    Args:
        method: what `method_of` returns for this model.
        reference: a model with the sharing plan, for a budget that fills PoD's bytes; None = no such budget.
        options: parameters beside those in the method's name.
    Raises:
        ValueError: when the method cannot run this model, or does not take these parameters. One cache is
            made at once to find out.
    """
    options = method.options | (options or {})
    # one forward equals the decode path only without gate skip (tau) and without a plan that packs
    one_shot = method.one_shot and not options and not model.config.sharing_plan.packs
    measure = None if reference is None else functools.partial(measure_bytes, reference, "pod")
    budgets = ByteBudgets(native_bytes_per_token(model), measure)
    runner = MethodRunner(replace(method, one_shot=one_shot), lambda: model, options, budgets)
    pod.make_cache(model, method.spec, budget=_trial_budget(method), **options)
    return runner


def _trial_budget(method: EvaluatedMethod) -> int | None:
    """The budget (tokens) of a cache that is only made to see whether it can be; None = it takes none.

    A share of the prompt and PoD's bytes give no number of tokens before a prompt is there: then it is
    `NO_LIMIT`.
    """
    if method.fills_pod_bytes:
        return NO_LIMIT
    if method.budget is None:
        return None
    return method.budget.tokens or NO_LIMIT


def method_of(model: Any, name: str | None) -> EvaluatedMethod:
    """The method that a text such as `snapkv@25%` names; without a name, the layout of the model itself."""
    own = model.config.own_method
    if name is None or name == own:
        return EvaluatedMethod(name=own, spec=None, model="dense", one_shot=True)
    return find_method(name)


class CommandLM(PodLM):
    """A dense model or an export of this project, with a cache method."""

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
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
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        store: str | None = None,
        **others: Any,
    ):
        """Load what lm-eval's model arguments describe.

        Args:
            pretrained: folder or hub id: a dense model or an export of this project.
            method: written as in `pod.make_cache`, for example `pod+snapkv[window=16;kernel=7]+int4@25%`.
                Write `;` between parameters, because lm-eval splits its arguments at commas; `pod eval
                lm-eval` takes commas too. Default: the model's own layout. A method without a budget, or with
                the budget `pod`, gets as many bytes as PoD uses.
            plan: plan.json for the method `pod` on dense weights, or for the budget `pod`. An export has its
                own.
            num_sink_tokens, num_recent_tokens: PoD's windows in tokens. Default: those recorded in the plan.
            gguf_file: name of a GGUF file in `pretrained`.
            dtype: of the weights. Default: the checkpoint's.
            batch_size: number of sequences that run together; `auto` is not supported.
            device: default a GPU, if there is one.
            max_length: longest sequence in tokens. Default: the most that the model reads.
            too_long: truncate or error. Recipes also allow skip.
            question_aware: methods see the question when they compress a prompt (see eval.question_aware).
            chat_template_args: variables for the chat template, as in lm-eval's own model class.
            enable_thinking: short for `{enable_thinking: …}` in chat_template_args, which it overrides. True
                is an error: the thoughts would stay in the answers and be scored.
            store: folder that keeps answers by model, method, budget and prompt. A killed run continues from
                it.
            others: none. Each of them is an error that names the argument.
        Raises:
            ValueError: before any computation, for arguments that do not go together.
        """
        _check(batch_size, max_batch_size, too_long)
        _check_others(others)
        variables = template_arguments(enable_thinking, chat_template_args)
        _check_no_thoughts(variables)
        ranks = Ranks()
        _RANKS.append(ranks)
        # for other methods the plan only says how many bytes PoD would hold
        parts = parse(method or "pod").names
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
        tokenizer = _tokenizer(pretrained, gguf_file, variables, ranks)
        found = method_of(model, method)
        options = with_repeat_ids(found, found.options, tokenizer)
        windows = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
        runner = make_runner(model, found, _reference(model, plan, found, windows), options)
        length = int(max_length or model.config.max_position_embeddings)
        encoder = RequestEncoder(tokenizer, length, too_long, question_aware)
        self.identity: dict[str, Any] = {
            "pretrained": content_of(pretrained),
            "method": runner.method.name,
            "plan": None if plan is None else plan_of(plan),
            "windows": [model.config.num_sink_tokens, model.config.num_recent_tokens],
            "model": [gguf_file, str(model.dtype), attention_backend],
            "limits": [length, too_long, question_aware],
            "options": with_files(options),
        }
        if variables:
            self.identity["chat_template_args"] = variables
        kept = AnswerFolder(None if store is None else Path(store), ranks)
        answer_cache = kept.answers_of(runner.method.name, {**self.identity, "code": code_identity()})
        super().__init__(runner, encoder, int(batch_size), answer_cache)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model. It is found without a network."""
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


def _tokenizer(pretrained: str, gguf_file: str | None, variables: dict[str, Any], ranks: Ranks) -> Any:
    """The tokenizer. Its chat template gets `variables`; the first rank warns of unused ones."""
    tokenizer = pod.load_tokenizer(pretrained, gguf_file=gguf_file)
    warn = _log.warning if ranks.is_first else _log.debug
    return with_template_variables(tokenizer, variables, "chat_template_args", warn)


def _device(asked: str | None, ranks: Ranks) -> str:
    """The device for the one that lm-eval's command line asks for.

    By itself the command line asks for cuda:0. So a cuda device, or none, means: the CPU where there is no
    GPU, each rank's own GPU where there are several ranks, and else the device as it is written.
    """
    if asked is not None and not asked.startswith("cuda"):
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{ranks.local_rank}" if ranks.world_size > 1 else asked or "cuda"


def _reference(model: Any, plan: str | None, method: EvaluatedMethod, windows: dict[str, Any]) -> Any:
    """The PoD model whose bytes a budget follows; None if the method's budget follows no bytes.

    It is the model itself if that has a plan. Else it has the same weights under `plan`, with the plan's
    windows where none are given.

    Raises:
        ValueError: when the method needs a budget, and there is neither a budget nor a plan.
    """
    if not method.fills_pod_bytes:
        return None
    if model.config.own_method == "pod":
        return model
    if plan is None:
        name = method.name
        raise ValueError(
            f"method {name!r} needs a budget: write method={name}@1024 (tokens) or method={name}@25% "
            "(of each prompt), or give plan=PLAN.json, whose bytes it then fills"
        )
    return pod.load_model(model, plan=plan, attention_backend=model.config.attention_backend, **windows)


def _check_no_thoughts(variables: dict[str, Any]) -> None:
    """Raise ValueError for `enable_thinking=True`.

    lm-eval itself takes that only with a token that ends the thoughts.
    """
    if variables.get("enable_thinking"):
        raise ValueError(
            "enable_thinking=True is not supported: the thoughts would stay in the answers and be scored; "
            "set enable_thinking=False"
        )


def _check_others(others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that do not exist.

    A budget and a method's parameters stand in the method's name.
    """
    if others.get("think_end_token") is not None:
        raise ValueError(
            "think_end_token is not supported, because thoughts stay in the answers: "
            "turn them off with enable_thinking=False"
        )
    for name, value in others.items():
        where = f"write it after the method: method=snapkv@{value}" if name == "budget" else ""
        where = where or (
            "write a method's parameters in brackets, separated by ;, "
            f"as in method=snapkv[{name}={value}]@25%"
        )
        raise ValueError(f"unknown model argument {name}={value}: {where}")


def _check(batch_size: int | str, max_batch_size: int | None, too_long: str) -> None:
    if not str(batch_size).isdecimal() or int(batch_size) < 1 or max_batch_size is not None:
        raise ValueError(
            f"batch_size = {batch_size!r} must be a number of sequences; auto and max_batch_size are not "
            "supported, because results would depend on the machine"
        )
    if too_long == "skip":
        raise ValueError(
            "too_long=skip is not supported here, because lm-eval would count skipped prompts as wrong: "
            "set truncate or error, or use a recipe with eval.too_long, which counts them separately"
        )
