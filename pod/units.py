"""Units of memory."""

GIB = 2**30
"""Bytes of a GiB."""
