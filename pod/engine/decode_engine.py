"""The decode engine: one step over a cache's own buffers, replayed as a CUDA graph where there is CUDA.

The engine holds no keys or values. It works in the tensors of a ``PodCache`` that has room reserved, and the
cache goes on checking and counting what is fed. So any pass may also take the ordinary way (a second prompt,
rows that feed padding): both ways find the same tokens at the same slots.

When a tensor moved (rows were reordered, room ran out), the next step takes the ordinary way. The step after
that captures anew, if nothing moved again. Whether a tensor moved is asked before every token, so the answer
must cost only microseconds: whatever holds tensors of the cache counts how often it replaced one
(``kv_buffer.replaced``). As long as the sum of these counts stays as it was, nothing is looked at.
"""

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pod.engine.layers import StaticLayer, StaticStep, obstacle, run_layers
from pod.engine.program import Program
from pod.kernels import fused
from pod.modeling.model import decode
from pod.modeling.model.cache import PodCache
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.step import Step

_WARM_UPS = 2  # runs before a capture: kernels compile, libraries allocate
# At least so many tokens are reserved behind a prompt, and added to a full cache; 1/8 of a long one.
_ROOM = 256
_version = operator.attrgetter("version")
_PLAINLY, _NO_STEP = "switched off", "no step was made yet"
_SPREAD = "the model lies on several devices"
_log = logging.getLogger(__name__)


def refusal(cache: PodCache) -> str | None:
    """Why the engine cannot decode over a cache; None when it can."""
    if type(cache) is not PodCache:
        return f"the {cache.spec} cache moves or packs its tokens"
    for layer in cache.layers:
        if type(layer) is not PodCacheLayer or not layer.quantizer.is_in_place:
            return f"the {cache.spec} cache has a layout or codec of its own"
        if layer.extra_slots and (layer.roles.followers or layer.roles.windows):
            return f"the {cache.spec} cache keeps extra_slots behind its windows"
    return None


def attach(cache: PodCache, capacity: int, backend: str = "auto") -> "StaticEngine":
    """Reserve room for ``capacity`` tokens per row, and let an engine decode over ``cache`` from now on.

    Args:
        backend: of ``pod.modeling.model.decode``.

    Raises:
        ValueError: a method that the engine does not serve, or a capacity below what the cache holds.
    """
    if (reason := refusal(cache)) is not None:
        raise ValueError(
            "the decode engine serves only full and pod caches in the model's dtype or in 4 bits, but "
            f"{reason}: leave capacity out"
        )
    held = cache.get_seq_length()
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < max(1, held):
        raise ValueError(f"capacity = {capacity!r} must be a whole number of tokens, at least {max(1, held)}")
    cache.reserve(capacity)
    engine = StaticEngine(cache, backend)
    cache.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def attach_for_generation(cache: PodCache, prompt: int, longest: int) -> None:
    """Attach an engine to a cache of ``generate()``, where one is possible; it is kept from call to call.

    ``generate()`` calls this for a cache of its own.

    Args:
        prompt: columns of the prompt.
        longest: columns when everything allowed has been generated.
    """
    if refusal(cache) is not None:
        return
    capacity = min(longest, prompt + max(_ROOM, prompt // 8))
    if cache.engine is None:
        attach(cache, capacity)
    elif capacity > cache.layers[0].capacity:  # type: ignore[attr-defined]
        cache.reserve(capacity)


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that may be written to again and again, without gradients.

    The first caller may be in inference mode where later callers are not, so the tensors are made outside of
    it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Bound:
    """The engine's tensors and layers while the cache's stay where they are.

    Attributes:
        places: address and shape of every tensor of the cache.
        versioned: what holds these tensors.
        version: sum of the versions of these objects when the tensors were at ``places``.
        hidden: ``[B, 1, hidden]``, what goes into the layers.
        plain: what ``plain`` of the engine was at its last step.
        unfused: by ``plain``, why the layers ran as their modules' own ``forward``; None = they did not.
    """

    def __init__(self, layers: list[PodCacheLayer], places: list, backend: str):
        like = next(iter(layers[0].kv_buffers().values())).target
        (batch, _, _, head_dim), device = like.shape, like.device
        room = max((layer.all_values.shape[2] for layer in layers if layer.roles.held), default=0)
        self.places = places
        self.watch(layers)
        self.buffers = decode.make_buffers(
            batch, layers[0].roles.num_heads, layers[0].groups, head_dim, room, like.dtype, device
        )
        past = torch.zeros(batch, dtype=torch.long, device=device)
        self.step = StaticStep([StaticLayer(layer, self.buffers, backend) for layer in layers], past)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.hidden: Tensor | None = None
        self.plain = False
        self.unfused: dict[bool, str | None] = {}

    def watch(self, layers: list[PodCacheLayer]) -> None:
        """Note that the layers' tensors are at ``places`` and at rest; from here on a replaced one shows."""
        self.versioned = [item for layer in layers for item in layer.versioned()]
        self.version = sum(map(_version, self.versioned))

    def is_untouched(self) -> bool:
        """Whether no tensor was replaced since ``watch``. Versions only grow, so changes never cancel out."""
        return sum(map(_version, self.versioned)) == self.version

    def can_be_recorded(self) -> bool:
        """Whether a step can become a CUDA graph."""
        return self.obstacle_to_recording() is None

    def obstacle_to_recording(self) -> str | None:
        """Why a step cannot become a CUDA graph; None when it can."""
        if not self.token.is_cuda:
            return f"there are none on a {self.token.device.type}"
        if not all(layer.can_be_recorded() for layer in self.step.layers):
            return "the decode kernel asks the device for lengths"
        return None

    def obstacle_to_kernels(self) -> str | None:
        """Why norms, rotation and gates are several operations each, unless the engine is plain.

        None when each is one kernel.
        """
        if (reason := self.unfused.get(False)) is not None:
            return reason
        has_none = all(layer.best is fused.REFERENCE for layer in self.step.layers)
        return f"there are no such kernels on a {self.token.device.type}" if has_none else None

    def run_layers(self, model: Any, hidden_states: Tensor) -> Tensor:
        context = model.context(hidden_states, self.step.past[:, None])
        kinds = {one: tuple(x[:, 0, 0, -1].clone() for x in one.own_tables) for one in set(context.ropes)}
        self.step.tables = [kinds[rope] for rope in context.ropes]
        for layer in self.step.layers:
            layer.operations = fused.REFERENCE if self.plain else layer.best
        self.unfused[self.plain] = _PLAINLY if self.plain else obstacle(model, hidden_states)
        if self.unfused[self.plain] is None:
            return run_layers(model, hidden_states, self.step)
        context.step = self.step
        return model.run_layers(hidden_states, context)


class StaticEngine:
    """Decodes over one cache. Use ``attach``.

    The cache owns the engine, and programs know their tensors but not the engine. So there is no cycle of
    references, and the memory of both is free as soon as the cache is gone. A copy of a cache has an engine
    of its own, without programs.

    Attributes:
        graphs: CUDA graphs captured so far; 0 on CPU.
        plain: True = without graphs and fused kernels: each module runs by its own ``forward``, as for a
            method that no engine serves. It may change from step to step.
        steps: tokens per row that the engine, not the ordinary pass, has decoded.
        is_aside: whether the ordinary pass decodes instead, because layers lie on several devices and a
            program runs on one.
    """

    plain = False

    def __init__(self, cache: PodCache, backend: str = "auto"):
        self._cache, self.backend = weakref.ref(cache), backend
        self.graphs = self.steps = 0
        self.release()

    def __getstate__(self) -> dict[str, Any]:
        nothing = {"_bound": None, "_moved_to": None, "_programs": {}}
        return {**self.__dict__, "_cache": self.cache, **nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_cache": weakref.ref(state["_cache"])}

    @property
    def unfused(self) -> str | None:
        """Why the last step took the modules' own ``forward``, with more launches; None = it did not."""
        return None if self._bound is None else self._bound.unfused.get(self._bound.plain)

    def without_graph(self) -> str | None:
        """Why steps are no CUDA graphs; None when they are."""
        if self.plain or self.is_aside:
            return _PLAINLY if self.plain else _SPREAD
        return _NO_STEP if self._bound is None else self._bound.obstacle_to_recording()

    def without_kernels(self) -> str | None:
        """Why steps have no fused kernels between their products; None when they have them."""
        if self.plain or self.is_aside:
            return _PLAINLY if self.plain else _SPREAD
        return _NO_STEP if self._bound is None else self._bound.obstacle_to_kernels()

    @property
    def cache(self) -> PodCache:
        cache = self._cache()
        assert cache is not None, "the cache of this engine is gone"
        return cache

    @torch.compiler.disable
    def decode(self, model: Any, hidden_states: Tensor, step: Step) -> Tensor | None:
        """Turn embeddings ``[B, 1, hidden]`` into the final hidden states.

        Returns:
            ``[B, 1, hidden]``. None = the ordinary way must be taken, for example in passes with gradients.
        """
        if torch.is_grad_enabled() and any(
            weight.requires_grad for weight in (hidden_states, *model.parameters())
        ):
            return None
        with torch.no_grad():
            return self._decode(model, hidden_states, step)

    def _decode(self, model: Any, hidden_states: Tensor, step: Step) -> Tensor | None:
        if self.is_aside or self._steps_aside():
            return None
        self._make_room(self.cache.get_seq_length() + 1)  # columns: no row has more tokens
        bound = self._bind()
        if bound is None:
            return None
        if bound.hidden is None:
            with lasting():
                bound.hidden = torch.empty_like(hidden_states)
        hidden = bound.hidden.copy_(hidden_states)
        bound.step.place(step.past)
        run = self._program("layers", model, lambda: bound.run_layers(model, hidden))
        out = run().clone()
        self._flush(bound, step.uniform_past)
        return out

    @torch.no_grad()
    def greedy(self, model: Any, token: Tensor, num_tokens: int) -> Tensor:
        """Feed ``token``, then what the model finds most likely; one program runs from embedding to argmax.

        Args:
            model: the ``PodForCausalLM`` that filled the cache.
            token: ``[B, 1]``, the next token to feed.
            num_tokens: how many steps.

        Returns:
            ``[B, num_tokens]``, the tokens found; the last of them has not been fed.

        Raises:
            ValueError: an empty cache, rows with padding, a prompt that is not complete, a model that the
                cache was not made for, fewer than 1 step, a token of another shape, or layers on several
                devices.
        """
        self.cache.check_fits(model.config)
        if self._steps_aside():
            raise ValueError(f"greedy() is one program on one device, and {_SPREAD}: use generate()")
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(f"num_tokens = {num_tokens!r} must be a whole number of steps, at least 1")
        if token.dim() != 2 or token.shape[1] != 1:
            raise ValueError(f"token is {list(token.shape)}, expected [B, 1]: the next token of each row")
        past = self.cache.begin_decoding(token.shape[0])
        self._make_room(past + num_tokens)
        bound = self._bind() or self._bind()  # what has moved stays in place during this call
        assert bound is not None, "a complete prompt is at rest"

        def restart() -> None:
            bound.token.copy_(token)
            bound.step.place(past)

        run = self._program("greedy", model, lambda: _greedy_step(model, bound), restart)
        restart()
        found = []
        for number in range(num_tokens):
            found.append(run().clone())
            self._flush(bound, past + number)
        ids = torch.cat(found, dim=1)
        self.cache.end_decoding(torch.cat((token, ids[:, :-1]), dim=1))
        return ids

    def _steps_aside(self) -> bool:
        """Whether the cache lies on several devices; looked up until a step is bound to its tensors."""
        if self._bound is None and not self.is_aside:
            devices = {layer.device for layer in self._layers()} - {None}
            self.is_aside = len(devices) > 1
            if self.is_aside:
                _say_aside()
        return self.is_aside

    def _flush(self, bound: _Bound, past: int | None) -> None:
        """Count a step, and flush the buffers: a token has been decoded in every row.

        Args:
            past: tokens of each row before it. None = rows differ; rows of packed buffers never do.
        """
        self.steps += 1
        if past is not None:
            for layer in bound.step.layers:
                layer.flush(past + 1)

    def release(self) -> None:
        """Let go of the cache's tensors and of all buffers."""
        self.is_aside = False
        self._bound: _Bound | None = None
        self._moved_to: list | None = None
        self._programs: dict[str, Program] = {}  # on the tensors of `_bound`

    def tensors(self) -> Iterator[Tensor]:
        """What the engine itself holds: buffers between layers. Their bytes count as the cache's."""
        if self._bound is not None:
            held = (getattr(self._bound.buffers, field.name) for field in fields(self._bound.buffers))
            yield from (tensor for tensor in held if isinstance(tensor, Tensor))

    def check_integrity(self) -> None:
        """See ``PodCache.check_integrity``.

        The engine is bound to what the cache holds, or it is known that something has moved.
        """
        assert self.cache.engine is self, "the engine serves another cache"
        if self._bound is not None and self._bound.is_untouched():
            assert self._is_at_rest(), "a prompt began, and no version changed"
            assert self._bound.places == self._places(), "a tensor moved, and no version changed"
        if self._bound is not None and self._bound.places == self._places():
            for layer, own in zip(self._bound.step.layers, self._layers(), strict=True):
                assert layer.layer is own, "the engine decodes over layers that the cache does not have"

    # -- programs --------------------------------------------------------------------------------------------

    def _program(
        self, name: str, model: Any, run: Callable[[], Tensor], restart: Callable[[], None] = lambda: None
    ) -> Callable[[], Tensor]:
        assert self._bound is not None
        self._bound.plain = self.plain
        name = f"{name}, plain" if self.plain else name
        held = self._programs.get(name)
        if held is None or not held.serves(model):
            self._programs.pop(name, None)  # frees its graph before the next one needs memory
            held = self._programs[name] = Program(model, self._prepare(run, restart))
        return held.run

    def _prepare(self, run: Callable[[], Tensor], restart: Callable[[], None]) -> Callable[[], Tensor]:
        """``run``, on CUDA recorded as a graph.

        It runs a few times before that, each time from ``restart``. So it writes the slot of the next token
        and no other slot. In a ring, this is the slot of a token that has left the window.
        """
        assert self._bound is not None
        if self.plain or not self._bound.can_be_recorded():
            return run
        with torch.cuda.device(self._bound.token.device):
            graph, out = _record(run, restart)
        self.graphs += 1

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    # -- the cache's tensors ---------------------------------------------------------------------------------

    def _layers(self) -> list[PodCacheLayer]:
        return self.cache.layers  # type: ignore[return-value]

    def _make_room(self, length: int) -> None:
        capacity = self._layers()[0].capacity
        if length > capacity:
            with lasting():
                self.cache.reserve(max(length, capacity + max(_ROOM, capacity // 8)))

    def _places(self) -> list:
        tensors = [tensor for layer in self._layers() for _, tensor in layer.parts()]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    def _is_at_rest(self) -> bool:
        return all(buffer.is_at_rest for layer in self._layers() for buffer in layer.kv_buffers().values())

    def _bind(self) -> _Bound | None:
        """The engine on the tensors as they are now.

        None when they have just moved, since they may move again. None, too, while there are no tensors, or a
        prompt has not ended.
        """
        if self._bound is not None and self._bound.is_untouched():
            return self._bound
        return self._bind_anew()

    def _bind_anew(self) -> _Bound | None:
        """What ``_bind`` returns, found by looking at every tensor."""
        if not self._is_at_rest():
            return None
        places = self._places()
        if self._bound is not None and self._bound.places == places:
            self._bound.watch(self._layers())
            return self._bound
        is_first = self._bound is None and self._moved_to is None
        self._bound = None
        self._programs.clear()
        if not is_first and self._moved_to != places:
            self._moved_to = places
            return None
        with lasting():
            self._bound = _Bound(self._layers(), places, self.backend)
        self._moved_to = places
        return self._bound


@functools.cache
def _say_aside() -> None:
    """Warn that the engine steps aside, once in a process."""
    _log.warning("the decode engine steps aside, and layers decode one by one: %s", _SPREAD)


_ONE_CAPTURE = threading.Lock()
"""Only one capture at a time: a second one would be recorded by the first."""


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures on a device: libraries keep a workspace for every stream they have seen.

    Without a stream, ``torch.cuda.graph`` takes the one that it made for the first graph of the process, on
    whatever device that was.
    """
    return torch.cuda.Stream(device)


def _record(run: Callable[[], Tensor], restart: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``run`` on the current device, and the tensor that it writes.

    Other threads may go on using the device, for example a thread that copies batches to it.
    """
    with _ONE_CAPTURE:
        side = _capture_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                restart()
                run()
            restart()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            out = run()
    return graph, out


def _greedy_step(model: Any, bound: _Bound) -> Tensor:
    """One step from the token in ``bound`` to the most likely next one ``[B, 1]``, which takes its place."""
    hidden_states = bound.run_layers(model.model, model.model.embed_tokens(bound.token))
    bound.token.copy_(model.lm_head(hidden_states[:, -1]).argmax(-1, keepdim=True))
    bound.step.place(bound.step.lengths)
    return bound.token
