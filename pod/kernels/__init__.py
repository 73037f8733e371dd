"""Fast implementations of attention, decoding and statistics of attention, most of them for GPUs.

They import torch and (where installed) triton. Of ``pod`` they import only the operation that they implement.
Importing this package registers them by name; their files are imported when they are first used.
"""

import importlib
from typing import Any

from pod.modeling.model.attend import IMPLEMENTATIONS, Call, Implementation
from pod.modeling.model.decode import DECODERS, DecodeCall


def _triton() -> Any:
    return importlib.import_module("pod.kernels.triton_decode")


def _flex() -> Any:
    return importlib.import_module("pod.kernels.flex")


def _unsupported_by_flex(call: Call) -> str | None:
    try:
        return _flex().unsupported(call)
    except ImportError as error:
        return f"FlexAttention or Triton cannot be imported ({error})"


def _prefill() -> Any:
    return importlib.import_module("pod.kernels.triton_prefill")


def _unsupported_by_prefill(call: Call) -> str | None:
    try:
        return _prefill().unsupported(call)
    except ImportError as error:
        return f"Triton cannot be imported ({error})"


def _unsupported(call: DecodeCall) -> str | None:
    try:
        return _triton().unsupported(call)
    except ImportError as error:
        return f"Triton cannot be imported ({error})"


# Attention by FlexAttention, on CUDA. It is imported late, because it brings PyTorch's compiler.
IMPLEMENTATIONS["flex"] = Implementation(lambda call: _flex().attend(call), _unsupported_by_flex)

# Attention of training and prompts as one fused Triton pass. It runs only by name: `auto` never takes it.
IMPLEMENTATIONS["triton"] = Implementation(lambda call: _prefill().attend(call), _unsupported_by_prefill)

# Decoding with split keys by Triton. It is imported late, because not every installation has Triton.
DECODERS["triton"] = Implementation(lambda call: _triton().decode(call), _unsupported)
