"""What an exported checkpoint carries: configuration, decoder, attention, caches.

The files lie flat in one folder. They import each other relatively, torch and transformers, and nothing else
of this package.
"""
