"""RULER: thirteen synthetic tasks at any length (arXiv:2404.06654)."""
