"""CoQA: conversational questions about a story.

It is asked as lm-eval's own task of that name, and with every turn as in the official evaluation.
"""
