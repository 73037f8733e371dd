"""Decoding and statistics of attention that are faster than what every installation of torch runs.

Imports torch and (where installed) triton, and of this package only the operation that it implements.
"""

import importlib
from typing import Any

from pod.modeling.shipped.attend import Implementation
from pod.modeling.shipped.decode import DECODERS, DecodeCall


def _triton() -> Any:
    return importlib.import_module("pod.kernels.triton_decode")


def _unsupported(call: DecodeCall) -> str | None:
    try:
        return _triton().unsupported(call)
    except ImportError as error:
        return f"Triton cannot be imported ({error})"


# Decoding with split keys by Triton, which is imported when first asked for: not every installation has it.
DECODERS["triton"] = Implementation(lambda call: _triton().decode(call), _unsupported)
