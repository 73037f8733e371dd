"""Before a command computes on GPUs: choose FlashAttention's version, and check what this machine lacks."""

import sys
from typing import Any

from pod.models import head_dim_of
from pod.recipe import Recipe, rank


def prepare(recipe: Recipe, device: str = "auto", reads: bool = True, decodes: bool = False) -> None:
    """Activate the FlashAttention that the recipe or the environment names, and check this machine.

    A GPU machine is refused when prompts would be read by the slow reference attention. There is a warning
    when tokens would be decoded without Triton's kernels.

    Args:
        device: the command's own setting; `auto` is a GPU where there is one.
        reads: whether the command reads texts with the recipe's model.
        decodes: whether the command decodes tokens.

    Raises:
        ValueError: one line says what cannot run here and what to do.
    """
    import torch

    from pod import toolchain
    from pod.kernels.gpu_support import check_prompts
    from pod.modeling.model.flash_version import describe, use

    version = use(recipe.model.flash_attention)
    if device == "cpu" or not torch.cuda.is_available():
        return
    head_dim = recipe_head_dim(recipe) if reads else None
    if head_dim is not None:
        check_prompts(getattr(torch, recipe.model.dtype), head_dim, recipe.model.attention_backend)
    if rank() != 0:
        return
    print(f"attention on GPUs: {describe(version)}", flush=True)
    obstacle = toolchain.obstacle()
    if decodes and obstacle is not None:
        print(
            "warning: tokens are decoded without Triton's kernels and CUDA graphs, which is slower: "
            + obstacle,
            file=sys.stderr,
        )


def recipe_head_dim(recipe: Recipe) -> int | None:
    """The head dimension of the recipe's model.

    It is None where the configuration cannot be read; the command itself reports that.
    """
    from pod.training.run.start_model import source_config

    try:
        config: Any = source_config(recipe.model)[0]
    except (ValueError, OSError):
        return None
    return head_dim_of(config)
