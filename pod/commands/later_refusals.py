"""What the commands after `pod data` would refuse, told early.

Rows that the model cannot read are refused before they are prepared, which can take hours. `pod data` prints
the other lines when the rows are done.
"""

from collections.abc import Iterator
from typing import Any

from pod.models import ModelArgs
from pod.recipe import Recipe


def longest_context(model: ModelArgs) -> int | None:
    """The longest context in tokens of a recipe's model, after the extension that the recipe sets.

    It is None where the model's configuration cannot be read here, or does not name its context.
    """
    from pod.training.run.longer_context import change_rope
    from pod.training.run.start_model import source_config

    try:
        config, _ = source_config(model)
    except (ValueError, OSError):
        return None  # with data.tokenizer, data can be prepared for a model that is elsewhere
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or not (model.rope or model.max_position_embeddings):
        return longest
    return change_rope(dict(config.rope_parameters), longest, model.rope, model.max_position_embeddings)[1]


def check_lengths(recipe: Recipe) -> list[str]:
    """A line that names the lengths in the recipe that are too long for its model, or no line.

    Raises:
        ValueError: the rows themselves are too long, and data.tokenizer is not set. One line names all
            lengths that are too long.
    """
    longest = longest_context(recipe.model)
    if longest is None:
        return []
    too_long = [f"{name} {length}" for name, length in _lengths(recipe) if length > longest]
    if not too_long:
        return []
    way_out = (
        f"lower them to at most {longest}, or extend the model (model.rope_theta or model.rope_type with "
        "model.max_position_embeddings)"
    )
    text = (
        f"the model {recipe.model.path} reads {longest} tokens, "
        f"and the recipe has {', '.join(too_long)}: {way_out}"
    )
    if recipe.data.context_length > longest and recipe.data.tokenizer is None:
        raise ValueError(text)
    return [f"note: {text}"]


def _lengths(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Name and value, in tokens, of each setting that says how long a text the model must read."""
    yield "data.context_length", recipe.data.context_length
    if recipe.model.layout in ("auto", "pod"):
        yield "explore.sequence_length", recipe.explore.sequence_length
    yield "eval.text_length", recipe.eval.text_length
    for name in ("passkey_lengths", "efficiency_lengths"):
        yield f"eval.{name}", max(getattr(recipe.eval, name), default=0)


def notes_on_rows(recipe: Recipe, manifest: dict[str, Any]) -> list[str]:
    """Lines about rows and held-out text that explore, train and eval of the same recipe need and do not get.

    Args:
        manifest: the manifest of the prepared data.
    """
    return [
        f"note: {line}"
        for line in (*_on_windows(recipe), *_on_steps(recipe, manifest), *_on_held_out(recipe, manifest))
    ]


def _on_windows(recipe: Recipe) -> Iterator[str]:
    """A line when the sequences to explore have no distant tokens, which leaves a plan nothing to save."""
    model, explore = recipe.model, recipe.explore
    windows = sum(model.windows().values())
    if model.layout not in ("auto", "pod") or model.plan is not None or explore.cost != "nats":
        return
    if explore.sequence_length <= windows:
        yield (
            f"`pod explore` will refuse sequences of {explore.sequence_length} tokens, "
            f"which the windows of {windows} tokens cover: lower model.num_recent_tokens "
            "(a quarter of explore.sequence_length is a good start)"
        )


def _on_steps(recipe: Recipe, manifest: dict[str, Any]) -> Iterator[str]:
    """A line when the prepared rows do not fill the steps of the training, or are too few for its tokens."""
    train = recipe.train
    length = manifest["context_length"]
    rows = manifest["num_rows"]
    each = train.tokens_per_step or length
    if each % length:
        yield f"train.tokens_per_step is {each}, no multiple of the rows' {length} tokens"
        return
    if each // length > rows:
        yield (
            f"`pod train` will refuse train.tokens_per_step = {each}: "
            f"the data has {rows} rows, {rows * length} tokens"
        )
        return
    if train.max_steps is None and train.total_tokens is None:
        return
    steps = train.max_steps or (train.total_tokens or 0) // each
    if steps * each > rows * length and not train.allow_repeats:
        most = rows * length // each * each
        yield (
            f"`pod train` will refuse {steps * each} tokens: "
            f"the data has {rows} rows, {rows * length} tokens; "
            f"set train.total_tokens to at most {most}, or train.allow_repeats=true"
        )


def _on_held_out(recipe: Recipe, manifest: dict[str, Any]) -> Iterator[str]:
    """A line for each reader of the held-out text (explore, eval, training) that needs more than there is."""
    held_out = manifest.get("held_out") or {}
    tokens, explore, evaluated = held_out.get("tokens", 0), recipe.explore, recipe.eval
    asked = {}
    if not explore.sources and recipe.model.layout in ("auto", "pod") and recipe.model.plan is None:
        asked["explore"] = (
            explore.num_sequences,
            explore.sequence_length,
            "explore.num_sequences",
            "explore.sources",
        )
    if not evaluated.text:
        asked["eval"] = evaluated.text_sequences, evaluated.text_length, "eval.text_sequences", "eval.text"
    for command, (count, length, setting, other) in asked.items():
        if count * length > tokens:
            documents = held_out.get("documents", 0)
            yield (
                f"`pod {command}` asks for {count} sequences of {length} held-out tokens, "
                f"and {tokens} tokens ({documents} documents) were held out, "
                "at most a fifth of all documents: "
                f"add documents, lower {setting}, or name texts in {other}"
            )
    if recipe.train.eval_every_steps and not tokens:
        yield "`pod train` will refuse train.eval_every_steps: no text was held out"
