"""GGUF files: header, shards, quantized blocks, vocabulary and tokenizer."""
