"""How a plan is found: which (layer, KV head) pairs lead, follow or keep their window.

The cost of each role is measured. A solver then finds the plan of least cost, with heads aligned across
layers.
"""
