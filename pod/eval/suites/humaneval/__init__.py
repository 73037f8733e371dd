"""HumanEval: completed functions, judged by their tests, each in a sandbox of its own."""
