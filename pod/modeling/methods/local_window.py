"""Local window: the prompt is read with full attention, then only the most recent ``budget`` tokens stay, and slide on.

A decoded token attends to what is held and to itself before the oldest token leaves. Keys keep their positions. A running
prompt is held whole, behind the window, until it ends; in ``streaming`` prefill, until its chunk ends.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.methods.windowed import WINDOW_REFUSES_POD, WindowedLayer, windowed_cache
from pod.modeling.shipped.attend import Tokens, attend
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.strips import strip_attention


class LocalLayer(WindowedLayer):
    """The window of ``WindowedLayer`` with keys rotated, and the running prompt.

    Attributes:
        seen: tokens that have entered the window.
        prompt_length: tokens of the running prompt.
    """

    rotates_keys = True

    def clear(self) -> None:
        super().clear()
        self.seen = 0
        self._start_prompt()

    def _start_prompt(self) -> None:
        self.prompt_length = 0
        self.prompt_keys, self.prompt_values = (self.codec.tokens(part) for part in ("keys", "values"))

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().parts()
        yield from (("keys", tensor) for tensor in self.prompt_keys.tensors())
        yield from (("values", tensor) for tensor in self.prompt_values.tensors())

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.prompt_keys.select_rows(index)
        self.prompt_values.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        held = super().predicted_nbytes(self.seen)
        if not self.prompt_length:
            return held
        return held + sum(
            s.predicted_nbytes(self.prompt_length) for s in (self.prompt_keys, self.prompt_values)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope(q), step.rope(k)
        if not step.is_decode:
            self.prompt_keys.append(k, self.prompt_length)
            self.prompt_values.append(v, self.prompt_length)
            self.prompt_length += step.num_new
            k, v = (s.read(self.prompt_length) for s in (self.prompt_keys, self.prompt_values))
        if self.seen:
            keys = torch.cat(
                (self.keys_store.read(self.seen), k), dim=2
            )  # all seen by all: any order will do
            values = torch.cat((self.values_store.read(self.seen), v), dim=2)
        else:
            keys, values = k, v
        if step.is_decode:
            self._slide(k, v)
        if keys.shape[2] == q.shape[2] > 1:
            return attend(q, Tokens(keys, values), backend=step.backend)[0]
        return strip_attention(q, keys, values, self.scale)

    def settle(self, step: Step) -> None:
        if step.ends_prompt and self.prompt_length:
            self._slide(*(s.read(self.prompt_length) for s in (self.prompt_keys, self.prompt_values)))
            self._start_prompt()
        if (step.ends_prompt or step.is_decode) and self.seen:
            self.keys_store.settle(self.seen)
            self.values_store.settle(self.seen)

    def _slide(self, k: Tensor, v: Tensor) -> None:
        self._append(k, v, self.seen)
        self.seen += k.shape[2]


def _build(config: PodConfig, request: Request) -> PodCache:
    return windowed_cache(LocalLayer, config, request, 0, request.tokens, chunks_of(request))


METHOD = Method(
    name="local_window",
    paper="Local window, a baseline of the D2O paper (Wan et al., 2024)",
    frees="keys and values of all tokens but the recent ones, once the prompt has ended",
    axis="selection",
    build=_build,
    parameters=PREFILL_PARAMETERS,
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
