"""The mover: a process of the daemon's that copies pages between arenas, host memory and the outer tier."""
