"""Paged attention on a GPU: how a batch is laid out and launched."""
