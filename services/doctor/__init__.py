"""The checks of both services' `doctor` commands."""
