"""The configuration of an export.

Its class stands at the top level of a module, because vLLM pickles it for its other processes.
"""

from transformers import LlamaConfig


class PodServedConfig(LlamaConfig):
    """The fields of Llama, and `layer_types`, `sliding_window`, `sink_layers`, `qkv_bias` and `qk_norm`."""

    model_type = "pod_served"
