"""Which (layer, KV head) leads, follows or keeps its window.

The plan of least cost is solved for, with heads aligned across layers.
"""
