"""Window attention (WA): every query sees the most recent ``budget`` tokens, its own included, in the prompt as well."""

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.streaming import cache_of
from pod.modeling.methods.windowed import WINDOW_REFUSES_POD, with_windows
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.layout import PodCacheLayer


def _layer(config: PodConfig, layer_idx: int, request: Request) -> PodCacheLayer:
    return PodCacheLayer(with_windows(config, 0, request.budget), layer_idx, request.codec)


METHOD = Method(
    name="wa",
    paper="Window attention (Beltagy et al., 2020), the baseline WA of the PoD paper",
    frees="keys and values of all tokens but the recent ones",
    axis="selection",
    build=cache_of(_layer, takes_any_rows=True),
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
