"""Benchmarks: one folder per suite with its tasks, prompts and scorers, and what needle tasks share.

`README.md` lists the suites.
"""
