"""Which backend runs the attention of a training step, known before there is a tensor or a GPU."""

import torch

from pod.kernels import gpu_support
from pod.modeling.model.attend import check_backend
from pod.training.predict.shapes import Shapes


def attention_backend(shapes: Shapes, dtype: str, has_gpu: bool) -> str:
    """The backend that `shapes.attention_backend` names, or that `auto` takes: `flash`, `flex`, `reference`.

    Raises:
        ValueError: an unknown backend, or one that cannot train this model in this dtype.
    """
    asked = shapes.attention_backend
    check_backend(asked)
    refused = refusals(shapes, dtype, has_gpu)
    if asked == "auto":
        return next((name for name, reason in refused.items() if reason is None), "reference")
    if (reason := gpu_support.refusal(asked, refused)) is not None:
        raise ValueError(
            f"model.attention_backend={asked} cannot train this: {reason}; set model.attention_backend=auto"
        )
    return asked


def refusals(shapes: Shapes, dtype: str, has_gpu: bool) -> dict[str, str | None]:
    """Why the backends `flash` and `flex` cannot run in `train.dtype`, by name; None = the backend can run.

    They stand in the order in which `auto` tries them.
    """
    if not has_gpu:
        return {"flash": None, "flex": "it runs on GPUs only"}
    return gpu_support.refusals(getattr(torch, dtype), shapes.head_dim)
