"""Where pages come from: the daemon, or this process."""
