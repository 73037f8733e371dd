"""`pod bench`: decode speed of methods beside the dense cache.

The modules measure it, and compute which bytes a decode step must read.
"""
