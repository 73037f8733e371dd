"""Tasks that hold settings of one model against each other, on the same texts and passkeys (PoD Figures 3 and 7)."""

from typing import Any

from pod.eval.judge.intervals import wilson
from pod.eval.judge.verdicts import perplexity_change, perplexity_of
from pod.eval.suites.base import Task
from pod.eval.suites.own import passkey
from pod.eval.suites.text import load_text


class SettingsTask(Task):
    """Texts of the task perplexity, the first `options.sequences`, and if `options.passkeys` the prompts of passkey."""

    def __init__(self, run: Any, options: Any):
        super().__init__(run, options)
        most = self.args.text_sequences
        wanted = most if options.sequences is None else options.sequences
        if not 1 <= wanted <= most:
            raise ValueError(
                f"eval.task_options.{self.name}.sequences = {wanted} must be from 1 to eval.text_sequences = {most}"
            )
        self.text = load_text(run.recipe, run.tokenizer)[:wanted]
        self.prompts = passkey.prompts_of(run) if options.passkeys else []

    def longest(self) -> int:
        prompts = (len(prompt.token_ids) + self.args.passkey_new_tokens for prompt in self.prompts)
        return max(self.args.text_length, *prompts, 0)

    def columns(self, heads: dict[str, str]) -> dict[str, str]:
        """Heads of the table of settings."""
        return {key: head for key, head in heads.items() if self.prompts or key != "passkey"}

    def row(self, sums: list[float], base: list[float], tokens: int, correct: list[bool]) -> dict[str, Any]:
        """A setting's perplexity and its change against another (summed NLL of each text, paired), and the passkeys that it found."""
        counts = [tokens] * len(sums)
        own, change = perplexity_of(sums, counts), perplexity_change(sums, base, counts)
        row = {"perplexity": own["perplexity"], "ci95": own["ci95"]}
        row |= {"change": change.value, "change_ci95": change.interval}
        if correct:
            right = sum(correct)
            row |= {"passkey": right / len(correct), "passkey_ci95": list(wilson(right, len(correct)))}
        return row


def curve(
    rows: list[dict[str, Any]], x: str, y: str, interval: str | None = None, **more: Any
) -> dict[str, Any]:
    """A curve of a payload: keys of rows; interval: of the band around it, drawn where every row has one; more: titles, reference …"""
    ends = [row[interval] for row in rows if interval and row[interval]]
    known = len(ends) == len(rows)
    return {
        "x": [row[x] for row in rows],
        "y": [row[y] for row in rows],
        "low": [end[0] for end in ends] if known else None,
        "high": [end[1] for end in ends] if known else None,
        "labels": None,
        **more,
    }
