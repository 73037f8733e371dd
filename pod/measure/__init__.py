"""Time and memory of whole models, and on which machine: who decodes how fast, what a pass takes, how many rows fit. Nothing here knows of
evaluations."""
