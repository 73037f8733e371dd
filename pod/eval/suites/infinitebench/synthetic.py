"""The tasks of InfiniteBench that are built at a length, in the official row format {context, input, answer}.

Source of the rules: github.com/OpenBMB/InfiniteBench (MIT), commit 88b3daa,
data/construct_synthetic_dataset.py.

The code is written anew and seeded. The *size* of a sample is its number of lines of noise, pairs, numbers or
functions. It follows from a length in tokens of the model's tokenizer; officially it is a fixed number.
"""

import random
import statistics
import uuid
from typing import Any

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
_DIGITS = "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n"
_DEPTHS = 59  # official: every 90th of 5,220 lines of noise, both ends included
_DEPTH_STEP = 37  # coprime to 59 and near 59 × the golden ratio: any first samples are spread over the depths
_HIGHEST = 99
_RANKS = ("", "second ", "third ")
_TARGETS = (*(f"{rank}{end} number" for end in ("largest", "smallest") for rank in _RANKS), "median number")
_LEVELS = (2, 4, 6, 8, 10)  # calls from the first function to the last one
_LARGEST_FUNCTION, _PER_SIZE = 1100, 2  # names are func_1 … func_1100 for 550 functions
_MODULE = "\nHere is the content of functions_module.py:\n\n"

SMALLEST = {"passkey": 1, "number_string": 1, "kv_retrieval": 2, "math_find": 8, "code_run": 10}


def row(task: str, rng: random.Random, index: int, size: int) -> dict[str, Any]:
    """The sample `index` of a task at a size; equal arguments give equal samples."""
    return _MAKERS[task](rng, index, size)


def depth(index: int) -> float:
    """The depth of the key in the sample `index` of passkey and number_string, 0 (start) to 1 (end)."""
    return index * _DEPTH_STEP % _DEPTHS / (_DEPTHS - 1)


def _passkey(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    key = "".join(str(rng.randint(0, 9)) for _ in range(5))
    return _hidden(_PASSKEY, key, "What is the pass key?", index, size)


def _number_string(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    digits = [str(rng.randint(0, 9)) for _ in range(5)]
    for doubled in range(5):  # five digits, five of them repeated in place
        place = rng.randint(0, 4 + doubled)
        digits.insert(place, digits[place])
    return _hidden(_DIGITS, "".join(digits), "What is the sequence of digits?", index, size)


def _hidden(sentence: str, key: str, question: str, index: int, size: int) -> dict[str, Any]:
    before = round(depth(index) * size)
    context = _NOISE * before + sentence.format(key=key) + _NOISE * (size - before)
    return {"context": context, "input": question, "answer": key}


def _kv_retrieval(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    pairs = [(_uuid(rng), _uuid(rng)) for _ in range(size)]
    # officially, too, the pair that is asked for moves from start to end over 500 samples
    place = min(size - 1, index * size // 500)
    key, value = pairs[place]
    inside = ", ".join(f'"{name}": "{content}"' for name, content in pairs)
    question = f'\nKey: "{key}"\nThe value associated with the specified key is: '
    return {"context": f"JSON data:\n{{{inside}}}", "input": question, "answer": value}


def _math_find(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    target = _TARGETS[index % len(_TARGETS)]
    low, high = 0, _HIGHEST
    smallest = "smallest" in target or ("median" in target and rng.random() > 0.5)
    if smallest:
        low = rng.randint(0, int(_HIGHEST * 0.2))
    else:
        high = rng.randint(int(_HIGHEST * 0.8), _HIGHEST)
    numbers = [rng.randint(low, high) for _ in range(size)]
    question = f"You should answer with only one number, no other words. The {target} of the list is: "
    return {"context": str(numbers), "input": question, "answer": _found(target, numbers)}


def _found(target: str, numbers: list[int]) -> int | float:
    """The answer for a list: its median, or the number of a rank. Equal numbers have one rank."""
    if "median" in target:
        return statistics.median(numbers)
    if "second" in target:
        place = 1
    elif "third" in target:
        place = 2
    else:
        place = 0
    different = sorted(set(numbers), reverse="largest" in target)
    return different[min(place, len(different) - 1)]


def _code_run(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    levels = _LEVELS[index % len(_LEVELS)]
    width = max(1, size // levels)
    names = rng.sample(range(1, max(_LARGEST_FUNCTION, _PER_SIZE * size) + 1), width * levels)
    layers = [names[start : start + width] for start in range(0, len(names), width)]
    calls: dict[int, tuple[int | None, int]] = {}
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        for name in layer:
            called = rng.choice(following) if following else None
            calls[name] = called, rng.randint(-12, 17)
    first = rng.choice(layers[0])
    argument = rng.randint(-10, 10)
    value, name = argument, first
    while name is not None:
        name, added = calls[name]
        value += added
    question = (
        f"Please give me the exact number of the return value of func_{first}({argument}). "
        "Your response should end with the sentence 'The return value is:'."
    )
    body = "".join(_function(name, *calls[name]) for name in sorted(calls))
    return {"context": _MODULE + body, "input": question, "answer": value}


def _function(name: int, called: int | None, added: int) -> str:
    """The text of a function that calls another one, if there is one, and adds a number."""
    value = "x" if called is None else f"func_{called}(x)"
    if added > 0:
        value += f" + {added}"
    elif added < 0:
        value += f" - {-added}"
    return f"def func_{name}(x):\n    return {value}\n\n"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_MAKERS = {
    "passkey": _passkey,
    "number_string": _number_string,
    "kv_retrieval": _kv_retrieval,
    "math_find": _math_find,
    "code_run": _code_run,
}
