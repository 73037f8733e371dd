"""Fast attention and statistics of it. Imports torch and (where installed) triton only; `pod` connects what is here to the model code."""

from pod.kernels.api import causal_attention, mixed_attention, pod_attention, window_attention
from pod.kernels.statistics import attention_column_sums, attention_rows

__all__ = [
    "attention_column_sums",
    "attention_rows",
    "causal_attention",
    "mixed_attention",
    "pod_attention",
    "window_attention",
]
