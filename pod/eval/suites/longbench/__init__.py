"""LongBench and LongBench-E: 21 + 13 tasks, their data and their scorer."""
