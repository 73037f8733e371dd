"""What methods cost: time, memory by part, largest batches, decode speed; what a decode step must read."""
