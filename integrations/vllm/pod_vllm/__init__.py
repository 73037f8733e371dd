"""vLLM's plugin for models that `pod export --format vllm` wrote: `register` is its entry point."""

import logging

ARCHITECTURE = "PodServedForCausalLM"
MODEL_TYPE = "pod_served"
TRIED = "0.32."
"""The beginning of the versions of vLLM with which the plugin was tried."""


def register() -> None:
    """Tell vLLM the architecture, and transformers the type of its configuration.

    vLLM calls this in each of its processes, and perhaps twice in one. The class is named as a string, so
    that its module is imported only where such a model is loaded.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry, __version__

    from pod_vllm.config import PodServedConfig

    if not __version__.startswith(TRIED):
        logging.getLogger("vllm.pod_vllm").warning(
            "pod-kv's plugin was tried with vLLM %sx, this is %s: if a model does not load, install vLLM %sx",
            TRIED,
            __version__,
            TRIED,
        )
    AutoConfig.register(MODEL_TYPE, PodServedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"pod_vllm.model:{ARCHITECTURE}")
