"""The text that perplexity is measured on: `eval.text`, or what training never sees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pod.data import long_sequences
from pod.eval.suites.base import prompt_hash

if TYPE_CHECKING:
    from torch import Tensor

    from pod.recipe import Recipe


def load_text(
    recipe: "Recipe",
    tokenizer: Any,
    text: list[str] | None = None,
    length: int | None = None,
    sequences: int | None = None,
) -> "Tensor":
    """[N, n] tokens of sequences, each from the start of a document where documents are long enough.

    text, length (tokens), sequences: of a task of its own; default: `eval.text`, `eval.text_length`, `eval.text_sequences`.
    Raises: ValueError when the text is too short, with what is there.
    """
    import torch

    args = recipe.eval
    text = text or args.text
    if text is None:
        source, split = replace(recipe.data, tokenizer=None), "held_out"  # the model reads its own tokens
    else:
        source, split = text, "all"
    try:
        found = long_sequences(
            source,
            tokenizer,
            sequences or args.text_sequences,
            length or args.text_length,
            seed=recipe.seed,
            split=split,
            prepared=recipe.data_dir,
        )
    except ValueError as error:
        raise ValueError(
            f"text for perplexity ({'data.sources' if text is None else 'eval.text'}): {error}"
        ) from None
    return torch.from_numpy(found)


def text_sample(number: int, ids: Sequence[int], /, **more: Any) -> dict[str, Any]:
    """What a sample says of its text, and more; ids: its tokens."""
    return {"id": str(number), "prompt_tokens": len(ids), "prompt_hash": prompt_hash(ids), **more}
