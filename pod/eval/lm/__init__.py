"""lm-eval through a compressed cache: its model class, its requests and batches, its tasks as tasks of an evaluation."""
