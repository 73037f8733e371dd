"""Measure models and cache methods, and compare them in one report at equal bytes.

It measures perplexity by position, passkey retrieval, bytes and speed; more tasks are in `tasks` and
`suites`, and lm-eval adds its own. Start reading in `runner.py`.
"""
