"""Decode speed of methods beside the dense cache: what `launch/bench.py` measures, and what a decode step must read."""
