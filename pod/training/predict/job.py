"""What an estimate is made for: a model under a plan, settings with nothing left open, rows, and where the ranks are."""

import functools
from dataclasses import dataclass

from pod.modeling.shipped.sharing import Lead
from pod.training.args import TrainArgs
from pod.training.predict.shapes import Shapes
from pod.training.run.ulysses import Shares, share_heads


@dataclass(frozen=True)
class World:
    """Where ranks are.

    Attributes:
        size: all ranks.
        local_size: ranks of one machine.
    """

    size: int
    local_size: int

    def __post_init__(self) -> None:
        if self.local_size < 1 or self.size < 1 or self.size % min(self.size, self.local_size):
            raise ValueError(
                f"{self.size} ranks cannot lie on machines of {self.local_size}: use a multiple of {self.local_size}, or fewer"
            )

    @property
    def nodes(self) -> int:
        """Machines."""
        return max(1, self.size // self.local_size)

    @property
    def per_machine(self) -> int:
        """Ranks that share a machine's memory."""
        return min(self.size, self.local_size)


@dataclass(frozen=True)
class Job:
    """One training run as all estimates see it.

    Attributes:
        lead: the plan, lead[layer][kv_head].
        context_length: tokens of a packed row over all ranks of a sequence-parallel group.
    """

    shapes: Shapes
    lead: Lead
    args: TrainArgs
    context_length: int
    world: World

    @property
    def tokens(self) -> int:
        """Of one micro-batch on the rank that holds most."""
        return self.args.rank_tokens(self.context_length)

    @property
    def tiles(self) -> int:
        """Parts in which a feed-forward layer takes its tokens."""
        return self.args.mlp_tiles(self.context_length)

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks in one optimizer step."""
        groups = self.world.size // self.args.sequence_parallel_size
        return self.args.micro_batch_size * self.args.gradient_accumulation_steps * groups

    @property
    def shares(self) -> Shares:
        """Which heads the ranks of a sequence-parallel group compute.

        Raises:
            ValueError: a sequence-parallel size that cannot work.
        """
        return _shares(self.lead, self.shapes, self.args.sequence_parallel_size, self.context_length)

    @property
    def heads_per_rank(self) -> int:
        """KV heads, replicas included, of the rank that has most."""
        return -(-self.shapes.kv_heads * self.shares.repeats // self.args.sequence_parallel_size)


@functools.lru_cache(maxsize=256)
def _shares(lead: Lead, shapes: Shapes, size: int, context_length: int) -> Shares:
    return share_heads(lead, shapes.query_heads, shapes.kv_heads, size, context_length, shapes.windows)
