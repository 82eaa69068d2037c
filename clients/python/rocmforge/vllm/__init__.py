"""A connector that lets vLLM share prefixes through ROCmForge's KV-cache daemon: docs/vllm.md."""
