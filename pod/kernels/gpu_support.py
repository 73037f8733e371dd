"""Which backends of attention can run on the GPUs of this machine, found before a model is loaded."""

import torch

from pod import toolchain
from pod.kernels import flex
from pod.modeling.model import varlen
from pod.modeling.model.flash_version import SHIPPED, asked, unsupported_by_version


def refusals(dtype: torch.dtype, head_dim: int) -> dict[str, str | None]:
    """Why each of ``flash`` and ``flex``, in the order of ``auto``, cannot run on a GPU. None = it can.

    If this machine has GPUs, their limits and those of the machine's compilers are considered too.

    Args:
        dtype: dtype of the model.
        head_dim: channels of a head.
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
    """Why the backend of this name cannot read prompts, according to ``refusals``. None = it can."""
    if backend == "grouped":
        return "it takes one query per row"
    # The kernels of both are Triton's, for the same dtypes and head dimensions.
    return refused.get("flex" if backend == "triton" else backend)


def least_capability() -> tuple[int, int]:
    """The lowest compute capability of the GPUs that this process sees."""
    return min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))


def check_prompts(dtype: torch.dtype, head_dim: int, backend: str) -> None:
    """Refuse to read prompts on this machine's GPUs with the reference, unless it was asked for by name.

    Args:
        dtype: dtype of the model.
        head_dim: channels of a head.
        backend: ``auto`` or the name of a backend.

    Raises:
        ValueError: a named backend cannot run, or only the reference could. The message is one line and says
            what would help.
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
        f"memory: mend this, or set {helps}model.attention_backend=reference to accept it"
    )
