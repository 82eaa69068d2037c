"""What users of an engine see: first tokens, the time between tokens, and goodput, at several rates of arrivals."""
