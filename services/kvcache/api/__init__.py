"""The daemon's gRPC edge: its servicer, and messages to domain objects and back."""
