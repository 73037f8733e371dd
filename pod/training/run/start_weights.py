"""The values that a run starts from: rank 0 reads them, one weight at a time.

A model is first built without values (`hollow_model`): every weight has its shape and type, and all its
elements share one number. Adapters and loss are put around it as around any other model.
`bridge.place_weights` then fills and divides it, weight by weight, and hands the values to all ranks.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pod.modeling.checkpoints import ReadTensor, weight_files
from pod.modeling.loading import Constants, check_fit, empty_model, load_model, made_weight
from pod.modeling.model.config import PodConfig
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sinks import is_constant
from pod.training.checkpoint.run_identity import Samples, sample_of


def hollow_model(config: PodConfig, dtype: torch.dtype) -> PodForCausalLM:
    """A model in evaluation mode whose weights take no memory: their values must be placed before its use."""
    model = empty_model(config)
    state = {name: torch.zeros((), dtype=dtype).expand(one.shape) for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval()


def weight_reader(
    path: str,
    config: PodConfig,
    dtype: torch.dtype,
    gguf_file: str | None = None,
    constants: Constants = MappingProxyType({}),
) -> ReadTensor:
    """A function that reads the weights of a model with `config` from a checkpoint, in `dtype`.

    It reads one weight at a time from the checkpoint's files. Where that is not possible, as with a GGUF
    file, the whole model is loaded first.

    Args:
        constants: weights, by name, that are taken from here and not from the checkpoint.

    Raises:
        ValueError, OSError: the checkpoint cannot be read, or does not fit `config`.
    """
    files = None if gguf_file else weight_files(path)
    if files is None:
        name = gguf_file or path
        print(
            f"note: weights of {name} cannot be read one by one, so rank 0 loads the whole model", flush=True
        )
        whole = load_model(path, dtype=dtype, gguf_file=gguf_file)
        state, order = whole.state_dict(), whole.config.head_order
        shapes = {name: tuple(weight.shape) for name, weight in state.items()}
        read = state.__getitem__
    else:
        shapes, read = files
        order = PreTrainedConfig.get_config_dict(path)[0].get("head_order")
    given = {name: tuple(one.shape) for name, one in constants.items()}
    check_fit({**shapes, **given}, config, empty_model(config))

    def made(name: str) -> Tensor:
        if name in constants:
            return constants[name].to(dtype)
        return made_weight(name, lambda one: read(one).to(dtype), shapes, config, order)

    return made


class StartWeights:
    """The values of weights, for `bridge.place_weights`: calling it with a parameter gives its values.

    Args:
        model: the model before adapters are put on it.
        opener: opens the checkpoint that has the values; None = the values are those that `model` holds.

    Attributes:
        samples: the sample (`sample_of`) of every weight whose values were given, by name, in the model's
            order. Constant sinks are left out.
    """

    def __init__(self, model: nn.Module, opener: Callable[[], ReadTensor] | None = None):
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._opener = opener
        self._reader: ReadTensor | None = None
        self.samples: Samples = {}

    def open(self) -> None:
        """Open the checkpoint.

        Raises:
            ValueError, OSError: as in `weight_reader`.
        """
        self._reader = self._opener() if self._opener else None

    def close(self) -> None:
        """Close the checkpoint, whose memory becomes free."""
        self._reader = None

    def __call__(self, parameter: nn.Parameter) -> Tensor:
        """The values of a weight. A weight that `model` did not have, as in adapters, keeps its values."""
        name = self._names.get(parameter)
        values = parameter.detach() if name is None or self._reader is None else self._reader(name)
        # Constant sinks belong to the plan, not to the model.
        if name is not None and not is_constant(name):
            self.samples[name] = sample_of(values)
        return values
