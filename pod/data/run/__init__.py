"""A preparation from its settings to the published folder."""
