"""Window size and KV saving of PoD (Figure 3): perplexity and passkeys of the model under other windows and other plans, on the same weights.

Nothing is trained here. Of `pod-unadapted` the curves say how much each setting leaves to adaptation; of `pod`, how far the adapted weights
carry beyond the setting that they were trained with. The paper trains every setting: compare such exports as methods `model:NAME`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pod
from pod.eval import answer
from pod.eval.answer.budget import Span, Subject
from pod.eval.answer.methods import Method
from pod.eval.answer.store import in_batches, key_of
from pod.eval.suites.base import curve
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.own import passkey
from pod.eval.suites.settings import Item, SettingsTask
from pod.eval.suites.text import Record

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
    columns = COLUMNS

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
        self._last: tuple[Any, Any] = None, None
        self.scored = sum(bucket.scored for bucket in self.buckets)

    def spans(self) -> list[Span]:
        return [Span(self.args.text_length, 0)]

    def refuses(self, method: Method) -> str | None:
        if method.spec != "pod":
            return "it varies PoD's windows and plan: measured for pod and pod-unadapted"
        return None

    def token_counts(self, method: Method) -> tuple[int, int]:
        """(prompt tokens, decode steps) for `--dry-run`."""
        if self.refuses(method):
            return 0, 0
        texts = (len(self.text) + 1) * self.args.text_length  # one more, whose bytes are measured
        batches = in_batches(self.prompts, self.args.batch_size, lambda prompt: prompt.length)
        steps = len(batches) * self.args.passkey_new_tokens
        return len(self.settings) * (texts + self.prompt_tokens()), len(self.settings) * steps

    def items(self, settings: int = 1) -> list[Item]:
        """And of every setting what it holds, once."""
        found = super().items(len(self.settings))
        return sorted(
            [*found, *((number, "held", 0) for number in range(len(self.settings)))], key=lambda i: i[0]
        )

    def key(self, item: Item) -> str:
        setting, kind, number = item
        changes = self.settings[setting].changes
        if kind == "text":
            return key_of(kind, changes, self.buckets, self.text[number].tolist())
        if kind == "held":
            return key_of(kind, changes, self.args.text_length)
        prompt = self.prompts[number]
        return key_of(kind, changes, self.args.passkey_new_tokens, prompt.token_ids, prompt.num_asked)

    def alike(self, item: Item) -> Any:
        setting, kind, number = item
        return setting, kind, self.prompts[number].length if kind == "passkey" else None

    def compute(self, subject: Subject, batch: list[Item]) -> list[Record]:
        model, numbers = self._variant(subject, batch[0][0]), [number for _, _, number in batch]
        if batch[0][1] == "held":
            return [self._held(model)]
        if batch[0][1] == "text":
            scored = answer.perplexity.score_by_forward(model, self.on_device(numbers), self.buckets)
            sums = [nll.double().sum(1).tolist() for nll in scored]
            return [{"nll": sum(of_row)} for of_row in zip(*sums, strict=True)]
        prompts = [self.prompts[number] for number in numbers]
        cache = pod.make_cache(model, model.config.own_method)
        return answer.reading.answers(model, self.run.tokenizer, cache, prompts, self.args.passkey_new_tokens)

    def _variant(self, subject: Subject, number: int) -> Any:
        """The model under a setting; the last one is kept, and weights are shared between all."""
        own, changes = subject.model, self.settings[number].changes
        if self._last[0] != (subject.method.model, number):
            found = answer.variants.variant(own, **changes) if changes else own
            self._last = (subject.method.model, number), found
        return self._last[1]

    def _held(self, model: Any) -> Record:
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

    def payload(self, subject: Subject, records: dict[Item, Record]) -> Record:
        found = [
            {
                kind: [record for (s, k, _), record in records.items() if (s, k) == (number, kind)]
                for kind in ("text", "passkey", "held")
            }
            for number in range(len(self.settings))
        ]
        nll = [[record["nll"] for record in of["text"]] for of in found]
        said = [[_judged(*pair) for pair in zip(self.prompts, of["passkey"], strict=True)] for of in found]
        names, base = [setting.name for setting in self.settings], nll[1]
        rows = [
            {
                "setting": name,
                **of["held"][0],
                **self.row(sums, base, self.scored, [r["correct"] for r in answers]),
            }
            for name, of, sums, answers in zip(names, found, nll, said, strict=True)
        ]
        by_text = [dict(zip(names, sums, strict=True)) for sums in zip(*nll, strict=True)]
        windows = list(self.run.models.windows(subject.method.model))
        return self.table(
            rows,
            [{"score": sums[OWN], "tokens": self.scored, "by_setting": sums} for sums in by_text],
            subject.stated(self.spans()[0], [rows[0]["bytes"]]),
            settings={"own_windows": windows, "trained_per_setting": False},
            passkeys=dict(zip(names, said, strict=True)),
            curves=_curves(rows, bool(self.prompts)),
        )


def _judged(prompt: passkey.Prompt, record: Record) -> Record:
    """What was said to a prompt, with whether it is right."""
    return {"id": prompt.id, **record, "correct": passkey.is_correct(record["answer"], prompt.key)}


def _plan_names(paths: list[str]) -> dict[str, str]:
    """File names where they tell plans apart, else paths."""
    names = {path: Path(path).stem for path in paths}
    return names if len(set(names.values())) == len(paths) else {path: path for path in paths}


def _curves(rows: list[Record], with_passkeys: bool) -> list[Record]:
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
