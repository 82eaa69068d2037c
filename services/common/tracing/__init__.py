"""Traces: what a span is to the services, and OpenTelemetry, which is imported only where it is set up."""
