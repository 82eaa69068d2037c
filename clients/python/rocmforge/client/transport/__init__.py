"""The way to the daemon: the channel, its TLS and pings, and the paths that are trusted."""
