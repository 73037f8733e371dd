"""Packed rows and held-out text: the folder that preparation leaves and training reads."""
