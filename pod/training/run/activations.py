"""What a model in training keeps of its forward pass for its backward pass."""

from typing import Any

from pod.training.args import TrainArgs
from pod.training.run.shared_qk import set_shared_qk_memory


def save_activations(model: Any, args: TrainArgs, row_length: int) -> None:
    """Set what a PodForCausalLM keeps for its backward, as the recipe says.

    These are the checkpoints of layers, the memory in which `shared_qk` waits, and feed-forward tiles.

    Args:
        row_length: tokens of the longest row, over all ranks of a sequence-parallel group.
    """
    if args.gradient_checkpointing == "full":
        # The first name is the newer one in transformers. Both checkpoint without re-entering autograd.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    set_shared_qk_memory(model, args.shared_qk, args.offload_checkpoints)
    for layer in model.model.layers:
        layer.mlp.train_tiles = args.mlp_tiles(row_length)
