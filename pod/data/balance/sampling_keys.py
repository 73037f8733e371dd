"""Sampling keys decide which pieces are drawn: the smallest ones.

A piece's key is a hash of its document's digest and the seed.
"""

import numpy as np

SAMPLING_KEY, ORDER, WORK_SHARDS = 1, 2, 0
"""Purposes for which `hash_of_seed` makes a number. Pass n of the draw is ordered by ORDER + n."""


def splitmix64(values: np.ndarray | int) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), uint64, same shape.

    It is a bijection of uint64 that looks random.
    """
    mixed = np.atleast_1d(np.asarray(values, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(np.shape(values))


def hash_of_seed(seed: int, purpose: int) -> np.uint64:
    """A number that makes the sampling keys of one seed and purpose independent of all others."""
    return np.uint64(splitmix64(splitmix64(seed % 2**64) ^ splitmix64(purpose)))


def sampling_keys_of(digests: np.ndarray, cuts: np.ndarray, seed: int) -> np.ndarray:
    """Sampling keys of pieces, uint64 [n].

    Pieces of equal texts have equal keys, and the pieces of one document have different ones.

    Args:
        digests: the digest of each piece's document, uint64 [n].
        cuts: the number of each piece within its document, from 0, [n].
    """
    keys = splitmix64(digests ^ splitmix64(cuts.astype(np.uint64)))
    return splitmix64(keys ^ hash_of_seed(seed, SAMPLING_KEY))


def work_shard_order(sources: np.ndarray, seed: int) -> np.ndarray:
    """The order in which work shards are read, int64 [n].

    The work shards of each source come in random order, evenly spread over the whole reading. So at every
    moment about the same share of each source has been read, and what has been read is a fair sample of all.

    Args:
        sources: the source that each work shard belongs to, [n].
    """
    numbers = np.arange(len(sources), dtype=np.uint64)
    sampling_keys = splitmix64(numbers ^ hash_of_seed(seed, WORK_SHARDS))
    when = np.empty(len(sources))
    for source in np.unique(sources):
        own = np.flatnonzero(sources == source)
        offset = float(splitmix64(int(source) ^ int(hash_of_seed(seed, WORK_SHARDS)))) / 2.0**64
        when[own[np.argsort(sampling_keys[own], kind="stable")]] = (np.arange(len(own)) + offset) / len(own)
    return np.argsort(when, kind="stable")
