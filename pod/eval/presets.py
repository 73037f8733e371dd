"""`eval.preset`: the options that each paper gave the methods of its tables, as far as the paper prints them.

A preset sets no budgets: a budget is written behind a method's name, as in `snapkv@4096`. An option whose
value depends on the model (SimLayerKV's threshold) must be set in the recipe.

This file needs the standard library only.
"""

from collections.abc import Sequence
from typing import Any

from pod.eval.answer.methods import find_method, parts_of
from pod.notation import unknown

Options = dict[str, Any]

_SINKS_16 = {"num_sink_tokens": 16}
_SINKS_4 = {"num_sink_tokens": 4}
_IN_CHUNKS = {"chunk_size": 1024}

PRESETS: dict[str, dict[str, Options]] = {
    "pod": {
        "snapkv": {"window": 64},  # Appendix A.1
        "pyramidkv": {"window": 8, "kernel": 7, "pool": "max"},  # A.2
        "quest": {"page_size": 16},  # A.3
        "streamingllm": _SINKS_16,  # A.5: 16 + 4080
        "lm_infinite": _SINKS_16,
        "h2o": {"num_recent_tokens": 4000},  # A.6: 96 + 4000
    },
    "simlayerkv": {
        "streamingllm": _SINKS_4,  # section 6.1: the first four tokens and w recent ones
        "simlayerkv": {**_SINKS_4, "num_recent_tokens": 1024, "detector": "decode"},  # section 6.1
        "minicache": {"retained": 1024},  # section 6.1
        "snapkv": {"window": 768},  # Appendix A.3, with Table 6
    },
    "d2o": {"d2o": {"gate": 100.0, "alpha": 3.0, "beta": 0.5}},  # section 5.1: alpha 2 to 4, beta 0.5 to 0.9
    "razorattention": {
        "razor": {**_SINKS_4, "num_recent_tokens": 4000, "compression": 5.0, "compensation": True}  # Table 2
    },
    "duoattention": {  # its evaluation scripts; with `heads`, a file of gates, and `share`
        "razor": {"num_sink_tokens": 64, "num_recent_tokens": 256, "compression": 1e9, "compensation": False}
    },
    "imdc": {  # section 4.1, caption of Table 2
        "fm": _IN_CHUNKS,
        "im": {**_IN_CHUNKS, "function": "linear"},
        "imdc": {**_IN_CHUNKS, "function": "linear"},
    },
}


def with_preset(preset: str | None, methods: Sequence[str], own: dict[str, Options]) -> dict[str, Options]:
    """The options of each method, from three sources.

    Options that the recipe sets or that are written in a method's name override those of the preset. The
    recipe and the name may not give one option two values.

    Args:
        preset: a key of `PRESETS`; None = no preset.
        methods: names as in `eval.methods`.
        own: the recipe's `eval.method_options`.
    Returns: {method name: options}, without the methods that have no options.
    Raises:
        ValueError: for an unknown preset, naming the nearest, and for an option with two values.
    """
    if preset is not None and preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    found = {}
    for name in methods:
        said, named = own.get(name, {}), find_method(name).options
        for key, value in named.items():
            if key in said and said[key] != value:
                raise ValueError(
                    f"eval.method_options says {key} = {said[key]!r} of {name}: "
                    "leave it out there or in the name"
                )
        of_preset = {} if preset is None else _options(PRESETS[preset], name)
        found[name] = of_preset | said | named
    return {name: options for name, options in found.items() if options}


def _options(preset: dict[str, Options], method: str) -> Options:
    """The preset's options of all parts of a method.

    `pod+snapkv@4096` gets those of snapkv, `imdc(snapkv)@1024` those of imdc.
    """
    return {
        key: value for part in parts_of(find_method(method)) for key, value in preset.get(part, {}).items()
    }
