"""What is asked: one folder per suite with its tasks, prompts and scorers, and needles in haystacks.

`README.md` lists the suites.
"""
