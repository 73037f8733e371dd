"""Local data for tasks of lm-eval itself (MMLU, HellaSwag, ARC, GSM8K, TruthfulQA …)."""
