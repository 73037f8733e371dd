"""vLLM's plugin for models that `pod export --format vllm` wrote: `register` is its entry point."""

ARCHITECTURE = "PodServedForCausalLM"
MODEL_TYPE = "pod_served"


def register() -> None:
    """Tell vLLM the architecture, and transformers the type of its configuration.

    vLLM calls this in each of its processes, and perhaps twice in one. The class is named as a string, so that
    its module is imported only where such a model is loaded.
    """
    from transformers import AutoConfig, LlamaConfig
    from vllm import ModelRegistry

    class PodServedConfig(LlamaConfig):
        """Fields of Llama, and `layer_types`, `sliding_window`, `sink_layers`, `qkv_bias` and `qk_norm`."""

        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, PodServedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
