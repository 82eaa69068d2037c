"""What callers of the engine may do beyond using it, and which calls need it."""

from __future__ import annotations

from services.common.access.policy import allowance

#: Draining the engine.
OPERATOR = "operator"

#: Each role with those that come with it.
INCLUDES = {OPERATOR: frozenset[str]()}

#: The role that each of these calls needs; all others are open to everyone who reaches the engine.
NEEDED = {"Drain": OPERATOR}

role_allowance = allowance(INCLUDES)
