"""Position buckets that double in length, and which of their tokens are scored. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Positions `start <= p < end` of a sequence, of which `first <= p < end` are scored."""

    start: int
    end: int
    first: int

    @property
    def scored(self) -> int:
        """Number of scored tokens, which is also the number of tokens fed after the prompt."""
        return self.end - self.first

    @property
    def held_length(self) -> int:
        """Tokens that the cache has seen when the last one is scored: that one itself is never fed."""
        return self.end - 1


def position_buckets(length: int, min_context: int, scored_tokens: int) -> list[Bucket]:
    """Buckets [c, 2c), [2c, 4c) … from `min_context` up to `length`, where the last one is cut. In tokens."""
    buckets, start = [], min_context
    while start < length:
        end = min(2 * start, length)
        buckets.append(Bucket(start=start, end=end, first=max(start, end - scored_tokens)))
        start = end
    return buckets


def token_counts(
    buckets: list[Bucket], texts: int, length: int, batch_size: int, one_shot: bool
) -> tuple[int, int]:
    """(prompt tokens, decode steps) that texts of `length` tokens take.

    A decode step decodes one token in every row of a batch.

    Args:
        one_shot: one forward pass scores all buckets.
    """
    if one_shot:
        return texts * length, 0
    batches = -(-texts // batch_size)
    prompts = sum(bucket.first - 1 for bucket in buckets)
    return texts * prompts, batches * sum(bucket.scored for bucket in buckets)
