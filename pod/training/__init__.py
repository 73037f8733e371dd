"""How a model is adapted: similarity and plans, ZeRO-3 + Ulysses training, checkpoints, export."""
