"""The table of every error that either service returns to a caller: the daemon's, which its clients know, too, and the
engine's own.

Domain code raises these; only ``services.common.rpc`` converts them to gRPC statuses and back. Each class declares
its status code (by gRPC's name), the ``ErrorInfo.reason`` that clients can switch on, and whether a later retry may
succeed.
"""

from __future__ import annotations

from rocmforge.client.errors import (
    AttachBusy,
    AttachMismatch,
    CapacityExceeded,
    Draining,
    EngineAlive,
    ExceedsBudget,
    ExceedsPool,
    ExceedsShare,
    FieldInvalid,
    GpuError,
    HostMemoryExceeded,
    Internal,
    InvalidConfiguration,
    KvCacheDown,
    LayoutMismatch,
    NotReady,
    PagesFilling,
    PoolInUse,
    PoolUnknown,
    PositionMismatch,
    QuarantineUnknown,
    QuotaExceeded,
    RoleMissing,
    SequenceMismatch,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
    SessionExpired,
    SessionNotAttached,
    TooManyCalls,
    TooManyPools,
    TooManySequences,
    TooManySessions,
    Unauthenticated,
    reasons,
)

__all__ = [
    "BY_REASON",
    "AttachBusy",
    "AttachMismatch",
    "CapacityExceeded",
    "DeadlineExceeded",
    "Draining",
    "EngineAlive",
    "ExceedsBudget",
    "ExceedsPool",
    "ExceedsShare",
    "FieldInvalid",
    "ForwardFailed",
    "GpuError",
    "HostMemoryExceeded",
    "Internal",
    "InvalidConfiguration",
    "KvCacheDown",
    "LayoutMismatch",
    "ModelInvalid",
    "NotReady",
    "PagesFilling",
    "PoolInUse",
    "PoolUnknown",
    "PositionMismatch",
    "PromptTooLong",
    "QuarantineUnknown",
    "QueueFull",
    "QuotaExceeded",
    "RequestExists",
    "RequestLive",
    "RequestUnknown",
    "RoleMissing",
    "SequenceMismatch",
    "SequenceRemoved",
    "SequenceUnknown",
    "ServiceError",
    "SessionExpired",
    "SessionNotAttached",
    "TooManyCalls",
    "TooManyPools",
    "TooManySequences",
    "TooManySessions",
    "TooManyWatchers",
    "Unauthenticated",
]


class PromptTooLong(ServiceError):
    """The prompt leaves no room in the model's context for a generated token."""

    code, reason = "INVALID_ARGUMENT", "PROMPT_TOO_LONG"


class RequestExists(ServiceError):
    """A live request or a submitted generation has this id."""

    code, reason = "ALREADY_EXISTS", "REQUEST_EXISTS"


class RequestUnknown(ServiceError):
    """No request has this id."""

    code, reason = "NOT_FOUND", "REQUEST_UNKNOWN"


class QueueFull(ServiceError):
    """The engine's queue has reached its limit on requests or tokens."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.0


class RequestLive(ServiceError):
    """The request has not ended; cancel it first."""

    code, reason = "FAILED_PRECONDITION", "REQUEST_LIVE"


class TooManyWatchers(ServiceError):
    """The generation has reached its limit on watchers."""

    code, reason, retry_after_s = "RESOURCE_EXHAUSTED", "TOO_MANY_WATCHERS", 1.0


class DeadlineExceeded(ServiceError):
    """The request's deadline passed before it finished."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class ForwardFailed(ServiceError):
    """The model's forward pass raised an exception; the request is lost, the engine keeps running."""

    code, reason = "INTERNAL", "FORWARD_FAILED"


class ModelInvalid(ServiceError):
    """The checkpoint is missing, damaged or of an unsupported kind."""

    code, reason = "FAILED_PRECONDITION", "MODEL_INVALID"


#: reason -> class: lets a client reconstruct the error it received.
BY_REASON: dict[str, type[ServiceError]] = {**reasons(ServiceError), Internal.reason: Internal}
