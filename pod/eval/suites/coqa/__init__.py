"""CoQA: conversational questions about a story, as lm-eval's own task of that name, and every turn as in the official evaluation."""
