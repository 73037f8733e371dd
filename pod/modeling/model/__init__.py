"""The files that an exported checkpoint contains: configuration, decoder, attention, caches.

They lie in one folder without subfolders. They import each other by relative imports, and torch and
transformers, but nothing else of this package.
"""
