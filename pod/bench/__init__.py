"""Decode speed of methods beside the dense cache: what `pod bench` measures, and what a decode step must read."""
