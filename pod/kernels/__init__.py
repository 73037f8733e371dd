"""Fast attention and statistics of it. Imports torch and (where installed) triton only; `pod` connects what is here to the model code."""

from pod.kernels.api import causal_attention, mixed_attention, pod_attention, window_attention
from pod.kernels.decode import DecodeBuffers, Packed, Roles, make_buffers, make_roles, pod_decode
from pod.kernels.statistics import attention_column_sums, attention_rows

__all__ = [
    "DecodeBuffers",
    "Packed",
    "Roles",
    "attention_column_sums",
    "attention_rows",
    "causal_attention",
    "make_buffers",
    "make_roles",
    "mixed_attention",
    "pod_attention",
    "pod_decode",
    "window_attention",
]
