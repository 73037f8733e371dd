"""Configurations of large models, for layouts that need no weights."""

from transformers import LlamaConfig

LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
