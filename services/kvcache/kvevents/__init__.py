"""The prefix caches as vLLM's KV events, for routers that read those."""
