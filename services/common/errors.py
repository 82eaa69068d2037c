"""Every error a caller of either service can be told, in one table.

Domain code raises these; ``services.common.rpc`` alone turns them into gRPC statuses and back. Each class
states its status code (by gRPC's name), the ``ErrorInfo.reason`` clients can switch on, and whether trying again
later may help.
"""

from __future__ import annotations

from typing import ClassVar


class ServiceError(Exception):
    """Base of the table.

    ``field`` names the request field at fault (dotted, as in the proto); ``metadata`` carries numbers a program may
    want, as strings; ``retry_after_s`` is advice, in seconds.
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


class Internal(ServiceError):
    """A bug or damage on our side; nothing the caller did."""


class FieldInvalid(ServiceError):
    """A field is missing, malformed or outside its limits."""

    code, reason = "INVALID_ARGUMENT", "FIELD_INVALID"


# --- the KV-cache daemon ---------------------------------------------------------------------------------------------


class InvalidConfiguration(ServiceError):
    """A page layout or a setting that cannot be."""

    code, reason = "INVALID_ARGUMENT", "INVALID_CONFIGURATION"


class LayoutMismatch(ServiceError):
    """The pool exists with another layout."""

    code, reason = "FAILED_PRECONDITION", "LAYOUT_MISMATCH"


class ExceedsBudget(ServiceError):
    """The arena asked for does not fit the daemon's memory budget, or the memory it lies in."""

    code, reason = "FAILED_PRECONDITION", "EXCEEDS_BUDGET"


class TooManySessions(ServiceError):
    """The daemon's limit on sessions is reached."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS", 1.0


class SessionExpired(ServiceError):
    """The session ended, or belongs to an earlier run of the daemon: open a new one and recompute."""

    code, reason = "FAILED_PRECONDITION", "SESSION_EXPIRED"


class SessionNotAttached(ServiceError):
    """The session has not proved yet that it maps the arena."""

    code, reason = "FAILED_PRECONDITION", "SESSION_NOT_ATTACHED"


class AttachMismatch(ServiceError):
    """The canary differs: the engine mapped some other memory."""

    code, reason = "FAILED_PRECONDITION", "ATTACH_MISMATCH"


class AttachBusy(ServiceError):
    """Another session is attaching to GPU memory, which only one does at a time."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "ATTACH_BUSY", 0.2


class GpuError(ServiceError):
    """The GPU's runtime refused a call; the message has its words."""

    code, reason = "INTERNAL", "GPU_ERROR"


class SequenceUnknown(ServiceError):
    """No such sequence in the session."""

    code, reason = "NOT_FOUND", "SEQUENCE_UNKNOWN"


class SequenceRemoved(ServiceError):
    """The sequence was removed; a late or replayed call must not bring it back."""

    code, reason = "FAILED_PRECONDITION", "SEQUENCE_REMOVED"


class SequenceMismatch(ServiceError):
    """The sequence is open with another prompt, salt, retention or parent."""

    code, reason = "FAILED_PRECONDITION", "SEQUENCE_MISMATCH"


class PositionMismatch(ServiceError):
    """Tokens that leave a gap, differ from those recorded at their position, or lie behind the pages held."""

    code, reason = "FAILED_PRECONDITION", "POSITION_MISMATCH"


class CapacityExceeded(ServiceError):
    """No page is free or evictable now."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "NO_PAGES", 0.1


class ExceedsPool(ServiceError):
    """The demand could not be met by an empty pool either."""

    code, reason = "FAILED_PRECONDITION", "EXCEEDS_POOL"


class QuotaExceeded(ServiceError):
    """The session's page quota is used up; its own sequences have to end first."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", 0.1


class TooManySequences(ServiceError):
    """The session's limit on live sequences is reached."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_SEQUENCES", 1.0


class PoolUnknown(ServiceError):
    """No pool of this id."""

    code, reason = "NOT_FOUND", "POOL_UNKNOWN"


class PoolInUse(ServiceError):
    """The pool has sessions, or pages in quarantine."""

    code, reason = "FAILED_PRECONDITION", "POOL_IN_USE"


# --- the engine ------------------------------------------------------------------------------------------------------


class PromptTooLong(ServiceError):
    """The prompt leaves no room for a token in the model's context."""

    code, reason = "INVALID_ARGUMENT", "PROMPT_TOO_LONG"


class RequestExists(ServiceError):
    """A live request or a submitted generation has this id."""

    code, reason = "ALREADY_EXISTS", "REQUEST_EXISTS"


class RequestUnknown(ServiceError):
    """No request has this id."""

    code, reason = "NOT_FOUND", "REQUEST_UNKNOWN"


class QueueFull(ServiceError):
    """The engine's queue is at its limit, in requests or in tokens."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.0


class RequestLive(ServiceError):
    """The request is not over; cancel it first."""

    code, reason = "FAILED_PRECONDITION", "REQUEST_LIVE"


class TooManyWatchers(ServiceError):
    """The generation's limit on watchers is reached."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_WATCHERS", 1.0


class DeadlineExceeded(ServiceError):
    """The request's time was up before it was done."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class Draining(ServiceError):
    """The service is shutting down."""

    code, reason, retry_after_s = "UNAVAILABLE", "DRAINING", 1.0


class NotReady(ServiceError):
    """The service is starting."""

    code, reason, retry_after_s = "UNAVAILABLE", "NOT_READY", 1.0


class KvCacheDown(ServiceError):
    """The KV-cache daemon cannot be reached."""

    code, reason, retry_after_s = "UNAVAILABLE", "KVCACHE_DOWN", 1.0


class ForwardFailed(ServiceError):
    """The model's forward pass raised; the request is lost, the engine goes on."""

    code, reason = "INTERNAL", "FORWARD_FAILED"


class ModelInvalid(ServiceError):
    """A checkpoint that is missing, damaged or of an unknown kind."""

    code, reason = "FAILED_PRECONDITION", "MODEL_INVALID"


def _reasons(root: type[ServiceError]) -> dict[str, type[ServiceError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        found.update(_reasons(child))
    return found


#: reason -> class, for a client that rebuilds the error it was sent.
BY_REASON: dict[str, type[ServiceError]] = _reasons(ServiceError)
BY_REASON["INTERNAL"] = Internal
