"""How models and caches are judged, in one report, at equal bytes.

Measured are perplexity by position, passkey retrieval, bytes and speed.
"""
