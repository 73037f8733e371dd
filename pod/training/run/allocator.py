"""Settings of PyTorch's allocator for GPU memory during a training.

This file does not import torch, because torch reads the environment variable only once.
"""

import os
import sys

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch looks for its settings, in this order. It recommends the last name."""
EXPANDABLE = "expandable_segments:True"
"""The setting with which segments of memory grow."""
_REGISTERS = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"

_said = ""  # what `expand_segments` returned last


def expand_segments() -> str:
    """Let segments of GPU memory grow in place; call it before torch is imported.

    Sequences and gathered weights leave free pieces of memory in many sizes. Segments that grow keep these
    pieces usable.

    Nothing is changed where the user has set a variable of PyTorch's allocator. Nothing is changed either
    where NCCL is to register all tensors, since PyTorch switches that off for segments that grow.

    Segments that grow have no legacy CUDA IPC handles, and CUDA graphs with collectives hung with them
    (pytorch/torchtitan#3306). A training uses neither. Decoding and evaluation keep PyTorch's default.

    Returns:
        What was done, for the header of the run.
    """
    global _said
    given = next((name for name in VARIABLES if os.environ.get(name)), None)
    if given is not None:
        is_ours = _said != "" and os.environ[given] == EXPANDABLE
        if not is_ours:
            _said = f"{given}={os.environ[given]}, as the environment says"
    elif os.environ.get(_REGISTERS, "0").lower() not in ("", "0", "false", "no"):
        _said = f"PyTorch's default, as {_REGISTERS} is set"
    elif "torch" in sys.modules:
        _said = f"PyTorch's default: torch was imported before the command; set {VARIABLES[-1]}={EXPANDABLE}"
    else:
        os.environ[VARIABLES[-1]] = EXPANDABLE
        _said = f"{EXPANDABLE} (set {VARIABLES[-1]} to change it)"
    return _said


def describe() -> str:
    """What `expand_segments` did, as text."""
    return _said or "PyTorch's default"
