"""The decode engine: decodes in buffers allocated beforehand, by kernels and on CUDA by a recorded graph."""

from pod.engine.decode_engine import StaticEngine, attach, attach_for_generation
from pod.modeling.model.cache import PodCache

__all__ = ["StaticEngine", "attach", "attach_for_generation"]

PodCache.attach_engine = staticmethod(attach_for_generation)
