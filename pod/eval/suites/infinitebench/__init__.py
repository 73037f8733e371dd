"""InfiniteBench: books cut in the middle, retrieval tasks built at a length (arXiv:2402.13718)."""
