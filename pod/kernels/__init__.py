"""Fast attention. Imports torch (and later triton) only; `pod` connects what is here to the model code."""

from pod.kernels.api import causal_attention, pod_attention

__all__ = ["causal_attention", "pod_attention"]
