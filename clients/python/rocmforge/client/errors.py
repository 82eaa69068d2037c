"""Every error that a client of the KV-cache daemon sees, as an exception.

Each class declares its status code (by gRPC's name), the ``ErrorInfo.reason`` that the daemon sends, and whether a
later retry may succeed. `statuses` converts them from gRPC statuses. Pure Python: nothing here imports gRPC.
"""

from __future__ import annotations

from typing import ClassVar, Self


class ServiceError(Exception):
    """Base of the table.

    ``field`` names the request field at fault (dotted, as in the proto); ``metadata`` carries values for programs, as
    strings; ``retry_after_s`` is the suggested retry delay in seconds, None if a retry cannot help.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    retry_after_s: float | None = None

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None, **metadata: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = {key: str(value) for key, value in metadata.items()}
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def bare(self) -> Self:
        """This error without where it was raised, which keeps all that was at hand there, requests included.

        An error that a function keeps for later would keep that function's own frame: a cycle.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class Internal(ServiceError):
    """A bug or corrupted state in the service; the request is not at fault."""


class FieldInvalid(ServiceError):
    """A field is missing, malformed or outside its limits."""

    code, reason = "INVALID_ARGUMENT", "FIELD_INVALID"


class RoleMissing(ServiceError):
    """The caller's identity lacks the role that the call needs."""

    code, reason = "PERMISSION_DENIED", "ROLE_MISSING"


class TooManyCalls(ServiceError):
    """The caller's identity has reached its limit on calls in flight."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_CALLS", 0.1


class Unauthenticated(ServiceError):
    """The service takes tokens, and the call has no valid one."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


class Draining(ServiceError):
    """The service is shutting down."""

    code, reason, retry_after_s = "UNAVAILABLE", "DRAINING", 1.0


class NotReady(ServiceError):
    """The service is starting."""

    code, reason, retry_after_s = "UNAVAILABLE", "NOT_READY", 1.0


class KvCacheDown(ServiceError):
    """The KV-cache daemon cannot be reached."""

    code, reason, retry_after_s = "UNAVAILABLE", "KVCACHE_DOWN", 1.0


# --- the KV-cache daemon ---------------------------------------------------------------------------------------------


class InvalidConfiguration(ServiceError):
    """A page layout or a setting is invalid."""

    code, reason = "INVALID_ARGUMENT", "INVALID_CONFIGURATION"


class LayoutMismatch(ServiceError):
    """The pool exists with a different layout."""

    code, reason = "FAILED_PRECONDITION", "LAYOUT_MISMATCH"


class ExceedsBudget(ServiceError):
    """The requested arena exceeds the daemon's memory budget, or the memory that would back it."""

    code, reason = "FAILED_PRECONDITION", "EXCEEDS_BUDGET"


class HostMemoryExceeded(ServiceError):
    """The daemon's own memory, outside the arenas, is used up: some of what is there must go first."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "HOST_MEMORY_EXCEEDED", 1.0


class TooManySessions(ServiceError):
    """The daemon, or the caller's identity, has reached its limit on sessions."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS", 1.0


class TooManyPools(ServiceError):
    """The caller's identity has reached its limit on pools."""

    code, reason = "RESOURCE_EXHAUSTED", "TOO_MANY_POOLS"


class ExceedsShare(ServiceError):
    """The requested arena exceeds the share of the memory budget that one identity may have."""

    code, reason = "FAILED_PRECONDITION", "EXCEEDS_SHARE"


class SessionExpired(ServiceError):
    """The session has ended, or belongs to an earlier run of the daemon: open a new one and recompute."""

    code, reason = "FAILED_PRECONDITION", "SESSION_EXPIRED"


class SessionNotAttached(ServiceError):
    """The session has not yet proved that it maps the arena."""

    code, reason = "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED"


class AttachMismatch(ServiceError):
    """The canary does not match: the engine mapped different memory."""

    code, reason = "FAILED_PRECONDITION", "ATTACH_MISMATCH"


class AttachBusy(ServiceError):
    """Another session is attaching to GPU memory; only one may attach at a time."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "ATTACH_BUSY", 0.2


class GpuError(ServiceError):
    """A call of the GPU runtime failed; the message quotes the runtime's error."""

    code, reason = "INTERNAL", "GPU_ERROR"


class SequenceUnknown(ServiceError):
    """The session has no such sequence."""

    code, reason = "NOT_FOUND", "SEQUENCE_UNKNOWN"


class SequenceRemoved(ServiceError):
    """The sequence was removed; a late or replayed call must not recreate it."""

    code, reason = "FAILED_PRECONDITION", "SEQUENCE_REMOVED"


class SequenceMismatch(ServiceError):
    """The sequence was opened with a different prompt, salt, retention or parent."""

    code, reason = "FAILED_PRECONDITION", "SEQUENCE_MISMATCH"


class PositionMismatch(ServiceError):
    """The tokens leave a gap, differ from those recorded at their position, or lie beyond the pages held."""

    code, reason = "FAILED_PRECONDITION", "POSITION_MISMATCH"


class CapacityExceeded(ServiceError):
    """No page is currently free or evictable."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "NO_PAGES", 0.1


class PagesFilling(ServiceError):
    """Pages of the prompt are being copied from a lower tier: opened again later, the sequence finds them cached."""

    code, reason, retry_after_s = "UNAVAILABLE", "PAGES_FILLING", 0.01


class ExceedsPool(ServiceError):
    """The demand exceeds the whole pool: even an empty one could not meet it."""

    code, reason = "FAILED_PRECONDITION", "EXCEEDS_POOL"


class QuotaExceeded(ServiceError):
    """The session's page quota is used up, or its identity's share of a pool that others wait for."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", 0.1


class TooManySequences(ServiceError):
    """The session has reached its limit on live sequences."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_SEQUENCES", 1.0


class PoolUnknown(ServiceError):
    """No pool has this id."""

    code, reason = "NOT_FOUND", "POOL_UNKNOWN"


class PoolInUse(ServiceError):
    """The pool has sessions, or pages in quarantine."""

    code, reason = "FAILED_PRECONDITION", "POOL_IN_USE"


class QuarantineUnknown(ServiceError):
    """No lost session of this name has pages or memory in quarantine."""

    code, reason = "NOT_FOUND", "QUARANTINE_UNKNOWN"


class EngineAlive(ServiceError):
    """The lost session's process is alive and may write its pages: nobody can vouch for it but itself."""

    code, reason = "FAILED_PRECONDITION", "ENGINE_ALIVE"


def reasons(root: type[ServiceError]) -> dict[str, type[ServiceError]]:
    """The classes derived from ``root`` so far, and itself, by reason."""
    found = {root.reason: root}
    for child in root.__subclasses__():
        found.update(reasons(child))
    return found


#: reason -> class: lets a client reconstruct the error it received.
BY_REASON: dict[str, type[ServiceError]] = {**reasons(ServiceError), Internal.reason: Internal}
