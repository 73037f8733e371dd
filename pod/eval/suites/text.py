"""The text that perplexity is measured on: `eval.text`, or what training never sees."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pod.data import long_sequences

if TYPE_CHECKING:
    from pod.recipe import Recipe


def load_text(recipe: "Recipe", tokenizer: Any) -> Tensor:
    """[N, n] tokens of `eval.text_sequences` sequences, each from the start of a document where documents are long enough.

    Raises: ValueError when the text is too short, with what is there.
    """
    args = recipe.eval
    if args.text is None:
        source, split = replace(recipe.data, tokenizer=None), "held_out"  # the model reads its own tokens
    else:
        source, split = args.text, "all"
    try:
        sequences = long_sequences(
            source,
            tokenizer,
            args.text_sequences,
            args.text_length,
            seed=recipe.seed,
            split=split,
            prepared=recipe.data_dir,
        )
    except ValueError as error:
        raise ValueError(
            f"text for perplexity ({'data.sources' if args.text is None else 'eval.text'}): {error}"
        ) from None
    return torch.from_numpy(sequences)
