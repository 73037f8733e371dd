"""SnapKV (Li et al., 2024): at the end of the prompt each KV head keeps the tokens that the prompt's end attends to.

``exact`` prefill: the whole prompt is held until it ends, however it is chunked, then every layer keeps ``budget``
tokens: the last ``window`` ones and the best of the rest by the pooled sum of their attention. Decoded tokens are all
kept. In ``streaming`` prefill every chunk of the prompt counts as its end.
"""

from pod.modeling.methods.base import Method
from pod.modeling.methods.ranking import ranking_parameters
from pod.modeling.methods.shared_selection import SharedSelectionLayer, free_own_keys
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, cache_of

METHOD = Method(
    name="snapkv",
    paper="SnapKV (Li et al., 2024)",
    frees="prompt tokens that the end of the prompt does not attend to; decoded tokens stay",
    axis="selection",
    build=cache_of(SharedSelectionLayer, after_layers=free_own_keys),
    parameters=ranking_parameters(window=32, kernel=5, pool="avg") | PREFILL_PARAMETERS,
    takes_budget=True,
)
