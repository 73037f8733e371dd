"""From documents to token ids."""
