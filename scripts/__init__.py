"""What the Makefile calls; the demo is also a command of the wheel."""
