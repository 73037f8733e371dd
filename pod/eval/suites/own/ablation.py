"""Window size and KV saving of PoD (Figure 3): perplexity and passkeys of the model under other windows and other plans, on the same weights.

Nothing is trained here. Of `pod-unadapted` the curves say how much each setting leaves to adaptation; of `pod`, how far the adapted weights
carry beyond the setting that they were trained with. The paper trains every setting: compare such exports as methods `model:NAME`.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pod
from pod.eval import answer
from pod.eval.answer.store import in_batches, key_of
from pod.eval.suites.base import Span, perplexity_result
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.own import passkey
from pod.eval.suites.settings import SettingsTask, curve
from pod.eval.suites.text import text_sample

if TYPE_CHECKING:
    from pod.eval.answer.methods import Method
    from pod.eval.answer.store import Shelf

OWN, DENSE = "own", "no sharing"
COLUMNS = {
    "setting": "setting",
    "num_recent_tokens": "recent tokens",
    "share_followers": "pairs that follow",
    "asymptotic_saving": "saving in the limit",
    "saving": "saving at the length",
    "perplexity": "perplexity",
    "change": "change against no sharing",
    "passkey": "passkeys found",
}


@dataclass(kw_only=True)
class AblationOptions:
    """`eval.task_options.ablation`. Texts and position buckets are those of the task perplexity, prompts those of passkey."""

    windows: list[int] = field(default_factory=list)
    """numbers of recent tokens to measure, with the model's own plan and sink tokens"""

    plans: list[str] = field(default_factory=list)
    """plan files to measure, with the model's own windows: `launch/explore.py` makes one per saving"""

    sequences: int | None = None
    """texts, the first ones; null = eval.text_sequences"""

    passkeys: bool = True
    """answer the passkey prompts under every setting, too"""

    def __post_init__(self) -> None:
        if not self.windows and not self.plans:
            raise ValueError("windows and plans are empty: give windows=[256, 512], plans=[a.json], or both")
        if any(window < 1 for window in self.windows) or len(set(self.windows)) < len(self.windows):
            raise ValueError(f"windows must be different token counts of at least 1, got {self.windows}")
        if len(set(self.plans)) < len(self.plans):
            raise ValueError(f"plans names one file twice: {', '.join(self.plans)}")
        self.windows = sorted(self.windows)


@dataclass(frozen=True)
class Setting:
    """A name and the fields of the configuration that differ from the model's own."""

    name: str
    changes: dict[str, Any]


class Ablation(SettingsTask):
    """Perplexity over all position buckets and passkeys of every setting; the model's own setting and no sharing besides."""

    name = "ablation"
    title = "windows and savings"
    Options = AblationOptions

    def __init__(self, run: Any, options: AblationOptions):
        from pod.modeling.loading import plan_fields

        super().__init__(run, options)
        args, where, gguf_file = self.args, run.models.dense_path, run.recipe.model.gguf_file
        plans = {path: answer.models.check_plan(path, where, gguf_file) for path in options.plans}
        self.settings = [Setting(OWN, {}), Setting(DENSE, plan_fields(None))]
        self.settings += [
            Setting(f"window {window}", {"num_recent_tokens": window}) for window in options.windows
        ]
        names = _plan_names(options.plans)
        self.settings += [Setting(f"plan {names[path]}", plan_fields(plan)) for path, plan in plans.items()]
        self.buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)

    def spans(self) -> list[Span]:
        return [Span(self.args.text_length, 0)]

    def refuses(self, method: "Method") -> str | None:
        if method.spec != "pod":
            return "it varies PoD's windows and plan: measured for pod and pod-unadapted"
        return None

    def token_counts(self, method: "Method") -> tuple[int, int]:
        """(prompt tokens, decode steps) for `--dry-run`."""
        if self.refuses(method):
            return 0, 0
        prompts = sum(len(prompt.token_ids) for prompt in self.prompts)
        texts = (len(self.text) + 1) * self.args.text_length  # one more, whose bytes are measured
        steps = len(self._prompt_batches(self.prompts)) * self.args.passkey_new_tokens
        return len(self.settings) * (texts + prompts), len(self.settings) * steps

    def measure(self, method: "Method", shelf: "Shelf") -> dict[str, Any]:
        texts = [("text", number) for number in range(len(self.text))]
        prompts = [("passkey", number) for number in range(len(self.prompts))]
        items = [(setting, *item) for setting in self.settings for item in [*texts, *prompts, ("held", 0)]]
        models = _Variants(lambda: self.run.models.get(method.model))
        records = shelf.answers(
            items,
            key=self._key,
            batches=self._batches,
            compute=lambda batch: self._compute(models, batch),
        )
        rows, records = [], iter(records)
        for setting in self.settings:
            scored = [next(records) for _ in texts]
            said = [_judged(prompt, next(records)) for prompt in self.prompts]
            rows.append({"setting": setting.name, "answers": said, "texts": scored, **next(records)})
        return self._payload(method, rows)

    def _key(self, item: tuple[Setting, str, int]) -> str:
        setting, kind, number = item
        if kind == "text":
            return key_of(kind, setting.changes, self.buckets, self.text[number].tolist())
        if kind == "held":
            return key_of(kind, setting.changes, self.args.text_length)
        return key_of(
            kind,
            setting.changes,
            self.args.passkey_new_tokens,
            self.prompts[number].token_ids,
            self.prompts[number].num_asked,
        )

    def _batches(self, left: list[tuple[Setting, str, int]]) -> Iterable[list[tuple[Setting, str, int]]]:
        """Setting by setting, texts first; prompts of one asked-for length together."""
        size = self.args.batch_size
        for setting in self.settings:
            own = [item for item in left if item[0].name == setting.name]
            yield from in_batches([item for item in own if item[1] == "text"], size)
            yield from ([item] for item in own if item[1] == "held")
            numbers = {item[2]: item for item in own if item[1] == "passkey"}
            for batch in self._prompt_batches([self.prompts[number] for number in numbers]):
                yield [numbers[self.prompts.index(prompt)] for prompt in batch]

    def _prompt_batches(self, prompts: list[passkey.Prompt]) -> list[list[passkey.Prompt]]:
        return in_batches(prompts, self.args.batch_size, lambda prompt: prompt.length)

    def _compute(self, models: "_Variants", batch: list[tuple[Setting, str, int]]) -> list[dict[str, Any]]:
        model, numbers = models.get(batch[0][0]), [number for _, _, number in batch]
        if batch[0][1] == "held":
            return [self._held(model)]
        if batch[0][1] == "text":
            rows = self.text[numbers].to(next(model.parameters()).device)
            scored = answer.perplexity.score_by_forward(model, rows, self.buckets)
            sums = [nll.double().sum(1).tolist() for nll in scored]
            return [{"nll": sum(of_row)} for of_row in zip(*sums, strict=True)]
        prompts = [self.prompts[number] for number in numbers]
        cache = pod.make_cache(model, model.config.own_method)
        return answer.reading.answers(model, self.run.tokenizer, cache, prompts, self.args.passkey_new_tokens)

    def _held(self, model: Any) -> dict[str, Any]:
        """Plan, windows and bytes of a setting: those of one text, really held."""
        plan, length = model.config.sharing_plan, self.args.text_length
        held = sum(answer.budget.measure_bytes(model, model.config.own_method, [length])[length].values())
        return {
            "num_sink_tokens": model.config.num_sink_tokens,
            "num_recent_tokens": model.config.num_recent_tokens,
            "share_followers": plan.share_followers,
            "asymptotic_saving": plan.asymptotic_saving,
            "bytes": held,
            "saving": 1 - held / (answer.budget.native_bytes_per_token(model) * length),
        }

    def _payload(self, method: "Method", found: list[dict[str, Any]]) -> dict[str, Any]:
        base = [record["nll"] for record in found[1]["texts"]]
        rows = [self._row(row, base) for row in found]
        tokens = sum(bucket.scored for bucket in self.buckets)
        return {
            **perplexity_result(rows[0]["perplexity"], rows[0]["ci95"]),
            "samples": [
                text_sample(
                    number,
                    self.text[number].tolist(),
                    score=record["nll"],
                    tokens=tokens,
                    by_setting={row["setting"]: row["texts"][number]["nll"] for row in found},
                )
                for number, record in enumerate(found[0]["texts"])
            ],
            "bytes": [self.run.stated_bytes(self.args.text_length, None, [found[0]["bytes"]])],
            "settings": {
                **asdict(self.options),
                "length": self.args.text_length,
                "own_windows": list(self.run.models.windows(method.model)),
                "trained_per_setting": False,
            },
            "passkeys": {row["setting"]: row["answers"] for row in found},
            "columns": self.columns(COLUMNS),
            "rows": rows,
            "curves": _curves(rows, bool(self.prompts)),
        }

    def _row(self, found: dict[str, Any], base: list[float]) -> dict[str, Any]:
        """One setting: its numbers, perplexity and change against no sharing, passkeys."""
        sums = [record["nll"] for record in found["texts"]]
        row = {key: value for key, value in found.items() if key not in ("texts", "answers")}
        tokens = sum(bucket.scored for bucket in self.buckets)
        return row | self.row(sums, base, tokens, [record["correct"] for record in found["answers"]])


class _Variants:
    """The model of the last setting asked for; weights are shared between all."""

    def __init__(self, own: Callable[[], Any]):
        self.own, self.name, self.last = own, "", None

    def get(self, setting: Setting) -> Any:
        if setting.name != self.name:
            self.last = (
                answer.variants.variant(self.own(), **setting.changes) if setting.changes else self.own()
            )
            self.name = setting.name
        return self.last


def _judged(prompt: passkey.Prompt, record: dict[str, Any]) -> dict[str, Any]:
    """What was said to a prompt, with whether it is right."""
    return {"id": prompt.id, **record, "correct": passkey.is_correct(record["answer"], prompt.key)}


def _plan_names(paths: list[str]) -> dict[str, str]:
    """File names where they tell plans apart, else paths."""
    names = {path: Path(path).stem for path in paths}
    return names if len(set(names.values())) == len(paths) else {path: path for path in paths}


def _curves(rows: list[dict[str, Any]], with_passkeys: bool) -> list[dict[str, Any]]:
    """Both halves of Figure 3: by window, the own one included, and by saving, no sharing included."""
    own, dense, *others = rows
    by_window = [own, *(row for row in others if row["setting"].startswith("window "))]
    by_plan = [dense, own, *(row for row in others if row["setting"].startswith("plan "))]
    curves = []
    measures = [("perplexity", "ci95")] + [("passkey", "passkey_ci95")] * with_passkeys
    for chosen, key, what in (
        (by_window, "num_recent_tokens", "recent tokens"),
        (by_plan, "asymptotic_saving", "KV saving in the limit"),
    ):
        chosen = sorted(chosen, key=lambda row: row[key])
        if len({row[key] for row in chosen}) < 2:
            continue
        curves += [
            curve(
                chosen,
                key,
                measure,
                interval,
                title=f"{COLUMNS[measure].capitalize()} by {what}",
                x_label=what,
                y_label=COLUMNS[measure],
                labels=[row["setting"] for row in chosen],
                reference=dense[measure],
            )
            for measure, interval in measures
        ]
    return curves
