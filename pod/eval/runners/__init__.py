"""What is measured without lm-eval: one file per task, found by its name. See `base.Task` for the contract."""
