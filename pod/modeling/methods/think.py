"""ThinK (Xu et al., 2024, arXiv:2407.21018): a prompt's keys lose channels that its last queries use least.

When the first prompt ends, channel ``j`` of a KV head is worth ``‖Q_j‖² ‖K_j‖²``, over the last queries of
the prompt and over all keys held. Both are rotated, as in the authors' code. The worth is a mean over the
query heads of a group, as in kvpress; the authors' code prunes a copy of the keys for each query head.

From then on, the keys of all tokens but the ``recent`` newest are held in the best channels only: they are
*thin*. When a later prompt ends, the keys that came since are thinned to the same channels. Until then, keys
of decoded tokens stay whole. Values always stay whole.

With a selection (the paper combines ThinK with H2O and SnapKV), the prompt's tokens are chosen by whole keys,
and then the keys of those that stay are thinned. When a later prompt ends, tokens are chosen by the keys that
are held, thin ones with zeros for the channels that they lack.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import LastQueries, best_slots
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.model.attend import compute_dtype
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import write_scores
from pod.modeling.model.kv_buffer import KVBuffer
from pod.modeling.model.kv_quantizer import KVQuantizer
from pod.modeling.model.step import Step


class ThinKeyQuantizer(KVQuantizer):
    """A quantizer whose keys lose channels. An inner quantizer stores values, thin keys and windows.

    The number of channels kept is rounded up so that a packed key fills whole bytes.
    """

    comes_to_rest = True

    def __init__(self, config: PodConfig, request: Request):
        kept = config.head_dim - int(config.head_dim * request.params["ratio"])
        parts = 8 // getattr(request.quantizer, "bits", 8)  # how many numbers of a token are in a byte
        self.inner = request.quantizer
        self.num_channels = -(-kept // parts) * parts
        self.num_queries = request.params["queries"]
        self.recent = request.params["recent"]
        self.window = self.inner.window

    def tokens(self, part: str, evicts: bool = False) -> KVBuffer:
        return ThinKeys(self) if part == "keys" else self.inner.tokens(part, evicts)


class ThinKeys(KVBuffer):
    """A buffer of keys, the older ones in fewer channels, for rows of equal length.

    Whole keys, which are in ``data``, stay native under any codec.

    Attributes:
        thin: a buffer of the inner quantizer with the thin keys ``[B, h, num_thin, c]``: the first tokens.
        num_thin: number of these tokens.
        channels: the channels of thin keys, int64 ``[B, h, 1, c]``, ascending; None before any key was
            thinned.
        queries: the last queries of the prompt that is being fed.
    """

    def __init__(self, rule: ThinKeyQuantizer):
        super().__init__()
        self.rule, self.queries = rule, LastQueries(rule.num_queries)
        self.channels: Any = None
        self.thin, self.num_thin = rule.inner.tokens("keys"), 0

    @property
    def shape(self) -> tuple[int, ...]:
        batch, heads, slots, head_dim = self.data.shape
        return batch, heads, self.num_thin + slots, head_dim

    @property
    def stored(self) -> Any:
        return self if self.num_thin else self.data

    def scores(self, q: Tensor, out: Tensor) -> None:
        """See ``Packed.scores``."""
        write_scores(q.gather(3, self._index(q.shape[2])), self.thin.stored, out[..., : self.num_thin])
        write_scores(q, self.data, out[..., self.num_thin :])

    def _index(self, count: int) -> Tensor:
        """``channels`` repeated for ``count`` tokens, ``[B, h, count, c]``."""
        return self.channels.expand(-1, -1, count, -1)

    def tensors(self) -> list[Tensor]:
        channels = [] if self.channels is None else [self.channels]
        return [*super().tensors(), *self.thin.tensors(), *channels, *self.queries.tensors()]

    def observe(self, q: Tensor, step: Step) -> None:
        self.queries.observe(q, step)

    def append(self, x: Tensor, past: int) -> None:
        super().append(x, past - self.num_thin)

    def read(self, length: int) -> Tensor:
        """See ``KVBuffer.read``. Thin keys have zeros for the channels that they lack."""
        keys = super().read(length - self.num_thin)
        if self.num_thin:
            keys = F.pad(keys, (0, 0, self.num_thin, 0))
            keys.scatter_(3, self._index(self.num_thin), self.thin.read(self.num_thin))
        return keys

    def keep(self, index: Tensor, length: int) -> None:
        """See ``KVBuffer.keep``.

        Heads keep unequally many thin keys. So all keys are stored whole until ``flush`` thins them again.
        Thin ones have zeros for the channels that they lack.
        """
        self.data = self.read(length)
        self.thin, self.num_thin = self.rule.inner.tokens("keys"), 0
        super().keep(index, length)

    def flush(self, length: int) -> None:
        """See ``KVBuffer.flush``. When a prompt has ended, thin all keys but the ``recent`` newest."""
        queries = self.queries.observed
        keys = super().read(length - self.num_thin)
        count = keys.shape[2] - self.rule.recent
        self.queries = LastQueries(self.rule.num_queries)
        if queries is not None and count > 0:
            if self.channels is None:
                of_queries = _mean_norms(queries, keys.shape[1])
                of_keys = _mean_norms(keys, keys.shape[1])
                self.channels = best_slots(of_queries * of_keys, self.rule.num_channels)[:, :, None]
            self.thin.append(keys[:, :, :count].gather(3, self._index(count)), self.num_thin)
            self.data = keys[:, :, count:].clone()
            self.num_thin = self.num_thin + count
        if self.num_thin:
            self.thin.flush(self.num_thin)


def _mean_norms(x: Tensor, kv_heads: int) -> Tensor:
    """Sums of squares over the tokens of ``x`` ``[B, heads, n, d]``, as means over each KV head's heads."""
    squares = x.to(compute_dtype(x.dtype)).square().sum(2)
    return squares.unflatten(1, (kv_heads, -1)).mean(2)


class WholeLayer(SharedSelectionLayer):
    """A layer that keeps every token, for ThinK without a selection."""

    evicts = False

    @staticmethod
    def ranks(config: PodConfig, layer_idx: int, request: Request) -> LastQueries:
        return LastQueries(0)


BUILDERS = {"think": Builder(build=cache_of(WholeLayer), wraps=ThinKeyQuantizer)}
