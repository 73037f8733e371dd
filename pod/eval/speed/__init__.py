"""The task `efficiency`: time, memory by part, largest batches."""
