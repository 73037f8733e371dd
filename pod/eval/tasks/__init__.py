"""Benchmarks for lm-eval: a folder per suite with YAML files, prompts and scorers. `README.md` lists them; `data` reads their files."""
