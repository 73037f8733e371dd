"""vLLM's plugin for models that `pod export --format vllm` wrote: `register` is its entry point."""

ARCHITECTURE = "PodServedForCausalLM"
MODEL_TYPE = "pod_served"


def register() -> None:
    """Tell vLLM the architecture, and transformers the type of its configuration.

    vLLM calls this in each of its processes, and perhaps twice in one. The class is named as a string, so
    that its module is imported only where such a model is loaded.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from pod_vllm.config import PodServedConfig

    AutoConfig.register(MODEL_TYPE, PodServedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"pod_vllm.model:{ARCHITECTURE}")
