"""The checks behind `doctor`, of either service."""
