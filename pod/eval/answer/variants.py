"""A PoD model with other windows or another plan, on the same weights."""

from typing import Any

import pod
from pod.modeling.loading import from_dense


def variant(model: Any, **changes: Any) -> Any:
    """The model with other fields of its configuration (a plan's, num_sink_tokens, num_recent_tokens); its weights are shared, and
    copied only where heads change their order."""
    config = pod.PodConfig(**(model.config.to_dict() | changes))
    return from_dense(model, config).eval()
