"""Oracle of ThinK: keys of a prompt without the channels that its last queries have least use for.

Loops over channels, fp64.

Settled here (Xu et al., 2024, and the authors' code where the paper leaves it open):

* A channel of a KV head scores (mean over the query heads of its group of Σ_i Q_ij²) · Σ_t K_tj²: i over the
  last ``queries`` tokens of the prompt (all, if it has fewer), t over all keys of the prompt, the recent ones
  too; queries and keys rotated.
* floor(ratio · d) channels with the least score are dropped; of equal ones the higher goes first.
* All tokens but the ``recent`` newest lose them when the prompt ends. Later prompts choose no new channels:
  at their end all tokens but the ``recent`` newest lose those of the first. A prompt that leaves no token to
  thin (no more than ``recent`` held whole) chooses none.
* With a codec: keys that lost channels are packed per channel in groups of tokens, the others are not; values
  as ever.
"""

import math

from oracle_tools import NaiveDecoder
from oracles_quantizers import Packed


class ThinK(NaiveDecoder):
    def setup(self, ratio: float, queries: int, recent: int, kept: int | None = None) -> None:
        """``kept``: channels that stay, where that is not said by ``ratio``."""
        self.num_dropped = math.floor(self.head_dim * ratio) if kept is None else self.head_dim - kept
        self.last, self.recent, self.dropped = queries, recent, {}

    def after_prompt(self, layer, head, weights):
        entries = self.entries[layer][head]
        older = entries[: max(0, len(entries) - self.recent)]
        older = [entry for entry in older if "thin" not in entry.stats]
        if older and (layer, head) not in self.dropped:
            scores = self.scores(layer, head)
            order = sorted(range(self.head_dim), key=lambda j: (scores[j], -j))
            self.dropped[layer, head] = order[: self.num_dropped]
        for entry in older:
            entry.k, entry.stats["thin"] = entry.k.clone(), True
            for j in self.dropped[layer, head]:
                entry.k[j] = 0.0

    def scores(self, layer, head):
        positions = self.query_positions()
        group = self.queries[layer][head * self.groups : (head + 1) * self.groups]
        turned = self.turn(group, positions)[:, -self.last :]
        found = []
        for j in range(self.head_dim):
            of_queries = sum(float(x) ** 2 for row in turned for x in row[:, j]) / self.groups
            of_keys = sum(float(entry.k[j]) ** 2 for entry in self.entries[layer][head])
            found.append(of_queries * of_keys)
        return found


class PackedThinK(Packed, ThinK):
    """Zeros of dropped channels pack as zeros."""

    def pack_keys(self, layer, head, entries):
        super().pack_keys(layer, head, [entry for entry in entries if "thin" in entry.stats])


def behind(ranking):
    """ThinK of what a ranking leaves: tokens are chosen by the keys held, then these lose channels."""

    class Behind(ranking, ThinK):
        def setup(self, ratio, queries, recent, **options):
            ranking.setup(self, **options)
            ThinK.setup(self, ratio, queries, recent)

        def after_prompt(self, layer, head, weights):
            ranking.after_prompt(self, layer, head, weights)
            if head == self.num_heads - 1:
                for each in range(self.num_heads):
                    ThinK.after_prompt(self, layer, each, weights)

    return Behind
