"""Time and memory of whole models, and the machine on which they were measured.

The modules measure who decodes how fast, what a pass takes, and how many rows fit. Nothing here knows of
evaluations.
"""
