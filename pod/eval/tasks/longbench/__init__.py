"""LongBench and LongBench-E: 21 + 13 tasks as lm-eval YAML (`make_yaml` writes them), their data and their scorer."""
