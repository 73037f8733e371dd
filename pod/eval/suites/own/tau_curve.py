"""Score and skipped share by the gate threshold tau (PoD Figure 7): what decoding saves by leaving out distant tokens, and what it costs.

A sequence is read once, up to one token before the first scored one. Copies of its cache then go on token by token, one without a threshold
and one for every tau, so that the curves differ by tau alone. Skipping is an affair of decoding: prompts are read exactly.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import pod
from pod.eval import answer
from pod.eval.answer.budget import Span, Subject
from pod.eval.answer.methods import Method
from pod.eval.answer.store import Shelf, in_batches, key_of
from pod.eval.judge.intervals import share
from pod.eval.judge.verdicts import perplexity_change, perplexity_of
from pod.eval.suites.base import at_least_one, curve, prompt_hash, scored_payload
from pod.eval.suites.own import passkey
from pod.eval.suites.text import Record, TextTask

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


Item = tuple[str, int]
"""What is asked: `text` or `passkey`, and its number."""


class TauCurve(TextTask):
    """Perplexity, and on request passkeys, by tau, with the share of query heads that skip and of the attention that is saved.

    Texts are the first `options.sequences` of the task perplexity, prompts those of passkey.
    """

    name = "tau_curve"
    title = "τ curve"
    Options = TauOptions

    def __init__(self, run: Any, options: TauOptions):
        args, most = run.args, run.args.text_sequences
        wanted = most if options.sequences is None else options.sequences
        if options.scored_tokens > args.text_length - 2:
            raise ValueError(
                f"eval.task_options.tau_curve.scored_tokens = {options.scored_tokens} leaves no context in "
                f"eval.text_length = {args.text_length}: score fewer tokens"
            )
        if not 1 <= wanted <= most:
            raise ValueError(
                f"eval.task_options.tau_curve.sequences = {wanted} must be from 1 to eval.text_sequences = {most}"
            )
        super().__init__(run, options)
        self.text = self.text[:wanted]
        self.prompts = passkey.prompts_of(run) if options.passkeys else []

    def spans(self) -> list[Span]:
        return [Span(self.args.text_length - 1, self.options.scored_tokens)]

    def longest(self) -> int:
        prompts = (len(prompt.token_ids) + self.args.passkey_new_tokens for prompt in self.prompts)
        return max(self.args.text_length, *prompts, 0)

    def refuses(self, method: Method) -> str | None:
        if method.spec != "pod":
            return "tau is the threshold of PoD's gate: measured for pod and pod-unadapted"
        window = sum(self.run.models.windows(method.model))
        if self.args.text_length <= window:
            return (
                f"texts of {self.args.text_length} tokens have no distant token beyond a window of {window}: "
                "raise eval.text_length"
            )
        return None

    def token_counts(self, method: Method) -> tuple[int, int]:
        """(prompt tokens, decode steps) for `--dry-run`."""
        if self.refuses(method):
            return 0, 0
        batches = -(-len(self.text) // self.args.batch_size)
        steps = batches * self.options.scored_tokens + len(self.prompts) * self.args.passkey_new_tokens
        prompt = len(self.text) * self.args.text_length + sum(len(p.token_ids) for p in self.prompts)
        return prompt, len(self.options.settings) * steps

    def measure(self, subject: Subject, shelf: Shelf) -> Record:
        items: list[Item] = [("text", number) for number in range(len(self.text))]
        items += [("passkey", number) for number in range(len(self.prompts))]
        records = shelf.answers(
            items,
            key=self._key,
            # prompts run alone
            batches=lambda left: in_batches(
                left, self.args.batch_size, lambda i: i if i[0] == "passkey" else None
            ),
            compute=lambda batch: self._compute(subject, batch),
        )
        return self._payload(subject, records[: len(self.text)], records[len(self.text) :])

    def _key(self, item: Item) -> str:
        options, (kind, number) = self.options, item
        if kind == "text":
            ids = self.text[number].tolist()
            return key_of("nll by tau", options.settings, options.scored_tokens, ids)
        ids, new_tokens = self.prompts[number].token_ids, self.args.passkey_new_tokens
        return key_of("greedy by tau", options.settings, new_tokens, ids)

    def _compute(self, subject: Subject, batch: list[Item]) -> list[Record]:
        numbers = [number for _, number in batch]
        if batch[0][0] == "text":
            return self._score(subject, numbers)
        return [self._answer(subject, number) for number in numbers]

    def _cache(self, subject: Subject) -> Any:
        """A new cache that decodes layer by layer, where gates can be counted."""
        kept = {key: value for key, value in subject.options.items() if key not in ("tau", "capacity")}
        return pod.make_cache(subject.model, subject.method.spec, **kept)

    def _score(self, subject: Subject, numbers: list[int]) -> list[Record]:
        """A record per text: NLL (nats) and gate counts by threshold."""
        settings, first = self.options.settings, self.args.text_length - self.options.scored_tokens
        rows, names = self.on_device(numbers), list(map(label, settings))
        found = answer.gates.nll_by_tau(subject.model, self._cache(subject), rows, first, settings)
        sums, counts, held = zip(*found, strict=True)
        of_rows = zip(zip(*sums, strict=True), zip(*counts, strict=True), strict=True)
        return [
            {
                "nll": dict(zip(names, nll, strict=True)),
                "counts": dict(zip(names, count, strict=True)),
                "bytes": held[-1] // len(numbers),
            }
            for nll, count in of_rows
        ]

    def _answer(self, subject: Subject, number: int) -> Record:
        """A record of one passkey prompt: the greedy answer by threshold."""
        settings, new_tokens = self.options.settings, self.args.passkey_new_tokens
        ids = self.text.new_tensor([self.prompts[number].token_ids]).to(self.run.models.device)
        said = answer.gates.greedy_by_tau(subject.model, self._cache(subject), ids, new_tokens, settings)
        texts = [self.run.tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        return {"answers": dict(zip(map(label, settings), texts, strict=True))}

    def _payload(self, subject: Subject, texts: list[Record], said: list[Record]) -> Record:
        """The table of all thresholds; samples are those of one, by text."""
        options, tau = self.options, label(self.options.tau)
        answers = [_judged(*pair) for pair in zip(self.prompts, said, strict=True)]
        rows = [self._row(tau, texts, answers) for tau in options.settings]
        samples = (
            {
                "score": record["nll"][tau],
                "tokens": options.scored_tokens,
                "by_tau": record["nll"],
                "counts": record["counts"],
            }
            for record in texts
        )
        return scored_payload(
            "nll",
            "perplexity",
            self.samples(samples),
            bytes_rows=[subject.stated(self.spans()[0], [record["bytes"] for record in texts])],
            settings={**asdict(options), "length": self.args.text_length},
            columns={key: head for key, head in COLUMNS.items() if self.prompts or key != "passkey"},
            rows=rows,
            passkeys=answers,
            curves=_curves(rows),
        )

    def _row(self, tau: float | None, texts: list[Record], answers: list[Record]) -> Record:
        """One threshold: perplexity, its change against the exact attention (paired), shares, passkeys that were found."""
        sums, exact = ([record["nll"][key] for record in texts] for key in (label(tau), EXACT))
        counts, gates = [self.options.scored_tokens] * len(sums), answer.gates
        own, change = perplexity_of(sums, counts), perplexity_change(sums, exact, counts)
        row = {"setting": label(tau), "tau": tau, "perplexity": own["perplexity"], "ci95": own["ci95"]}
        row |= {"change": change.value, "change_ci95": change.interval}
        if answers:
            right = [float(record["correct"][label(tau)]) for record in answers]
            found = share(right)
            row |= {"passkey": found.value, "passkey_ci95": found.interval}
        return row | gates.shares(gates.total([record["counts"][label(tau)] for record in texts]))


def _judged(prompt: passkey.Prompt, record: Record) -> Record:
    """What was said to a prompt, with whether it is right."""
    right = {tau: passkey.is_correct(text, prompt.key) for tau, text in record["answers"].items()}
    judged = {"id": prompt.id, "target": prompt.key, "prompt_hash": prompt_hash(prompt.text)}
    return {**judged, **record, "correct": right}


def label(tau: float | None) -> str:
    """A threshold as a key."""
    return EXACT if tau is None else str(tau)


def _curves(rows: list[Record]) -> list[Record]:
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
