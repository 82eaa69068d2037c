"""What both services share: errors, settings, gRPC serving, metrics, GPU handles."""
