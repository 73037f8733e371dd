"""Rank layouts that the parallel tests compare with one process.

They are all of them, or a few that hold every pair of choices.
"""

import itertools
import os

CHOICES = {
    "sp": (1, 2, 3, 4),
    "dp": (1, 2),
    "accumulation": (1, 3),
    "zero": (1, 2, 3),
    "data": ("packed", "plain", "masked"),
    "checkpointing": (True, False),
    "method": ("full", "lora", "distilled"),
    "sinks": ("tokens", "constant"),
}


HARDEST = {
    "sp": 2,
    "dp": 1,
    "accumulation": 3,
    "zero": 3,
    "data": "masked",
    "checkpointing": True,
    "method": "distilled",
    "sinks": "constant",
}
"""A case that pairs alone need not hold: a teacher under ZeRO-3, and layers that are computed again."""


def pairs(case: dict) -> set:
    """Every two choices that a case makes together."""
    return set(itertools.combinations(case.items(), 2))


def all_cases() -> list[dict]:
    """Every combination of CHOICES."""
    return [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def covering_cases() -> list[dict]:
    """Few cases that hold every pair; each next one holds most new pairs, on the fewest ranks."""
    left, cases = set().union(*map(pairs, all_cases())) - pairs(HARDEST), [HARDEST]
    while left:
        best = max(all_cases(), key=lambda case: (len(pairs(case) & left), -case["sp"] * case["dp"]))
        cases.append(best)
        left -= pairs(best)
    return cases


def chosen_cases() -> list[dict]:
    """The covering cases; with POD_ALL_LAYOUTS=1 all, and of these the ones that POD_LAYOUTS names.

    POD_LAYOUTS="zero=1|3 data=packed|plain method=full" keeps the cases that have one of the values of each
    choice.
    """
    if os.environ.get("POD_ALL_LAYOUTS") != "1":
        return covering_cases()
    wanted = [word.split("=") for word in os.environ.get("POD_LAYOUTS", "").split()]
    return [
        case for case in all_cases() if all(str(case[name]) in values.split("|") for name, values in wanted)
    ]


def name_of(case: dict) -> str:
    """For example sp2_dp1_acc3_zero3_packed_checkpointing_lora_constant."""
    kept = "checkpointing" if case["checkpointing"] else "store"
    sizes = f"sp{case['sp']}_dp{case['dp']}_acc{case['accumulation']}_zero{case['zero']}"
    return f"{sizes}_{case['data']}_{kept}_{case['method']}_{case['sinks']}"


def settings_of(case: dict) -> dict:
    """Settings of the recipe."""
    return {
        "sequence_parallel_size": case["sp"],
        "gradient_accumulation_steps": case["accumulation"],
        "zero_stage": case["zero"],
        "gradient_checkpointing": "full" if case["checkpointing"] else "none",
        "method": "full" if case["method"] == "full" else "lora",
        "distill": 0.7 if case["method"] == "distilled" else 0.0,
        "distill_attention": 3.0 if case["method"] == "distilled" else 0.0,
        "lora_rank": 8,
    }
