"""Attention and statistics of it that are faster than what every installation of torch runs.

Imports torch and (where installed) triton, and of this package only the operation that it implements.
"""

import importlib
from collections.abc import Callable
from typing import Any

from pod.kernels.statistics import attention_column_sums, attention_rows
from pod.modeling.shipped.attend import IMPLEMENTATIONS, Implementation
from pod.modeling.shipped.decode import DECODERS, Decoder

__all__ = ["attention_column_sums", "attention_rows", "register"]


def register() -> None:
    """Add the implementations of this folder, which are imported when first asked for.

    * ``flex``: CUDA; two compiled FlexAttention calls, also in fp32. On the CPU without gradients, unfused.
    * ``triton``: CUDA; one fused kernel for a whole layer; and decoding with split keys.
    """
    IMPLEMENTATIONS["flex"] = Implementation(*_lazy("flex", "attend", "FlexAttention"))
    IMPLEMENTATIONS["triton"] = Implementation(
        *_lazy("triton_prefill", "attend", "Triton"), takes_mixed_heads=True
    )
    DECODERS["triton"] = Decoder(*_lazy("triton_decode", "decode", "Triton"))


def _lazy(
    module: str, operation: str, needs: str
) -> tuple[Callable[[Any], Any], Callable[[Any], str | None]]:
    """An operation of ``pod.kernels.<module>`` and why it cannot run; ``needs`` names what may not be installed."""

    def load() -> Any:
        return importlib.import_module(f"pod.kernels.{module}")

    def unsupported(call: Any) -> str | None:
        try:
            return load().unsupported(call)
        except ImportError as error:
            return f"{needs} cannot be imported ({error})"

    return lambda call: getattr(load(), operation)(call), unsupported
