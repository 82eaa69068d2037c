"""Delivers events from the engine's thread to readers: streams, submitted generations, throttling."""
