"""Decode speed of methods beside the dense cache.

The modules hold what `pod bench` measures, and which bytes a decode step must read.
"""
