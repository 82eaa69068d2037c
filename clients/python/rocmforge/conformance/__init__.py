"""Whether a client of the KV-cache daemon keeps the laws of docs/clients.md: `python -m rocmforge.conformance`."""
