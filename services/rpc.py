"""Errors on the wire: the table of ``services.errors`` to gRPC statuses and back, in one place.

A servicer method wears ``@maps_errors`` and raises ``ServiceError``; the caller sees the status code with
``google.rpc.ErrorInfo``, plus ``BadRequest`` when a field is at fault and ``RetryInfo`` when trying again may help.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.errors import BY_REASON, Internal, ServiceError

log = structlog.get_logger()

Handler = TypeVar("Handler", bound=Callable[..., Any])

_CODES: dict[str, grpc.StatusCode] = {code.name: code for code in grpc.StatusCode}
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def status_of(error: ServiceError, domain: str) -> status_pb2.Status:
    """The rich status of an error; ``domain`` goes into its ErrorInfo."""
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=error.metadata),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=_CODES[error.code].value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_from_status(status: status_pb2.Status) -> ServiceError:
    """The error that ``status_of`` made ``status`` from; a plain ServiceError for a stranger's."""
    info, field, retry = error_details_pb2.ErrorInfo(), "", None
    for detail in status.details:
        bad, delay = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
    kind = BY_REASON.get(info.reason)
    if kind is None:
        kind = type("RemoteError", (ServiceError,), {"code": _NAMES[status.code], "reason": info.reason or "UNKNOWN"})
    error = kind(status.message, field=field, retry_after_s=retry)
    error.metadata = dict(info.metadata)
    return error


def error_from(failure: grpc.RpcError) -> ServiceError:
    """The error behind a failed call; one without details keeps its status code and says so in its reason."""
    status = rpc_status.from_call(failure)
    if status is None:
        status = status_pb2.Status(code=failure.code().value[0], message=failure.details() or failure.code().name)
    return error_from_status(status)


async def _abort(context: Any, error: ServiceError, domain: str) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status_of(error, domain)))
    raise error  # abort_with_status raises; this line is for the type checker


async def _abort_unexpected(context: Any, method: str, domain: str) -> NoReturn:
    error_id = uuid.uuid4().hex
    log.exception("rpc_failed", method=method, error_id=error_id)
    await _abort(context, Internal(f"internal error {error_id}; the log tells more", error_id=error_id), domain)


def maps_errors(domain: str) -> Callable[[Handler], Handler]:
    """Decorate a grpc.aio servicer method, unary or server-streaming, to report its errors as rich statuses.

    What is not a ServiceError is a bug: it is logged with an id, and the caller is told the id alone.
    """

    def decorate(handler: Handler) -> Handler:
        if inspect.isasyncgenfunction(handler):

            @functools.wraps(handler)
            async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
                responses = handler(self, request, context)
                try:
                    async for response in responses:
                        yield response
                except ServiceError as error:
                    await _abort(context, error, domain)
                except Exception:
                    await _abort_unexpected(context, handler.__name__, domain)
                finally:
                    await responses.aclose()

            return stream  # type: ignore[return-value]

        @functools.wraps(handler)
        async def unary(self: Any, request: Any, context: Any) -> Any:
            try:
                return await handler(self, request, context)
            except ServiceError as error:
                await _abort(context, error, domain)
            except Exception:
                await _abort_unexpected(context, handler.__name__, domain)

        return unary  # type: ignore[return-value]

    return decorate
