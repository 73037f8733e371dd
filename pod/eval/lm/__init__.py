"""lm-eval through a compressed cache.

This folder has the model class that lm-eval calls, lm-eval's requests and their batches, and lm-eval's tasks
as tasks of an evaluation.
"""
