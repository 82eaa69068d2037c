"""What callers of the daemon may do, and which calls need it."""

from __future__ import annotations

from services.common.access.policy import allowance

#: Sessions, and all that is in the caller's own.
ENGINE = "engine"
#: What is done to others' pages: evict, expire, drop, check, and explain by what others have cached.
OPERATOR = "operator"
#: Looking, without tokens.
VIEWER = "viewer"

#: Each role with those that come with it.
INCLUDES = {ENGINE: frozenset[str](), OPERATOR: frozenset({VIEWER}), VIEWER: frozenset[str]()}

#: The role that each call needs.
NEEDED = {
    "OpenSession": ENGINE,
    "AttachSession": ENGINE,
    "RenewSession": ENGINE,
    "CloseSession": ENGINE,
    "AllocatePages": ENGINE,
    "AppendTokens": ENGINE,
    "RemoveSequences": ENGINE,
    "GetSequence": ENGINE,  # OPERATOR for one of another's session, by its handle
    "ListSequences": VIEWER,  # of the caller's own session: ENGINE
    "ExplainPrefix": VIEWER,  # OPERATOR for what others have cached
    "GetStats": VIEWER,
    "WatchEvents": VIEWER,  # OPERATOR with tokens
    "EvictPages": OPERATOR,
    "ExpireSequences": OPERATOR,
    "ReleaseQuarantine": OPERATOR,
    "DropPool": OPERATOR,
    "Fsck": OPERATOR,
}

role_allowance = allowance(INCLUDES)
