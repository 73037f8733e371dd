"""Estimates from samples with their intervals, and which differences are more than chance."""
