"""L-Eval: its 20 tasks, their data, prompts and scorers."""
