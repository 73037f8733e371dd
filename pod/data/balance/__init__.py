"""The same number of tokens from every length interval."""
