"""What is measured without lm-eval: one file per task, found by its name.

See `pod.eval.suites.base` for the contract.
"""
