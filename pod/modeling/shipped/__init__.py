"""What an exported checkpoint carries: configuration, decoder, attention, caches. Flat files that import each other relatively,
torch and transformers, and nothing else of this package."""
