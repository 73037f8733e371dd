"""lm-eval through a compressed cache.

It has lm-eval's model class, its requests and batches, and its tasks as tasks of an evaluation.
"""
