"""The values that training starts from: one weight at a time, read by rank 0 and handed to all ranks by the engine's bridge.

A model is built without values (`hollow_model`): every weight has its shape and type and shares one number. Adapters and
loss are put around it as around any other; `bridge.place_weights` then fills and divides it weight by weight.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pod.modeling.loading import check_fit, empty_model, load_model, made_weight
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodForCausalLM
from pod.training.checkpoint.files import Samples, sample_of
from pod.training.run.weight_files import weight_files

Reader = Callable[[str], Tensor]
"""A weight by the name that it has in the model; not to be written to."""


def hollow_model(config: PodConfig, dtype: torch.dtype) -> PodForCausalLM:
    """A model whose weights take no memory, in evaluation mode; their values are to be placed before it is used."""
    model = empty_model(config)
    state = {name: torch.zeros((), dtype=dtype).expand(one.shape) for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval()


def weight_reader(path: str, config: PodConfig, dtype: torch.dtype, gguf_file: str | None = None) -> Reader:
    """Reads the weights of a model with `config` from a checkpoint, in `dtype`: one at a time from safetensors files. A checkpoint
    of another kind is loaded whole.

    Raises:
        ValueError, OSError: a checkpoint that cannot be read, or does not fit.
    """
    have: Mapping[str, Tensor] | None = None if gguf_file else weight_files(path)
    if have is None:
        print(f"note: {path} has no safetensors files: one rank loads it whole", flush=True)
        whole = load_model(path, dtype=dtype, gguf_file=gguf_file)
        have, order = whole.state_dict(), whole.config.head_order
        shapes: Mapping[str, Sequence[int]] = {name: weight.shape for name, weight in have.items()}
    else:
        shapes, order = have.shapes, PreTrainedConfig.get_config_dict(path)[0].get("head_order")
    check_fit(shapes, config, empty_model(config))
    return lambda name: made_weight(name, lambda one: have[one].to(dtype), have, config, order)


class StartWeights:
    """What rank 0 gives `bridge.place_weights`: a weight's own values, or those that a reader has for it.

    Attributes:
        samples: of every weight of `model` that was given, in its order.
    """

    def __init__(self) -> None:
        self._readers: dict[nn.Parameter, Callable[[], Tensor]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self.samples: Samples = {}

    def read(self, model: nn.Module, reader: Reader) -> None:
        """Let the weights of a hollow model come from `reader`."""
        for name, parameter in model.named_parameters():
            self._readers[parameter] = partial(reader, name)

    def sample(self, model: nn.Module) -> None:
        """Remember samples of the weights of `model`."""
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        values = self._readers.pop(parameter, parameter.detach)()
        if parameter in self._names:
            self.samples[self._names[parameter]] = sample_of(values)
        return values
