"""Measure time and memory of whole models, and describe the machine on which they were measured.

``speed_comparison`` lets methods race, ``measured_memory`` measures the peak memory of passes, ``max_batch``
finds how many rows fit, and ``random_cache`` fills caches without a prompt. Nothing here depends on
evaluations.
"""
