"""The models that an evaluation compares: dense, dense weights under the plan, adapted export.

Each is loaded when first needed, and stays while the next one fits beside it. Dense weights under a plan
share the tensors of the dense model where both are compared.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pod
from pod.errors import one_line
from pod.eval.answer.answer_cache import AnswerCache, key_of
from pod.eval.answer.budget import bytes_per_token
from pod.eval.answer.devices import (
    Load,
    check_available,
    fits_whole,
    places_for,
    rank_devices,
    room_on,
    spread_of,
)
from pod.eval.answer.methods import EvaluatedMethod, find_method
from pod.identity import content_of, plan_of
from pod.models import read_config, resolve_model, ways_without_network

if TYPE_CHECKING:
    from pod.recipe import Recipe

_NO_BUDGET = (
    "{}: its budget is the size of PoD's cache, and there is neither a PoD export in {} nor a plan: "
    "run `pod explore`, or set model.plan"
)


def _dtype(name: str) -> Any:
    import torch  # the checks before a model is loaded do not need it

    return getattr(torch, name)


def _check_there(path: str) -> None:
    """Check at once that a model is there, without the hub's retries.

    Raises:
        ValueError: for a model that is neither a folder, nor in the local cache of the hub, nor on the hub.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(path).is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=10)
    except Exception as error:
        ways = ways_without_network(path, str(error))
        raise ValueError(
            f"cannot load a model from {path}: {one_line(error, with_class=True)}{ways}"
        ) from error


@dataclass(frozen=True)
class ModelSource:
    """What a model is loaded from.

    Attributes:
        path: the folder of an export; None: the dense weights.
        plan: the plan (a file) that it gets instead of its own.
        windows: the windows (sink and recent tokens) that it gets instead of its own.
    """

    path: str | None = None
    plan: Path | None = None
    windows: tuple[int, int] | None = None


class Models:
    """Loads models by kind.

    Kinds are `dense`, `unadapted`, `adapted` (see `pod.eval.answer.methods.EvaluatedMethod`), or a name in
    `eval.models`.

    Attributes:
        load: what caches will hold. It decides how models are spread over several GPUs. It is set when tasks
            are known; until then it is None.
        kinds: the kinds that the methods of the recipe need, sorted.
        sources: by kind, what the model is loaded from.
        reference_kind: the kind of the PoD model whose bytes budgets follow; None without one.

    Raises:
        ValueError: at once, when a model or plan that the methods of the recipe need is missing or wrong.
    """

    load: Load | None = None

    def __init__(self, recipe: "Recipe"):
        self.recipe, args = recipe, recipe.model
        self.export = Path(recipe.eval.pod_model or recipe.export_dir)
        self.plan = args.plan_file(recipe.output_dir)
        windows = self._windows(self.plan)
        self._loaded: dict[str, Any] = {}
        chosen = [find_method(name) for name in recipe.eval.methods]
        self.kinds = sorted({method.model for method in chosen})
        self.sources = {
            "dense": ModelSource(windows=windows),
            "unadapted": ModelSource(plan=self.plan, windows=windows),
            "adapted": ModelSource(str(self.export)),
        }
        self.sources |= {kind: self._own(kind) for kind in self.kinds if kind not in self.sources}
        self._check_available()
        self.dense_path = resolve_model(args.path)  # this may convert the model
        if not args.gguf_file:
            _check_there(self.dense_path)
        self.reference_kind = self._reference_kind()
        plans = {self.sources[kind].plan for kind in [*self.kinds, self.reference_kind or "dense"]}
        for plan in filter(None, plans):
            self._check_fits(plan)
        if {"adapted", "unadapted"} <= set(self.kinds):
            self._check_same_plan()
        budgeted = [method.name for method in chosen if method.fills_pod_bytes]
        if self.reference_kind is None and budgeted:
            raise ValueError(_NO_BUDGET.format(", ".join(budgeted), self.export))

    def _windows(self, plan: Path | None) -> tuple[int, int]:
        """Sink and recent tokens of the dense weights under a plan.

        They are the recipe's, else the plan's, else 16 and 4080.
        """
        found = self.recipe.model.windows(pod.SharingPlan.load(plan) if plan and plan.is_file() else None)
        return found["num_sink_tokens"], found["num_recent_tokens"]

    def _own(self, kind: str) -> ModelSource:
        """An entry of `eval.models`.

        It is the folder of an export, or a plan.json for the dense weights, with windows as `…@16+240`.
        """
        own = self.recipe.eval.models
        if kind not in own:
            raise ValueError(
                f"method 'model:{kind}' needs eval.models.{kind}, the folder of an export or a plan.json; "
                f"there is {', '.join(own) or 'none'}"
            )
        parts = re.fullmatch(r"(.+?)(?:@(\d+)\+(\d+))?", str(own[kind] or ""))
        if parts is None:
            raise ValueError(
                f"eval.models.{kind} is {own[kind]!r}; it must be the folder of an export or a plan.json"
            )
        place, sinks, recent = parts.groups()
        given = None if recent is None else (int(sinks), int(recent))
        if place.endswith(".json"):
            return ModelSource(plan=Path(place), windows=given or self._windows(Path(place)))
        if not (Path(place) / "config.json").is_file():
            raise ValueError(
                f"eval.models.{kind} = {own[kind]} has no model: write one there with `pod export`"
            )
        return ModelSource(place, windows=given)

    def _check_available(self) -> None:
        # the folder that vLLM loads is not one that pod-kv loads
        export = "pod export --format hf" if self.recipe.export.format == "vllm" else "pod export"
        if "adapted" in self.kinds and not (self.export / "config.json").is_file():
            raise ValueError(
                f"method 'pod' needs the trained model, and there is none in {self.export}: run "
                f"`{export}`, set eval.pod_model, or compare 'pod-unadapted' instead"
            )
        if "unadapted" in self.kinds and self.plan is None:
            raise ValueError("method 'pod-unadapted' needs a plan: run `pod explore` or set model.plan")

    def _reference_kind(self) -> str | None:
        """The kind of the PoD model whose bytes budgets follow.

        It is one that is compared anyway, else the cheapest to get. None if there is neither a plan nor an
        export.
        """
        for kind in ("adapted", "unadapted"):
            if kind in self.kinds:
                return kind
        if self.plan is not None:
            return "unadapted"
        return "adapted" if (self.export / "config.json").is_file() else None

    def get(self, kind: str) -> Any:
        """The model of a kind, in evaluation mode on the chosen device."""
        if kind not in self._loaded:
            self._loaded[kind] = self._load(kind)
        return self._loaded[kind]

    def _load(self, kind: str) -> Any:
        source, args = self.sources[kind], self.recipe.model
        check_available(self.devices)
        sinks, recent = source.windows or (None, None)
        options: dict[str, Any] = {
            "num_sink_tokens": sinks,
            "num_recent_tokens": recent,
            "attention_backend": args.attention_backend,
        }
        if source.plan is not None:
            options["sinks"] = args.sinks
        if self.shares_weights(kind):
            return pod.load_model(self.get("dense"), source.plan, **options).eval()
        if self._loaded and not self._fits_beside_others(source):
            self._drop_others()
        path, file = self._place(source)
        dtype = _dtype(args.dtype)
        where: dict[str, Any] = {"device": self.device}
        if len(self.devices) > 1:
            asked, room = spread_of(self.recipe.eval.device), room_on(self.devices)
            places = places_for(self._target(source), dtype.itemsize, asked, room, self.load)
            where = {"device_map": places}
        return pod.load_model(path, source.plan, dtype=dtype, **where, **options, **file).eval()

    def shares_weights(self, kind: str) -> bool:
        """Whether a kind of model has the weights of the dense model, which is compared too."""
        return kind != "dense" and self.sources[kind].path is None and "dense" in self.kinds

    def _fits_beside_others(self, source: ModelSource) -> bool:
        """Whether a model and its cache fit beside the models that are loaded."""
        size = _dtype(self.recipe.model.dtype).itemsize
        return fits_whole(self._target(source), size, room_on(self.devices), self.load)

    def _drop_others(self) -> None:
        """Give the memory of all loaded models back. Those that are needed again are loaded again."""
        from pod.modeling.placement import free_unused

        self._loaded.clear()
        free_unused(self.devices[0])

    def _target(self, source: ModelSource) -> Any:
        """The configuration that a model will have once it is loaded, with its plan and windows."""
        from pod.modeling.loading import target_config

        path, file = self._place(source)
        sinks, recent = source.windows or (None, None)
        plan = None if source.plan is None else pod.SharingPlan.load(source.plan)
        found = read_config(path, file.get("gguf_file"))
        own = None if plan is None else self.recipe.model.sinks
        return target_config(found, plan, num_sink_tokens=sinks, num_recent_tokens=recent, sinks=own)

    def config(self, kind: str) -> Any:
        """The configuration that a kind of model will have, without loading it."""
        return self._target(self.sources[kind])

    def _place(self, source: ModelSource) -> tuple[str, dict[str, Any]]:
        """Where a model's weights lie.

        Returns: their folder (or hub id); and further arguments of the loader: `gguf_file`, the name of a
            file in that folder, if the dense weights are in GGUF, else none.
        """
        file = self.recipe.model.gguf_file if source.path is None else None
        return source.path or self.dense_path, {"gguf_file": file} if file else {}

    def _config(self, kind: str) -> dict[str, Any]:
        """The configuration of a kind of model as it stands in its files, without loading the model."""
        from transformers import PreTrainedConfig

        path, file = self._place(self.sources[kind])
        return PreTrainedConfig.get_config_dict(path, **file)[0]

    def packs(self, kind: str) -> bool:
        """Whether a kind of model stores keys or values in fewer bits than it computes in.

        Its plan or configuration tells it; the model is not loaded.
        """
        if (plan := self.sources[kind].plan) is not None:
            return pod.SharingPlan.load(plan).packs
        return bool(set(self._config(kind).get("kv_bits") or ()) - {16})

    def too_long(self, method: EvaluatedMethod, longest: int) -> str | None:
        """Why a method cannot be fed so many tokens, as one clause; None when it can."""
        limit = None if method.reads_any_length else self.limit(method.model)
        if limit is None or longest <= limit:
            return None
        return f"the {method.model} model reads {limit} tokens, and up to {longest} would be fed"

    def max_length(self) -> int:
        """The longest sequence (tokens) that lm-eval's prompts are cut to, the same for all methods.

        It is `eval.max_length`, else the smallest limit of the models that are compared.

        Raises:
            ValueError: when no model says how much it reads.
        """
        if self.recipe.eval.max_length is not None:
            return self.recipe.eval.max_length
        limits = [limit for limit in map(self.limit, self.kinds) if limit is not None]
        if not limits:
            raise ValueError(
                "the longest sequence is unknown: no model has max_position_embeddings in its config.json"
            )
        return min(limits)

    def limit(self, kind: str) -> int | None:
        """Tokens that the model of a kind reads (max_position_embeddings), without loading it.

        Returns: None when it does not say.
        """
        return self._config(kind).get("max_position_embeddings")

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in the dense model, without loading it."""
        config = read_config(self.dense_path, self.recipe.model.gguf_file)
        return bytes_per_token(config, _dtype(self.recipe.model.dtype))

    def _check_fits(self, file: Path) -> None:
        if not file.is_file():
            raise ValueError(f"{file} does not exist: make a plan with `pod explore`")
        plan = pod.SharingPlan.load(file)
        config = read_config(self.dense_path, self.recipe.model.gguf_file)
        layers, heads = config.num_hidden_layers, getattr(config, "num_key_value_heads", None)
        heads = heads or config.num_attention_heads
        if (plan.num_layers, plan.num_key_value_heads) != (layers, heads):
            raise ValueError(
                f"{file} is for {plan.num_layers} layers x {plan.num_key_value_heads} KV heads, "
                f"the model has {layers} x {heads}: "
                "make a plan for this model with `pod explore`, or correct model.plan"
            )

    def _check_same_plan(self) -> None:
        assert self.plan is not None, "_check_available refuses 'unadapted' without a plan"
        exported = pod.PodConfig.from_pretrained(self.export).sharing_plan
        if exported != pod.SharingPlan.load(self.plan):
            raise ValueError(
                f"the export {self.export} has another plan than {self.plan}: 'pod' and 'pod-unadapted' "
                "would not compare the same plan; set model.plan to the export's plan.json, "
                "or train and export again"
            )

    @functools.cached_property
    def devices(self) -> list[Any]:
        """The devices of this rank. A model that does not fit on the first one is spread over several."""
        return rank_devices(self.recipe.eval.device)

    @property
    def device(self) -> str:
        """The device where tokens come in."""
        return str(self.devices[0])

    def tokenizer(self) -> Any:
        """The dense model's tokenizer, which the export carries too."""
        return pod.load_tokenizer(self.dense_path, gguf_file=self.recipe.model.gguf_file)

    def identity(self, kind: str) -> Any:
        """What a result of this kind of model depends on: files, plan, windows, dtype, attention backend."""
        args, source = self.recipe.model, self.sources[kind]
        path, file = self._place(source)
        plan = None if source.plan is None else plan_of(source.plan)
        found = [content_of(path), file, plan, source.windows, args.dtype, args.attention_backend]
        return found if plan is None or args.sinks is None else [*found, args.sinks]

    def windows(self, kind: str) -> tuple[int, int]:
        """(sink, recent) tokens of a kind of model, before it is loaded."""
        if (windows := self.sources[kind].windows) is not None:
            return windows
        config = self._config(kind)
        return config.get("num_sink_tokens", 16), config.get("num_recent_tokens", 4080)

    def reference_layout(self) -> Any:
        """What PoD's bytes depend on: the plan with its bits, windows, dtype. None without a PoD model.

        Training changes none of them.
        """
        kind = self.reference_kind
        if kind is None:
            return None
        if (file := self.sources[kind].plan) is not None:
            plan = pod.SharingPlan.load(file)
            layout = [plan.lead, plan.bits, plan.residual]
        else:
            layout = [self._config(kind).get(field) for field in ("lead", "kv_bits", "kv_residual")]
        return [*layout, *self.windows(kind), self.recipe.model.dtype]

    def place(self, kind: str) -> dict[str, Any]:
        """Where a model of a kind comes from, as the result file says it."""
        path = self.sources[kind].path or self.recipe.model.path
        return {"kind": kind, "path": path, "dtype": self.recipe.model.dtype}

    def described(self, kind: str, answer_cache: AnswerCache) -> dict[str, Any]:
        """What the result file says about a model of a kind.

        The model is loaded only where its answer cache does not say it already.
        """
        found = answer_cache.answers(
            [kind],
            key=lambda _: key_of("model"),
            batches=lambda left: [left],
            compute=lambda left: [self.description(one) for one in left],
        )
        return self.place(kind) | found[0]

    def description(self, kind: str) -> dict[str, Any]:
        """What the result file says about the model itself, once it is loaded."""
        model = self.get(kind)
        plan, weights = model.config.sharing_plan, list(model.parameters())
        return {
            "parameters": sum(parameter.numel() for parameter in weights),
            "weight_bytes": sum(parameter.numel() * parameter.element_size() for parameter in weights),
            "num_sink_tokens": model.config.num_sink_tokens,
            "num_recent_tokens": model.config.num_recent_tokens,
            "share_followers": plan.share_followers,
            "share_windows": plan.share_windows,
            "asymptotic_saving": plan.asymptotic_saving,
        }
