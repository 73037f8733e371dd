"""The task `efficiency`: speeds, bytes, peak memory and largest batches of all methods.

`pod.eval.speed` measures them. Its numbers can be compared only within one run, where one process measures
all methods in turns.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.results import code_identity, fingerprint
from pod.eval.speed.args import SpeedOptions
from pod.eval.suites.task_base import SideBySideTask
from pod.measure.machine import environment

if TYPE_CHECKING:
    from pod.recipe import Recipe


class Efficiency(SideBySideTask):
    """Time to the first token, decode speed, bytes and memory at the lengths of `eval.efficiency_lengths`."""

    name = "efficiency"
    title = "speed"
    about = "decode speed, time to first token, memory and largest batch of the methods, side by side."
    length_setting = "eval.efficiency_lengths"
    Options = SpeedOptions
    options: SpeedOptions

    def __init__(self, recipe: "Recipe", options: SpeedOptions):
        super().__init__(recipe, options)
        options.check_limit(self.args.device)

    @property
    def _decoded(self) -> int:
        """Tokens that are decoded behind each prompt. One round is a warm-up."""
        return self.args.efficiency_tokens * (self.args.efficiency_repeats + 1)

    def spans(self) -> list[CacheSpan]:
        """See `Task.spans`. Caches that are filled with random tokens are left out: they have no budget."""
        spans = [CacheSpan(length, 0) for length in self.args.efficiency_lengths]
        for prompt, generated in self.options.max_batch:
            spans.append(CacheSpan(prompt + generated - 1, generated - 1))  # the last new token is never fed
        return spans

    def longest(self) -> int:
        batches = [span.length for span in self.spans()]
        raced = [*self.args.efficiency_lengths, *self.options.decode_lengths]
        return max(*batches, *[length + self._decoded for length in raced])

    def load_tokens(self) -> int:
        """See `Task.load_tokens`. How much more fits, in batches and filled caches, is what is measured."""
        return max(self.args.efficiency_lengths) + self._decoded

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        """See `Task.token_counts`.

        How many batches and prompts a search tries is not known before. Of each search, the tries that it
        makes in any case are counted: one and two rows, of which two are then timed; and one step of the
        longest prompt.
        """
        from pod.eval.speed.side_by_side import MEMORY_STEPS  # this loads torch
        from pod.measure.speed_comparison import WARM_UP_TOKENS

        options = self.options
        prompt, steps = 0, 0
        for length in self.args.efficiency_lengths:
            readings = options.prefill_repeats
            if options.memory:
                readings += 1
                steps += MEMORY_STEPS
            prompt += readings * length + min(length, WARM_UP_TOKENS)
            steps += self._decoded
        if not method.takes_budget:
            prompt += len(options.decode_lengths)  # one token is read into each cache that is filled
            steps += self._decoded * len(options.decode_lengths)
        tries = [1, 2, 2] if options.max_batch_rows > 1 else [1, 1]
        for tokens, generated in options.max_batch:
            prompt += sum(tries) * tokens
            steps += len(tries) * (generated - 1)
        prompt += options.longest_prompt
        return prompt, steps

    def searches(self) -> list[str]:
        asked = {"max_batch": self.options.max_batch, "longest_prompt": self.options.longest_prompt}
        return [f"eval.task_options.{self.name}.{option}" for option, value in asked.items() if value]

    def asked(self, layout: Any) -> str:
        args = self.args
        lengths = [args.efficiency_lengths, args.efficiency_tokens, args.efficiency_repeats]
        asked = [*lengths, asdict(self.options), args.device]
        code = code_identity("eval/speed/*.py", "measure/*.py")
        hardware = environment()["hardware"]
        return fingerprint([asked, self.recipe.seed, layout, code, hardware])

    def measure(
        self, layout: Any, method_runners: Mapping[str, MethodRunner], log: Callable[[str], None]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Exception]]:
        from pod.eval.speed.side_by_side import SpeedRun, measure_speed  # this loads torch

        return measure_speed(SpeedRun(self.recipe, self.options, self.asked(layout), method_runners, log))

    def headline(self, parts: Mapping[str, dict[str, Any]]) -> str:
        """Tokens per second of every method at the last length."""
        last = {name: part["lengths"][-1] for name, part in parts.items() if part["lengths"]}
        rates = [
            f"{name} {row['decode_tokens_per_second']['median']:.1f} at {row['length']}"
            for name, row in last.items()
        ]
        return f"tokens/s: {', '.join(rates)}" if rates else "no method could be timed"
