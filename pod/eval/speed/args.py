"""Options of the task `efficiency`: `eval.task_options.efficiency`."""

from dataclasses import field

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pod.eval.answer.devices import SPREADS
from pod.schema import AtLeast2, section
from pod.units import GIB


@section
class SpeedOptions:
    """What `efficiency` measures besides decode speed, and how."""

    prefill_repeats: PositiveInt = 1
    """How often the prompt is processed for each method; the median is the time to first token."""

    memory: bool = True
    """Also measure peak memory during the prompt and during decoding, divided into weights, parts of the
    cache, and activations. Processes the prompt once more for each method."""

    decode_lengths: list[AtLeast2] = field(default_factory=list)
    """More prompt lengths in tokens, at which only decoding is timed. Random tokens fill the caches, so no
    prompt is processed; bytes and time stay the same. Methods that select tokens by the prompt are left
    out."""

    max_batch: list[tuple[PositiveInt, PositiveInt]] = field(default_factory=list)
    """Pairs [prompt tokens, generated tokens] for which the largest batch that fits is searched, for
    example [[2048, 8192]] (PoD Table 3, D2O Table 3). One more run at this batch gives tokens per second."""

    memory_limit_gib: PositiveFloat | None = None
    """GiB that weights, cache and activations may take in the search for the largest batch or prompt. null
    = all memory of the GPU. Must be set on a CPU."""

    max_batch_rows: PositiveInt = 256
    """The search for the largest batch stops at this many sequences."""

    longest_prompt: NonNegativeInt = 0
    """Search for the longest prompt that fits, in steps of this many tokens (IMDC Table 1). 0 = do not."""

    longest_prompt_tokens: PositiveInt = 4_194_304
    """The search for the longest prompt stops at this many tokens."""

    @property
    def memory_limit(self) -> int | None:
        """The memory limit in bytes; None = all memory of the GPU."""
        return None if self.memory_limit_gib is None else int(self.memory_limit_gib * GIB)

    def check_limit(self, device: str) -> None:
        """Refuse a search without a limit on a machine without a GPU.

        Args:
            device: `eval.device`.
        Raises:
            ValueError: it names the search and the setting of the limit.
        """
        searched = "max_batch" if self.max_batch else "longest_prompt"
        if getattr(self, searched) and self.memory_limit is None and not _has_gpu(device):
            raise ValueError(
                f"eval.task_options.efficiency.{searched} fills all memory, which is safe on a GPU only: set "
                "eval.task_options.efficiency.memory_limit_gib"
            )


def _has_gpu(device: str) -> bool:
    if device not in ("auto", *SPREADS):
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()
