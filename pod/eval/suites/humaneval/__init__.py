"""HumanEval: completed functions, judged by running their tests in a process of its own with limits."""
