"""Decoding at static shapes: preallocated stores, the decode kernels, and on CUDA one graph for the whole step."""

from pod.engine.engine import StaticEngine, attach, attach_for_generation

__all__ = ["StaticEngine", "attach", "attach_for_generation"]
