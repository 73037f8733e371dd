"""Score and skipped share by the gate threshold tau (PoD Figure 7): what decoding saves by leaving out distant tokens, and what it costs.

A sequence is read once, up to one token before the first scored one. Copies of its cache then go on token by token, one without a threshold
and one for every tau, so that the curves differ by tau alone. Skipping is an affair of decoding: prompts are read exactly.
"""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pod
from pod.eval import answer
from pod.eval.answer.store import in_batches, key_of
from pod.eval.suites.base import Span, at_least_one, perplexity_result, prompt_hash
from pod.eval.suites.own import passkey
from pod.eval.suites.settings import SettingsTask, curve
from pod.eval.suites.text import text_sample

if TYPE_CHECKING:
    from pod.eval.answer.methods import Method
    from pod.eval.answer.store import Shelf

EXACT = "exact"
COLUMNS = {
    "setting": "τ",
    "perplexity": "perplexity",
    "change": "change",
    "skipped": "query heads that skip",
    "skipped_groups": "KV heads whose distant values stay unread",
    "saved": "attention saved",
    "saved_over_dense": "attention saved, over dense",
    "passkey": "passkeys found",
}


@dataclass(kw_only=True)
class TauOptions:
    """`eval.task_options.tau_curve`. Texts are those of the task perplexity, prompts those of passkey."""

    taus: list[float] = field(default_factory=lambda: [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
    """thresholds of the gate, 0 (always skip) to 1; the exact attention is measured besides"""

    tau: float = 0.7
    """the threshold whose perplexity stands in tables, one of `taus`; 0.7 is the paper's"""

    sequences: int | None = None
    """texts, the first ones; null = eval.text_sequences"""

    scored_tokens: int = 64
    """tokens scored at the end of every text, fed one by one for every threshold"""

    passkeys: bool = False
    """answer the passkey prompts at every threshold, too"""

    def __post_init__(self) -> None:
        from pod.modeling.methods import methods

        for tau in self.taus:
            reason = methods()["pod"].parameters["tau"].refusal(tau)
            if reason is not None:
                raise ValueError(f"tau = {tau!r} {reason}")
        if not self.taus or len(set(self.taus)) < len(self.taus):
            raise ValueError(f"taus must be different numbers from 0 to 1, at least one, got {self.taus}")
        if self.tau not in self.taus:
            raise ValueError(f"tau is {self.tau}, allowed is one of taus: {', '.join(map(str, self.taus))}")
        at_least_one(self, "scored_tokens")
        self.taus = sorted(self.taus)

    @property
    def settings(self) -> list[float | None]:
        """Every threshold, None = exact, first."""
        return [None, *self.taus]


class TauCurve(SettingsTask):
    """Perplexity, and on request passkeys, by tau, with the share of query heads that skip and of the attention that is saved."""

    name = "tau_curve"
    title = "τ curve"
    Options = TauOptions

    def __init__(self, run: Any, options: TauOptions):
        if options.scored_tokens > run.args.text_length - 2:
            raise ValueError(
                f"eval.task_options.tau_curve.scored_tokens = {options.scored_tokens} leaves no context in "
                f"eval.text_length = {run.args.text_length}: score fewer tokens"
            )
        super().__init__(run, options)

    def spans(self) -> list[Span]:
        return [Span(self.args.text_length - 1, self.options.scored_tokens)]

    def refuses(self, method: "Method") -> str | None:
        if method.spec != "pod":
            return "tau is the threshold of PoD's gate: measured for pod and pod-unadapted"
        window = sum(self.run.models.windows(method.model))
        if self.args.text_length <= window:
            return (
                f"texts of {self.args.text_length} tokens have no distant token beyond a window of {window}: "
                "raise eval.text_length"
            )
        return None

    def token_counts(self, method: "Method") -> tuple[int, int]:
        """(prompt tokens, decode steps) for `--dry-run`."""
        if self.refuses(method):
            return 0, 0
        settings, prompts = len(self.options.settings), sum(len(prompt.token_ids) for prompt in self.prompts)
        batches = -(-len(self.text) // self.args.batch_size)
        steps = batches * self.options.scored_tokens + len(self.prompts) * self.args.passkey_new_tokens
        return len(self.text) * self.args.text_length + prompts, settings * steps

    def measure(self, method: "Method", shelf: "Shelf") -> dict[str, Any]:
        options, new_tokens = self.options, self.args.passkey_new_tokens
        texts = [("text", row) for row in range(len(self.text))]
        items = texts + [("passkey", number) for number in range(len(self.prompts))]

        def batches(left: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
            rows = [item for item in left if item[0] == "text"]
            return in_batches(rows, self.args.batch_size) + [[i] for i in left if i[0] == "passkey"]

        def compute(batch: list[tuple[str, int]]) -> list[dict[str, Any]]:
            numbers = [number for _, number in batch]
            if batch[0][0] == "text":
                return self._score(method, numbers)
            return [self._answer(method, number) for number in numbers]

        def key(item: tuple[str, int]) -> str:
            if item[0] == "text":
                return key_of(
                    "nll by tau", options.settings, options.scored_tokens, self.text[item[1]].tolist()
                )
            return key_of("greedy by tau", options.settings, new_tokens, self.prompts[item[1]].token_ids)

        records = shelf.answers(items, key, batches, compute)
        said = zip(self.prompts, records[len(texts) :], strict=True)
        return self._payload(records[: len(texts)], [_judged(prompt, record) for prompt, record in said])

    def _cache(self, method: "Method") -> Any:
        """A new cache that decodes layer by layer, where gates can be counted."""
        options = self.args.method_options.get(method.name, {})
        kept = {name: value for name, value in options.items() if name not in ("tau", "capacity")}
        return pod.make_cache(self.run.models.get(method.model), method.spec, **kept)

    def _score(self, method: "Method", numbers: list[int]) -> list[dict[str, Any]]:
        """A record per text: NLL (nats) and gate counts by threshold."""
        model, settings = self.run.models.get(method.model), self.options.settings
        rows = self.text[numbers].to(next(model.parameters()).device)
        first = rows.shape[1] - self.options.scored_tokens
        found = answer.gates.nll_by_tau(model, self._cache(method), rows, first, settings)
        return [
            {
                "nll": {label(tau): sums[row] for tau, (sums, _, _) in zip(settings, found, strict=True)},
                "counts": {
                    label(tau): counts[row] for tau, (_, counts, _) in zip(settings, found, strict=True)
                },
                "bytes": found[-1][2] // len(numbers),
            }
            for row in range(len(numbers))
        ]

    def _answer(self, method: "Method", number: int) -> dict[str, Any]:
        """A record of one passkey prompt: the greedy answer by threshold."""
        model, settings = self.run.models.get(method.model), self.options.settings
        ids = self.text.new_tensor([self.prompts[number].token_ids]).to(next(model.parameters()).device)
        new_tokens = self.args.passkey_new_tokens
        said = answer.gates.greedy_by_tau(model, self._cache(method), ids, new_tokens, settings)
        texts = [self.run.tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        return {"answers": dict(zip(map(label, settings), texts, strict=True))}

    def _payload(self, texts: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
        options, scored = self.options, self.options.scored_tokens
        rows = [self._row(tau, texts, answers) for tau in options.settings]
        chosen = rows[options.settings.index(options.tau)]
        return {
            **perplexity_result(chosen["perplexity"], chosen["ci95"]),
            "samples": [
                text_sample(
                    number,
                    self.text[number].tolist(),
                    score=record["nll"][label(options.tau)],
                    tokens=scored,
                    by_tau=record["nll"],
                    counts=record["counts"],
                )
                for number, record in enumerate(texts)
            ],
            "bytes": [self.run.stated_bytes(self.args.text_length - 1, None, [r["bytes"] for r in texts])],
            "settings": {**asdict(options), "length": self.args.text_length},
            "passkeys": answers,
            "columns": self.columns(COLUMNS),
            "rows": rows,
            "curves": _curves(rows),
        }

    def _row(
        self, tau: float | None, texts: list[dict[str, Any]], answers: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """One threshold: perplexity, its change against the exact attention, shares, passkeys."""
        sums, exact = ([record["nll"][key] for record in texts] for key in (label(tau), EXACT))
        correct = [record["correct"][label(tau)] for record in answers]
        gates = answer.gates
        shares = gates.shares(gates.total([record["counts"][label(tau)] for record in texts]))
        row = self.row(sums, exact, self.options.scored_tokens, correct)
        return {"setting": label(tau), "tau": tau, **row, **shares}


def _judged(prompt: passkey.Prompt, record: dict[str, Any]) -> dict[str, Any]:
    """What was said to a prompt, with whether it is right."""
    right = {tau: passkey.is_correct(text, prompt.key) for tau, text in record["answers"].items()}
    judged = {"id": prompt.id, "target": prompt.key, "prompt_hash": prompt_hash(prompt.text)}
    return {**judged, **record, "correct": right}


def label(tau: float | None) -> str:
    """A threshold as a key."""
    return EXACT if tau is None else str(tau)


def _curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both lines of Figure 7, and passkeys."""
    exact, measured = rows[0], rows[1:]
    wanted = [
        ("Attention saved by τ", "saved", None, 0.0),
        ("Change of perplexity by τ", "change", "change_ci95", 0.0),
    ]
    if "passkey" in exact:
        wanted.append(("Passkeys by τ", "passkey", "passkey_ci95", exact["passkey"]))
    return [
        curve(
            measured,
            "tau",
            key,
            interval,
            title=title,
            x_label="gate threshold τ",
            y_label=COLUMNS[key],
            reference=reference,
        )
        for title, key, interval, reference in wanted
        if all(row[key] is not None for row in measured)  # nothing is saved where no head follows
    ]
