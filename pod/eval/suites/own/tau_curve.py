"""Score and skipped share by the gate threshold tau (PoD Figure 7): what decoding saves by leaving out distant tokens, and what it costs.

A sequence is read once, up to one token before the first scored one. Copies of its cache then go on token by token, one without a threshold
and one for every tau, so that the curves differ by tau alone. Skipping is an affair of decoding: prompts are read exactly.
"""

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import pod
from pod.eval.answer import gates
from pod.eval.answer.methods import Method
from pod.eval.answer.perplexity import token_nll
from pod.eval.answer.store import Shelf, key_of
from pod.eval.answer.variants import windows_of
from pod.eval.judge.intervals import wilson
from pod.eval.judge.verdicts import perplexity_change, perplexity_of
from pod.eval.suites.base import Span, Task, in_batches, perplexity_result, prompt_hash
from pod.eval.suites.own import passkey
from pod.eval.suites.text import load_text
from pod.modeling.methods.layouts import check_tau

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
        for tau in self.taus:
            check_tau(tau)
        if not self.taus or len(set(self.taus)) < len(self.taus):
            raise ValueError(f"taus must be different numbers from 0 to 1, at least one, got {self.taus}")
        if self.tau not in self.taus:
            raise ValueError(f"tau is {self.tau}, allowed is one of taus: {', '.join(map(str, self.taus))}")
        if self.scored_tokens < 1:
            raise ValueError(f"scored_tokens is {self.scored_tokens}, allowed are 1 and more")
        self.taus = sorted(self.taus)

    @property
    def settings(self) -> list[float | None]:
        """Every threshold, None = exact, first."""
        return [None, *self.taus]


class TauCurve(Task):
    """Perplexity, and on request passkeys, by tau, with the share of query heads that skip and of the attention that is saved."""

    name = "tau_curve"
    title = "τ curve"
    Options = TauOptions

    def __init__(self, run: Any, options: TauOptions):
        super().__init__(run, options)
        args = self.args
        if options.scored_tokens > args.text_length - 2:
            raise ValueError(
                f"eval.task_options.tau_curve.scored_tokens = {options.scored_tokens} leaves no context in "
                f"eval.text_length = {args.text_length}: score fewer tokens"
            )
        wanted = args.text_sequences if options.sequences is None else options.sequences
        if not 1 <= wanted <= args.text_sequences:
            raise ValueError(
                f"eval.task_options.tau_curve.sequences = {wanted} must be from 1 to eval.text_sequences = {args.text_sequences}"
            )
        self.text = load_text(run.recipe, run.tokenizer)[:wanted]
        self.prompts = []
        if options.passkeys:
            self.prompts = passkey.make_prompts(
                run.tokenizer,
                args.passkey_lengths,
                args.passkey_depths,
                args.passkey_samples,
                run.recipe.seed,
                args.passkey_chat_template,
                args.question_aware,
            )

    def spans(self) -> list[Span]:
        return [Span(self.args.text_length - 1, self.options.scored_tokens)]

    def longest(self) -> int:
        prompts = (len(prompt.token_ids) + self.args.passkey_new_tokens for prompt in self.prompts)
        return max(self.args.text_length, *prompts, 0)

    def refuses(self, method: Method) -> str | None:
        if method.spec != "pod":
            return "tau is the threshold of PoD's gate: measured for pod and pod-unadapted"
        window = sum(windows_of(self.run, method.model))
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
        settings, prompts = len(self.options.settings), sum(len(prompt.token_ids) for prompt in self.prompts)
        batches = -(-len(self.text) // self.args.batch_size)
        steps = batches * self.options.scored_tokens + len(self.prompts) * self.args.passkey_new_tokens
        return len(self.text) * self.args.text_length + prompts, settings * steps

    def measure(self, method: Method, shelf: Shelf) -> dict[str, Any]:
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
        found = [{"id": str(number), **record} for number, record in enumerate(records[: len(texts)])]
        said = zip(self.prompts, records[len(texts) :], strict=True)
        return self._payload(found, [_judged(prompt, record) for prompt, record in said])

    def _cache(self, method: Method) -> Any:
        """A new cache that decodes layer by layer, where gates can be counted."""
        options = self.args.method_options.get(method.name, {})
        kept = {name: value for name, value in options.items() if name not in ("tau", "capacity")}
        return pod.make_cache(self.run.models.get(method.model), method.spec, **kept)

    @torch.no_grad()
    def _score(self, method: Method, numbers: list[int]) -> list[dict[str, Any]]:
        """A record per text: NLL (nats) and gate counts by threshold."""
        model = self.run.models.get(method.model)
        rows = self.text[numbers].to(next(model.parameters()).device)
        first = rows.shape[1] - self.options.scored_tokens
        prompt = self._cache(method)
        model.model(input_ids=rows[:, : first - 1], past_key_values=prompt, use_cache=True)
        records: list[dict[str, Any]] = [{"nll": {}, "counts": {}} for _ in numbers]
        for tau in self.options.settings:
            cache = copy.deepcopy(prompt)
            probe, key = gates.GateProbe(cache, tau), label(tau)
            nll = _decode_nll(model, cache, rows, first)
            for record, total, counts in zip(records, nll.double().sum(1).tolist(), probe.rows, strict=True):
                record["nll"][key], record["counts"][key] = total, counts.counts
                record["bytes"] = cache.nbytes // len(numbers)
        return records

    @torch.no_grad()
    def _answer(self, method: Method, number: int) -> dict[str, Any]:
        """A record of one passkey prompt: the greedy answer by threshold; already its first token is decoded."""
        model, prompt = self.run.models.get(method.model), self.prompts[number]
        ids = torch.tensor([prompt.token_ids], device=next(model.parameters()).device)
        read = self._cache(method)
        model.model(input_ids=ids[:, :-1], past_key_values=read, use_cache=True)
        record: dict[str, Any] = {"answers": {}}
        for tau in self.options.settings:
            cache, token, found = copy.deepcopy(read), ids[:, -1:], []
            gates.GateProbe(cache, tau)
            for _ in range(self.args.passkey_new_tokens):
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                token = output.logits[:, -1].argmax(-1, keepdim=True)
                found.append(int(token))
            record["answers"][label(tau)] = self.run.tokenizer.decode(found, skip_special_tokens=True)
        return record

    def _payload(self, texts: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
        options, scored = self.options, self.options.scored_tokens
        rows = [self._row(tau, texts, answers) for tau in options.settings]
        chosen = rows[options.settings.index(options.tau)]
        held = self.run.stated_bytes(self.args.text_length - 1, None, [record["bytes"] for record in texts])
        return {
            **perplexity_result(chosen["perplexity"], chosen["ci95"]),
            "samples": [
                {
                    "id": record["id"],
                    "score": record["nll"][label(options.tau)],
                    "tokens": scored,
                    "prompt_hash": prompt_hash(self.text[int(record["id"])].tolist()),
                    "prompt_tokens": self.args.text_length,
                    "by_tau": record["nll"],
                    "counts": record["counts"],
                }
                for record in texts
            ],
            "bytes": [held],
            "settings": {**asdict(options), "length": self.args.text_length},
            "passkeys": answers,
            "columns": COLUMNS if answers else {k: v for k, v in COLUMNS.items() if k != "passkey"},
            "rows": rows,
            "curves": _curves(rows),
        }

    def _row(
        self, tau: float | None, texts: list[dict[str, Any]], answers: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """One threshold: perplexity, its change against the exact attention (paired), shares, passkeys."""
        sums, exact = ([record["nll"][key] for record in texts] for key in (label(tau), EXACT))
        counts = [self.options.scored_tokens] * len(sums)
        found = perplexity_of(sums, counts)
        change = perplexity_change(sums, exact, counts)
        row = {
            "setting": label(tau),
            "tau": tau,
            "perplexity": found["perplexity"],
            "ci95": found["ci95"],
            "change": change.value,
            "change_ci95": change.interval,
            **gates.shares(gates.total([record["counts"][label(tau)] for record in texts])),
        }
        if answers:
            right = sum(record["correct"][label(tau)] for record in answers)
            row |= {
                "passkey": right / len(answers),
                "passkey_ci95": list(wilson(right, len(answers))),
            }
        return row


def _judged(prompt: passkey.Prompt, record: dict[str, Any]) -> dict[str, Any]:
    """What was said to a prompt, with whether it is right."""
    right = {tau: passkey.is_correct(text, prompt.key) for tau, text in record["answers"].items()}
    name = f"{prompt.length}/{prompt.depth}/{prompt.sample}"
    return {
        "id": name,
        "target": prompt.key,
        "prompt_hash": prompt_hash(prompt.text),
        **record,
        "correct": right,
    }


def label(tau: float | None) -> str:
    """A threshold as a key."""
    return EXACT if tau is None else str(tau)


def _decode_nll(model: Any, cache: Any, rows: Tensor, first: int) -> Tensor:
    """NLL [B, n - first] of the tokens from position `first`, through a cache that has seen all before `first - 1`, token by token."""
    parts = []
    for position in range(first - 1, rows.shape[1] - 1):
        fed = rows[:, position : position + 1]
        hidden = model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state
        parts.append(token_nll(model.lm_head, hidden, rows[:, position + 1 : position + 2]))
    return torch.cat(parts, dim=1)


def _curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both lines of Figure 7, and passkeys."""
    exact, measured = rows[0], rows[1:]
    x = [row["tau"] for row in measured]

    def curve(title: str, key: str, interval: str | None, reference: float | None) -> dict[str, Any]:
        ends = [row[interval] for row in measured if interval and row[interval]]
        known = len(ends) == len(measured)
        return {
            "title": title,
            "x_label": "gate threshold τ",
            "y_label": COLUMNS[key],
            "x": x,
            "y": [row[key] for row in measured],
            "low": [end[0] for end in ends] if known else None,
            "high": [end[1] for end in ends] if known else None,
            "labels": None,
            "reference": reference,
        }

    curves = [
        curve("Attention saved by τ", "saved", None, 0.0),
        curve("Change of perplexity by τ", "change", "change_ci95", 0.0),
    ]
    if "passkey" in exact:
        curves.append(curve("Passkeys by τ", "passkey", "passkey_ci95", exact["passkey"]))
    return [curve for curve in curves if None not in curve["y"]]  # nothing is saved where no head follows
