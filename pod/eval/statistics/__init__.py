"""What samples say: estimates with intervals, and which differences are more than chance."""
