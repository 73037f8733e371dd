"""CoQA: conversational questions about a story.

One task asks the last question of each story, as lm-eval's task `coqa`; the other asks every question, as the
official evaluation.
"""
