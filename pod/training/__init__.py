"""How a model is trained under a plan, with ZeRO and Ulysses sequence parallelism.

``run`` makes the steps, ``predict`` estimates memory and time and chooses the parallel layout, ``checkpoint``
saves and restores, and ``observe`` logs metrics and evaluates held-out text.
"""
