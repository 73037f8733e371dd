"""Window attention (WA): every query sees the most recent ``budget`` tokens, its own included, in the prompt as well."""

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.windowed import WINDOW_REFUSES_POD, windowed_cache
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.layout import WindowCacheLayer


def _build(config: PodConfig, request: Request) -> PodCache:
    sizes = request.codec, request.tokens
    return windowed_cache(
        config, request, lambda config, layer_idx: WindowCacheLayer(config, layer_idx, *sizes)
    )


METHOD = Method(
    name="wa",
    paper="Window attention (Beltagy et al., 2020), the baseline WA of the PoD paper",
    frees="keys and values of all tokens but the recent ones",
    axis="selection",
    build=_build,
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
