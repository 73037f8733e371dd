"""What is measured without lm-eval: one file per task, found by its name.

See `pod.eval.suites.task_base` for the contract.
"""
