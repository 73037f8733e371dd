"""Decoding at static shapes: preallocated buffers, the decode kernels, and on CUDA one graph per step."""

from pod.engine.decode_engine import StaticEngine, attach, attach_for_generation
from pod.modeling.model.cache import PodCache

__all__ = ["StaticEngine", "attach", "attach_for_generation"]

PodCache.attach_engine = staticmethod(attach_for_generation)
