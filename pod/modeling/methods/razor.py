"""RazorAttention (§3.2, Algorithm 1): retrieval heads hold all tokens, others first and last ones and a mean.

When a prompt ends, a head that is no retrieval head keeps its first ``num_sink_tokens`` tokens and its last
``L_h = max(num_recent_tokens, seen / compression)`` tokens. One *compensation token* replaces all tokens that
it ever dropped: the mean of their rotated keys and the mean of their values. In the softmax, it counts as
many times as tokens were dropped (eqs. 4, 5). While decoding, the window slides: the oldest recent token
enters the mean before the new token attends.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.sliding import CompensationToken, SlidingTokens
from pod.modeling.model.attend import Tokens, merge_heads, take_heads
from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import roles_of
from pod.modeling.model.step import CacheLayer, Step
from pod.modeling.retrieval_heads import plan_of_heads


class RazorLayer(CacheLayer):
    """A layer for rows of equal length.

    Attributes:
        roles: retrieval heads lead, all others keep windows.
        everything: the tokens of retrieval heads: all of them.
        near: the tokens of the other heads: sinks and recent ones.
        compensation: the compensation token of these other heads.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__()
        self.layer_idx, params = layer_idx, request.params
        self.num_sink_tokens = params["num_sink_tokens"]
        self.num_recent_tokens = params["num_recent_tokens"]
        self.compression = params["compression"]
        self.compensates = params["compensation"]
        self.roles = roles_of(params["heads"].lead, layer_idx)
        self.groups, self.scale = config.num_key_value_groups, config.head_dim**-0.5
        self.quantizer = request.quantizer
        self.clear()

    def clear(self) -> None:
        self.compensation = CompensationToken(self.compensates)
        self.everything = SlidingTokens(self.quantizer, 0)
        self.near = SlidingTokens(self.quantizer, self.num_sink_tokens, self.compensation)

    def kv_buffers(self) -> dict[str, Any]:
        full = {f"full_{name}": buffer for name, buffer in self.everything.kv_buffers().items()}
        return full | self.near.kv_buffers() | {"compensation": self.compensation}

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.ropes[self.layer_idx].pair(q, k)
        parts = []
        for heads, tokens in ((self.roles.leads, self.everything), (self.roles.windows, self.near)):
            if heads:
                new = Tokens(take_heads(k, heads), take_heads(v, heads))
                out = tokens.attend(take_heads(q, heads, self.groups), new, step, self.scale)
                parts.append((heads, out))
        return merge_heads(parts, self.groups)

    def flush(self, step: Step) -> None:
        """When a prompt ends, keep sinks and the last ``L_h`` tokens, and move the others into the mean.

        ``L_h`` is computed from all tokens seen, so it never shrinks.
        """
        if not (step.ends_prompt or step.is_decode):
            return
        if self.roles.windows and not step.is_decode:
            self.near.trim(max(self.num_recent_tokens, int(step.max_length / self.compression)))
        self.near.flush()
        self.everything.flush()


def _build(config: PodConfig, request: Request) -> PodCache:
    if request.params["heads"] is None:
        raise ValueError(
            f"{request.spec} needs the model's retrieval heads: `pod explore --heads` with model.path writes "
            "<output_dir>/plan/retrieval_heads.json, name it as razor[heads=FILE]; "
            "razor[heads=random] draws them"
        )
    plan = plan_of_heads(config=config, **{name: request.params[name] for name in ("heads", "share", "seed")})
    return cache_of(RazorLayer)(config, replace(request, params=request.params | {"heads": plan}))


BUILDERS = {"razor": Builder(build=_build)}
