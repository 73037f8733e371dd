"""The decode engine: decodes one token per row in a cache's own buffers, on CUDA as a replayed graph.

The engine holds no keys or values. It reads and writes the tensors of a ``PodCache`` whose slots were
allocated beforehand, and the cache goes on checking and counting the tokens that are fed. So any pass may
also take the *ordinary way*, layer by layer (a second prompt, rows that feed padding): both ways find the
same tokens at the same slots.

A graph works only while every tensor keeps its address. When a tensor was replaced (rows were reordered,
slots ran out), the next step takes the ordinary way. The step after that records a new graph, if no tensor
was replaced again. The engine checks this before every token, so the check must cost only microseconds: each
object that holds tensors of the cache counts how often it replaced one (``kv_buffer.replaced``). As long as
the sum of these counts is unchanged, no tensor is looked at.
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

_WARM_UPS = 2  # runs before a graph is recorded, in which kernels compile and libraries allocate memory
# How many slots are allocated beyond a prompt, or beyond a cache that is full: so many, or 1/8 of it if more.
_ROOM = 256
_version = operator.attrgetter("version")
_PLAINLY, _NO_STEP = "switched off", "no step was made yet"
_SPREAD = "the model lies on several devices"
_log = logging.getLogger(__name__)


def refusal(cache: PodCache) -> str | None:
    """Why the engine cannot decode with a cache. None = it can."""
    if type(cache) is not PodCache:
        return f"the {cache.spec} cache moves or packs its tokens"
    for layer in cache.layers:
        if type(layer) is not PodCacheLayer or not layer.quantizer.is_in_place:
            return f"the {cache.spec} cache has a layout or codec of its own"
        if layer.extra_slots and (layer.roles.followers or layer.roles.windows):
            return f"the {cache.spec} cache keeps extra_slots behind its windows"
    return None


def attach(cache: PodCache, capacity: int, backend: str = "auto") -> "StaticEngine":
    """Allocate slots for ``capacity`` tokens per row, and let an engine decode with ``cache`` from now on.

    Args:
        cache: a cache that ``refusal`` allows, empty or not.
        capacity: tokens per row. The engine allocates more when they are used up.
        backend: ``auto`` or the name of a decode implementation (``pod.modeling.model.decode.DECODERS``).

    Returns:
        The engine, which is also ``cache.engine``.

    Raises:
        ValueError: the engine does not serve the cache's method, or the capacity is below the number of
            columns that the cache has seen.
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
    """Attach an engine to a cache that ``generate()`` made, if the engine serves it.

    An engine that is attached already stays, with more slots if they are needed.

    Args:
        cache: the cache, before the prompt is fed.
        prompt: columns of the prompt.
        longest: columns of prompt and answer, if the answer gets as long as is allowed.
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
    """A context for making tensors that later calls write to, without gradients.

    The tensors are made outside of inference mode, because a later caller may not be in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Bound:
    """The engine's tensors and layers. They are valid while no tensor of the cache changes its address.

    Attributes:
        places: address and shape of every tensor of the cache.
        versioned: the objects that hold these tensors.
        version: sum of the versions of these objects when the tensors were at ``places``.
        buffers: memory that leads and followers share.
        step: the layers, and the tensors that they share.
        token: ``[B, 1]`` int64, the next token of ``greedy``.
        hidden: ``[B, 1, hidden]``, the input of the layers. None before the first step.
        plain: the value of the engine's ``plain`` at its last step.
        unfused: for ``plain`` False and True, why the layers ran by their modules' own ``forward``. None =
            they did not.
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
        """Record the versions now, when the layers' tensors are at ``places``; see ``is_untouched``."""
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
        """Why norms, rotation and gates run as several operations each, if the engine is not plain.

        None = each is one kernel.
        """
        if (reason := self.unfused.get(False)) is not None:
            return reason
        has_none = all(layer.best is fused.REFERENCE for layer in self.step.layers)
        return f"there are no such kernels on a {self.token.device.type}" if has_none else None

    def run_layers(self, model: Any, hidden_states: Tensor) -> Tensor:
        """Run all layers and the final norm on one new token per row, ``[B, 1, hidden]``.

        ``step.past`` must be set. The layers run fused if they can, else by their modules' own ``forward``.
        """
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
    """Decodes with one cache. ``attach`` makes it.

    The cache owns the engine. The engine has a weak reference to the cache, and programs refer to tensors,
    not to the engine. So there is no cycle of references, and the memory of both is free as soon as the cache
    is gone. A copy of a cache has an engine of its own, without programs.

    Attributes:
        backend: ``auto`` or the name of a decode implementation.
        graphs: number of CUDA graphs recorded so far; 0 on CPU.
        plain: True = no graphs and no fused kernels: each module runs by its own ``forward``, as for a method
            that no engine serves. It may be changed between steps.
        steps: how many tokens per row the engine, not the ordinary pass, has decoded.
        is_aside: whether the ordinary pass decodes instead, because layers are on several devices and a
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
        """Why the last step ran the modules' own ``forward``, with more launches. None = it did not."""
        return None if self._bound is None else self._bound.unfused.get(self._bound.plain)

    def without_graph(self) -> str | None:
        """Why steps do not run as CUDA graphs. None = they do."""
        if self.plain or self.is_aside:
            return _PLAINLY if self.plain else _SPREAD
        return _NO_STEP if self._bound is None else self._bound.obstacle_to_recording()

    def without_kernels(self) -> str | None:
        """Why steps have no fused kernels between their matrix products. None = they have them."""
        if self.plain or self.is_aside:
            return _PLAINLY if self.plain else _SPREAD
        return _NO_STEP if self._bound is None else self._bound.obstacle_to_kernels()

    @property
    def cache(self) -> PodCache:
        """The cache that owns this engine."""
        cache = self._cache()
        assert cache is not None, "the cache of this engine is gone"
        return cache

    @torch.compiler.disable
    def decode(self, model: Any, hidden_states: Tensor, step: Step) -> Tensor | None:
        """Run one decode step of a model, from embeddings to hidden states after the final norm.

        Args:
            model: the ``PodModel``.
            hidden_states: embeddings ``[B, 1, hidden]``.
            step: the pass, as ``PodCache.begin_step`` describes it.

        Returns:
            ``[B, 1, hidden]``. None = the engine has done nothing, and the caller must take the ordinary way,
            for example in passes with gradients.
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
        """Decode greedily: feed ``token``, then at each step the token that the model finds most likely.

        A step is one program, from the embedding to the argmax.

        Args:
            model: the ``PodForCausalLM`` that filled the cache.
            token: ``[B, 1]``, the next token to feed.
            num_tokens: how many steps.

        Returns:
            ``[B, num_tokens]``, the tokens found. All but the last one were fed.

        Raises:
            ValueError: the cache is empty, has padding, its prompt is not complete, or it was not made for
                the model; ``num_tokens`` is below 1; ``token`` has another shape; or layers are on several
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
        bound = self._bind()
        if bound is None:  # tensors were replaced; the new ones keep their address during this call
            bound = self._bind()
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
        """Whether the cache's layers are on several devices; looked up until a step is bound to them."""
        if self._bound is None and not self.is_aside:
            devices = {layer.device for layer in self._layers()} - {None}
            self.is_aside = len(devices) > 1
            if self.is_aside:
                _say_aside()
        return self.is_aside

    def _flush(self, bound: _Bound, past: int | None) -> None:
        """Count a step, and flush the buffers, after a token was decoded in every row.

        Args:
            past: tokens of each row before the step. None = rows differ. Then no buffer is packed, and
                nothing needs to be flushed.
        """
        self.steps += 1
        if past is not None:
            for layer in bound.step.layers:
                layer.flush(past + 1)

    def release(self) -> None:
        """Forget the cache's tensors, all programs and buffers. The next step makes new ones."""
        self.is_aside = False
        self._bound: _Bound | None = None
        self._moved_to: list | None = None
        self._programs: dict[str, Program] = {}  # on the tensors of `_bound`

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the engine itself holds: ``DecodeBuffers``. Their bytes count as the cache's."""
        if self._bound is not None:
            held = (getattr(self._bound.buffers, field.name) for field in fields(self._bound.buffers))
            yield from (tensor for tensor in held if isinstance(tensor, Tensor))

    def check_integrity(self) -> None:
        """See ``PodCache.check_integrity``.

        It checks that the engine is bound to the present tensors of the cache, or that a version shows that
        one of them was replaced.
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
        """A program for ``run`` that serves ``model``: one that exists already, or a new one.

        Args:
            name: name of the program, one for each ``run``.
            model: the model whose weights ``run`` reads.
            run: makes one step.
            restart: sets the step's inputs; see ``_prepare``.
        """
        assert self._bound is not None
        self._bound.plain = self.plain
        name = f"{name}, plain" if self.plain else name
        held = self._programs.get(name)
        if held is None or not held.serves(model):
            self._programs.pop(name, None)  # frees its graph before the next one needs memory
            held = Program(model, self._prepare(run, restart))
            self._programs[name] = held
        return held.run

    def _prepare(self, run: Callable[[], Tensor], restart: Callable[[], None]) -> Callable[[], Tensor]:
        """``run`` itself, or on CUDA a function that replays its graph.

        Before it is recorded, ``run`` runs a few times, each time after ``restart``. So it writes only the
        slot of the next token, again and again. In a ring, the token in this slot has left the window.
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
        """Allocate more slots in the cache's buffers if they have fewer than ``length``."""
        capacity = self._layers()[0].capacity
        if length > capacity:
            with lasting():
                self.cache.reserve(max(length, capacity + max(_ROOM, capacity // 8)))

    def _places(self) -> list:
        """Address and shape of every tensor of the cache's layers."""
        tensors = [tensor for layer in self._layers() for _, tensor in layer.parts()]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    def _is_at_rest(self) -> bool:
        """Whether all buffers are at rest; see the top of ``kv_buffer.py``."""
        return all(buffer.is_at_rest for layer in self._layers() for buffer in layer.kv_buffers().values())

    def _bind(self) -> _Bound | None:
        """The engine's tensors and layers for the present tensors of the cache.

        None if one of these was just replaced, because it may be replaced again in the next step. None, too,
        while there are no tensors, or a prompt has not ended.
        """
        if self._bound is not None and self._bound.is_untouched():
            return self._bound
        return self._bind_anew()

    def _bind_anew(self) -> _Bound | None:
        """The result of ``_bind``, found by comparing the address of every tensor."""
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
    """Warn once in a process that the engine does not decode, because layers are on several devices."""
    _log.warning("the decode engine steps aside, and layers decode one by one: %s", _SPREAD)


_ONE_CAPTURE = threading.Lock()
"""Held while a graph is recorded: the work of a second recording would become part of the first graph."""


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The one stream on which all graphs of a device are recorded.

    It is one, because libraries keep a workspace for every stream that they have seen. It is ours, because
    ``torch.cuda.graph`` would otherwise use the stream that it made for the first graph of the process, on
    whatever device that was.
    """
    return torch.cuda.Stream(device)


def _record(run: Callable[[], Tensor], restart: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record ``run`` as a graph on the current device.

    Other threads may go on using the device, for example a thread that copies batches to it.

    Args:
        run: makes one step, and returns its result.
        restart: sets the step's inputs. It is called before every run.

    Returns:
        The graph, and the tensor to which it writes the result.
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
    """Feed ``bound.token`` ``[B, 1]``, and replace it by the most likely next token, in place."""
    hidden_states = bound.run_layers(model.model, model.model.embed_tokens(bound.token))
    bound.token.copy_(model.lm_head(hidden_states[:, -1]).argmax(-1, keepdim=True))
    bound.step.place(bound.step.lengths)
    return bound.token
