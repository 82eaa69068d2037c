"""The engine's gRPC edge: the servicer, request validation, and response messages."""
