"""Measure time and memory of whole models, and describe the machine on which they were measured.

``race`` compares decode speeds, ``measured_memory`` measures the peak memory of passes, ``max_batch`` finds
how many rows fit, and ``fill`` makes full caches without a prompt. Nothing here depends on evaluations.
"""
