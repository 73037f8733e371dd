"""How models and caches are judged: perplexity by position, passkey retrieval, bytes and speed, at equal bytes, in one report."""
