"""What can run on the GPUs of this machine, known before a model is loaded: attention of prompts,
kernels by Triton."""

import torch

from pod import toolchain
from pod.kernels import flex
from pod.modeling.shipped import varlen
from pod.modeling.shipped.flash_version import SHIPPED, asked, unsupported_by_version


def refusals(dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Why ``flash`` and ``flex``, in the order of ``auto``, cannot run on a GPU; None = it can.

    Where this machine has GPUs, what they and its compilers cannot do counts too.
    """
    flash = varlen.unsupported_sizes(dtype, head_dim)
    flexible = flex.unsupported_sizes(dtype, head_dim)
    if torch.cuda.is_available():
        capability = least_capability()
        old = None if capability >= (8, 0) else "this GPU (needs compute capability 8.0)"
        flash = flash or old or unsupported_by_version(asked() or SHIPPED, head_dim, capability)
        flexible = flexible or old or toolchain.obstacle()
    return {"flash": flash, "flex": flexible}


def refusal(backend: str, refused: dict[str, str | None]) -> str | None:
    """Why a backend that was asked for by name cannot run, by what ``refusals`` says; None = it can."""
    if backend == "grouped":
        return "it takes one query per row"
    # The kernels of both are Triton's, for the same dtypes and head dimensions.
    return refused.get("flex" if backend == "triton" else backend)


def least_capability() -> tuple[int, int]:
    """The lowest compute capability of the GPUs that this process sees."""
    return min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))


def check_prompts(dtype: torch.dtype, head_dim: int, backend: str) -> None:
    """Refuse to read prompts on this machine's GPUs by the reference, unless it was asked for by name.

    Args:
        backend: ``auto`` or the name of one.

    Raises:
        ValueError: a named backend that cannot run, or only the reference could; in one line, with what
            would help.
    """
    refused = refusals(dtype, head_dim)
    if (reason := refusal(backend, refused)) is not None:
        raise ValueError(
            f"model.attention_backend={backend} cannot run here: {reason}; set model.attention_backend=auto"
        )
    if backend != "auto" or None in refused.values():
        return
    told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    helps = "model.dtype=bfloat16, or " if None in refusals(torch.bfloat16, head_dim).values() else ""
    raise ValueError(
        f"no fused attention runs on this GPU ({told}); without it, all n x n logits of a prompt are in "
        f"memory: mend "
        f"this, or set {helps}model.attention_backend=reference to accept it"
    )
