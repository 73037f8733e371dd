"""Which (layer, KV head) leads, follows or keeps its window: solved by least cost, with heads aligned across layers."""
