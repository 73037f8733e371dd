"""Data-free search for the heads that look far back: random tokens, repeated (RazorAttention §3.3).

A head that has learnt to retrieve finds the earlier copies of the current token (*echo*), or what followed them
(*induction*), even in text without meaning. One forward pass; no matrix of n x n is ever held.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.modeling.loading import load_model, load_tokenizer
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.training.plans.exploration import keep_old, reusable, weights_stamp
from pod.training.plans.explore_args import ExploreArgs
from pod.training.plans.recording import record_attention_inputs
from pod.training.plans.similarity import from_first_rank, model_fingerprint

HEADS_NAME = "retrieval_heads.json"
BLOCK_ELEMENTS = 1 << 24  # logits computed at a time


def repeated_tokens(
    num_tokens: int, repeats: int, vocab_size: int, excluded: Iterable[int] = (), seed: int = 0
) -> Tensor:
    """``[repeats · K]`` ids: K distinct random tokens outside ``excluded``, the same order again and again.

    Raises: ValueError when the vocabulary has fewer than K tokens left.
    """
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    special = [token for token in excluded if 0 <= token < vocab_size]
    allowed[special] = False
    candidates = allowed.nonzero().flatten()
    if num_tokens < 2 or num_tokens > len(candidates):
        raise ValueError(f"{num_tokens} distinct tokens asked for, allowed are 2 to {len(candidates)}")
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[:num_tokens]].repeat(repeats)


def head_scores(
    q: Tensor, k: Tensor, num_tokens: int, block_elements: int = BLOCK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Echo and induction scores ``[Hq]`` of one layer on ``repeated_tokens``, fp64 on the CPU.

    With A the causal attention and K the number of distinct tokens, the means over the queries i >= K of
    ``Σ_r A[i, i - rK]`` and ``Σ_r A[i, i - rK + 1]`` over all earlier copies ``r >= 1``, ``rK <= i``.

    Args:
        q: ``[Hq, n, d]``; k: ``[H, n, d]``, rotated.
        num_tokens: K.
        block_elements: logits held at a time; memory is O(n) beside it.
    """
    heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    scaled = q.to(compute).unflatten(0, (k.shape[0], -1)) * q.shape[-1] ** -0.5
    keys = k.to(compute).transpose(1, 2)
    totals = torch.zeros(2, heads, dtype=torch.float64)
    size = max(1, block_elements // (heads * n))
    for start in range(num_tokens, n, size):
        stop = min(start + size, n)
        logits = (scaled[:, :, start:stop].flatten(1, 2) @ keys[:, :, :stop]).view(heads, stop - start, stop)
        query = torch.arange(start, stop, device=q.device)
        future = torch.arange(stop, device=q.device) > query[:, None]
        lse = logits.masked_fill_(future, float("-inf")).logsumexp(-1)
        for back in range(num_tokens, stop, num_tokens):
            first = max(back - start, 0)  # the first query of the block that has a copy this far back
            echo = logits[:, first:].diagonal(start + first - back, 1, 2)
            induction = logits[:, first:].diagonal(start + first - back + 1, 1, 2)
            for total, found in zip(totals, (echo, induction), strict=True):
                total += (found - lse[:, first:]).exp().double().sum(1).cpu()
    return totals[0] / (n - num_tokens), totals[1] / (n - num_tokens)


def search_heads(
    model: Any, input_ids: Tensor, num_tokens: int, progress: Callable[[], Any] | None = None
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Echo and induction scores ``[L][Hq]`` of a dense model on ``[n]`` repeated tokens; ``progress`` after each layer."""
    echo, induction = [], []
    for inputs in record_attention_inputs(model, input_ids[None].to(model.device)):
        scores = head_scores(inputs.q, inputs.k, num_tokens)
        echo.append(tuple(scores[0].tolist()))
        induction.append(tuple(scores[1].tolist()))
        if progress is not None:
            progress()
    return tuple(echo), tuple(induction)


def find_heads(
    folder: str | os.PathLike[str],
    model: dict[str, Any],
    model_folder: str,
    explore: ExploreArgs,
    seed: int,
    say: Callable[[str], None] = print,
) -> RetrievalHeads:
    """The retrieval heads of these settings: scores read from ``folder`` when they are there, else measured; then written.

    Other shares choose other heads from the same scores. Scores of other settings are kept under another name.
    Only rank 0 of several works and writes; all get the result.

    Args:
        folder: receives retrieval_heads.json.
        model: path, gguf_file and dtype as in the recipe.
        model_folder: folder or hub id of the dense model.
    """
    found: RetrievalHeads | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        path = Path(folder) / HEADS_NAME
        wanted = {
            "model": model["path"],
            "gguf_file": model["gguf_file"],
            "dtype": model["dtype"],
            "head_tokens": explore.head_tokens,
            "head_repeats": explore.head_repeats,
            "seed": seed,
            "weights": weights_stamp(model_folder),
        }
        found = reusable(path, RetrievalHeads, wanted, say)
        if found is None:
            found = _search(wanted, model_folder, say)
            keep_old(path)
        found = replace(found, induction_share=explore.induction_share, echo_share=explore.echo_share)
        found.save(path)
    found = from_first_rank(found)
    assert found is not None
    return found


def _search(wanted: dict[str, Any], model_folder: str, say: Callable[[str], None]) -> RetrievalHeads:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gguf_file, dtype = wanted["gguf_file"], getattr(torch, wanted["dtype"])
    model = load_model(model_folder, gguf_file=gguf_file, dtype=dtype, device=device)
    tokenizer = load_tokenizer(model_folder, gguf_file=gguf_file)
    vocab, special = ordinary_vocabulary(tokenizer, model.config)
    repeats = wanted["head_repeats"]
    num_tokens = fitting_tokens(model.config, wanted["head_tokens"], repeats, vocab - len(special))
    if num_tokens < wanted["head_tokens"]:
        say(
            f"retrieval heads: {num_tokens} distinct tokens instead of {wanted['head_tokens']}: the model reads "
            f"{model.config.max_position_embeddings} tokens and knows {vocab - len(special)}"
        )
    ids = repeated_tokens(num_tokens, repeats, vocab, special, wanted["seed"])
    layers = model.config.num_hidden_layers
    with tqdm(total=layers, desc=f"heads, {len(ids)} tokens", unit="layer") as bar:
        echo, induction = search_heads(model, ids, num_tokens, bar.update)
    return RetrievalHeads(
        echo=echo,
        induction=induction,
        num_key_value_heads=model.config.num_key_value_heads,
        provenance=wanted
        | {"num_tokens": num_tokens, "weights_sha256": model_fingerprint(model)}
        | {"head_order": model.config.head_order},
    )


def ordinary_vocabulary(tokenizer: Any, config: Any) -> tuple[int, set[int]]:
    """Ids below the first number are a tokenizer's and the model's; the set are the special ones among them."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocab = min(len(tokenizer), config.vocab_size)
    return vocab, {id for id in added | set(tokenizer.all_special_ids) if id < vocab}


def fitting_tokens(config: Any, wanted: int, repeats: int, num_ordinary: int) -> int:
    """K: ``wanted`` distinct tokens, or what the context divided by ``repeats`` and the vocabulary allow.

    Raises: ValueError when that is fewer than 2.
    """
    fitting = min(wanted, config.max_position_embeddings // repeats, num_ordinary)
    if fitting < 2:
        raise ValueError(
            f"explore.head_repeats is {repeats}: a context of {config.max_position_embeddings} tokens and {num_ordinary} ordinary "
            "tokens leave fewer than 2 distinct ones; repeat less often"
        )
    return fitting


def describe_heads_cost(config: Any, explore: ExploreArgs) -> str:
    """What the search needs, from the model's sizes: one forward pass, memory beside the weights, disk."""
    repeats = explore.head_repeats
    num_tokens = fitting_tokens(config, explore.head_tokens, repeats, config.vocab_size)
    n, heads, layers = num_tokens * repeats, config.num_attention_heads, config.num_hidden_layers
    block = max(BLOCK_ELEMENTS, heads * n) * 4  # bytes, fp32
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    flops = layers * heads * n * n * head_dim
    return "\n".join(
        (
            f"retrieval heads: one forward pass over {repeats} x {num_tokens} = {n} tokens and {flops / 1e12:.1f} TFLOP of scores",
            f"memory: the model, one layer's activations over {n} tokens and {2 * block / 1e6:.0f} MB of attention at a time",
            f"disk: {40 * layers * heads / 1e6:.2f} MB for {HEADS_NAME}",
        )
    )
