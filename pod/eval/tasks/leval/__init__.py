"""L-Eval: its 20 tasks as lm-eval YAML (`make_yaml` writes them), their data, prompts and scorers."""
