"""What of a pool is published: the prefix cache, and the events of its links."""
