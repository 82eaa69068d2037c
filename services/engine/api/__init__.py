"""The engine's gRPC edge: its servicer, requests in, responses out."""
