"""The memory of a session, mapped into this process: a file, or an allocation of a GPU."""
