"""Errors on the wire: converts the errors of ``services.common.errors`` to gRPC statuses and back.

A servicer method decorated with ``@maps_errors`` raises ``ServiceError``; the caller receives its status code with
``google.rpc.ErrorInfo``, plus ``BadRequest`` if a field is at fault and ``RetryInfo`` if a retry may succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2, descriptor_pool, duration_pb2, message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rocmforge.client.statuses import error_from as decoded_failure
from rocmforge.client.statuses import error_from_status as decoded
from services.common.access.identity import ANYONE, CALLER, Identity
from services.common.access.in_flight import InFlight
from services.common.access.tokens import Tokens
from services.common.call_stats import CallStats
from services.common.edge.message_limit import MessageLimit, MessageLimits
from services.common.errors import BY_REASON, FieldInvalid, Internal, ServiceError, Unauthenticated
from services.common.tracing.span import SPAN, Span, Tracing

log = structlog.get_logger()

Handler = TypeVar("Handler", bound=Callable[..., Any])

#: Who makes a call, by its gRPC context.
Identify = Callable[[Any], Identity]

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
    """The inverse of ``status_of``; for an unknown reason, a plain ServiceError with the status's code and reason."""
    return decoded(status, BY_REASON)


def error_from(failure: grpc.RpcError) -> ServiceError:
    """The error of a failed call; without details, it keeps the status code and its reason is UNKNOWN."""
    return decoded_failure(failure, BY_REASON)


async def _abort(context: Any, error: ServiceError, domain: str) -> NoReturn:
    # gRPC keeps the exception that this raises with the call. A frame in its traceback that knew the call would make
    # that a cycle, and the request, which may be large, would wait in it for a garbage collection.
    aborting = context.abort_with_status(rpc_status.to_status(status_of(error, domain)))
    del context
    await aborting
    raise error  # abort_with_status raises; this is for the type checker


def unexpected(method: str) -> Internal:
    """Log the exception being handled, which is a bug, under a new id. Returns the caller's error, with only the id."""
    error_id = uuid.uuid4().hex
    log.exception("rpc_failed", method=method, error_id=error_id)
    return Internal(f"internal error {error_id}; see the service's log", error_id=error_id)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands in for a message that was not or could not be parsed; ``why`` is for its sender."""

    why: str


def _checked(service: str, name: str, handler: grpc.RpcMethodHandler, limit: MessageLimit) -> grpc.RpcMethodHandler:
    """The handler with messages refused that exceed the limit, before they are parsed, or cannot be parsed."""
    parse = handler.request_deserializer
    kind: type[Message] | None = None  # of a service without a descriptor only the bytes are limited
    with contextlib.suppress(KeyError):
        method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        kind = message_factory.GetMessageClass(method.input_type)

    def parse_or_say(data: bytes) -> Any:
        why = limit.why_refused(name, data, kind)
        if why is not None:
            return Unreadable(why)
        try:
            return parse(data)
        except DecodeError as error:
            return Unreadable(f"the message cannot be parsed: {error}")

    return handler._replace(request_deserializer=parse_or_say)


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands in for the message of a call that is refused before its servicer sees it."""

    error: ServiceError


def _counted(
    service: str,
    name: str,
    handler: grpc.RpcMethodHandler,
    calls: CallStats,
    identify: Identify,
    in_flight: InFlight,
    tracing: Tracing | None,
) -> grpc.RpcMethodHandler:
    """The handler with its calls counted and traced, and `CALLER` and `SPAN` set while one is served.

    A call cancelled by its caller, or past its deadline, is CANCELLED.
    """
    method = f"{service}/{name}"

    def begun(context: Any) -> Span | None:
        if tracing is None:
            return None
        span = tracing.serve(method, context.invocation_metadata() or ())
        SPAN.set(span)
        return span

    def ended(context: Any, began: float, code: str | None, span: Span | None) -> None:
        status_set = context.code() or 0
        code = code or _NAMES.get(status_set if isinstance(status_set, int) else status_set.value[0], "UNKNOWN")
        took = time.monotonic() - began
        calls.done(name, code, took)
        if span is not None and tracing is not None:
            tracing.end(span, code)
        log.debug("rpc", method=name, code=code, seconds=round(took, 6))

    if handler.response_streaming:
        streams = handler.unary_stream

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            began, code, span = time.monotonic(), None, begun(context)
            caller = identify(context)
            CALLER.set(caller)
            refusal = in_flight.begin(caller)
            responses = streams(request if refusal is None else Refused(refusal), context)
            try:
                async for response in responses:
                    yield response
            except (asyncio.CancelledError, GeneratorExit):
                code = "CANCELLED"
                raise
            finally:
                if refusal is None:
                    in_flight.end(caller)
                ended(context, began, code, span)
                del context  # as in ``_abort``
                await responses.aclose()

        return handler._replace(unary_stream=stream)
    answers = handler.unary_unary

    async def unary(request: Any, context: Any) -> Any:
        began, code, span = time.monotonic(), None, begun(context)
        caller = identify(context)
        CALLER.set(caller)
        refusal = in_flight.begin(caller)
        try:
            return await answers(request if refusal is None else Refused(refusal), context)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            if refusal is None:
                in_flight.end(caller)
            ended(context, began, code, span)
            del context  # as in ``_abort``

    return handler._replace(unary_unary=unary)


def certified(context: Any) -> Identity:
    """Who calls over mutual TLS: the certificate's common name or, if it has none, its first alternative name."""
    found = context.auth_context()
    names = [*found.get("x509_common_name", ()), *found.get("x509_subject_alternative_name", ())]
    return Identity.of_certificate(next((name.decode(errors="replace") for name in names if name), ""))


#: A caller who would have to show a token, and shows none, or a wrong one.
REFUSED = Identity("refused")


def bearing(tokens: Tokens, otherwise: Identify, *, required: bool) -> Identify:
    """Who calls by the token that a call has; without one whoever ``otherwise`` says, but with ``required`` not
    `ANYONE`.
    """

    def identify(context: Any) -> Identity:
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                return tokens.bearer(value) or REFUSED
        identity = otherwise(context)
        return REFUSED if required and identity == ANYONE else identity

    return identify


def unproven(context: Any) -> Identity:
    """Who calls where nothing shows it."""
    return ANYONE


class Readable:
    """Wraps a server while a servicer is added to it, so that messages beyond their method's limit, and unparsable
    ones, reach the servicer's methods as `Unreadable` instead of failing with UNKNOWN inside gRPC. ``calls`` counts the
    calls served, `CALLER` says by whom, ``in_flight`` limits them, and ``tracing`` begins the spans of those sampled.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        calls: CallStats,
        limits: MessageLimits,
        identify: Identify = unproven,
        in_flight: InFlight | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._server = server
        self._calls = calls
        self._limits = limits
        self._identify = identify
        self._in_flight = in_flight or InFlight()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Forwards to the server; the methods registered below take precedence."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        """Forwards to the server, with the handlers wrapped."""
        served = {
            name: _counted(
                service,
                name,
                _checked(service, name, handler, self._limits.of(name)),
                self._calls,
                self._identify,
                self._in_flight,
                self._tracing,
            )
            for name, handler in handlers.items()
        }
        self._server.add_registered_method_handlers(service, served)


def _check_call(request: Any) -> None:
    if CALLER.get() is REFUSED:
        raise Unauthenticated("the call needs a token of this service: authorization: Bearer TOKEN")
    if isinstance(request, Refused):
        raise request.error
    if isinstance(request, Unreadable):
        raise FieldInvalid(request.why)


def maps_errors(domain: str) -> Callable[[Handler], Handler]:
    """Decorate a grpc.aio servicer method, unary or server-streaming, to report its errors as rich statuses.

    Any other exception is a bug: it is logged under an id, and the caller receives only that id. A message that
    ``Readable`` refused is FIELD_INVALID, and a caller who should have shown a token is UNAUTHENTICATED.
    """

    def decorate(handler: Handler) -> Handler:
        if inspect.isasyncgenfunction(handler):

            @functools.wraps(handler)
            async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
                failed: ServiceError | None = None
                responses = handler(self, request, context)
                try:
                    _check_call(request)
                    async for response in responses:
                        yield response
                except ServiceError as error:
                    failed = error.bare()
                except Exception:
                    failed = unexpected(handler.__name__)
                finally:
                    await responses.aclose()
                if failed is not None:
                    aborting = _abort(context, failed, domain)
                    del context  # as in ``_abort``
                    await aborting

            return stream  # type: ignore[return-value]

        @functools.wraps(handler)
        async def unary(self: Any, request: Any, context: Any) -> Any:
            try:
                _check_call(request)
                return await handler(self, request, context)
            except ServiceError as error:
                failed = error.bare()
            except Exception:
                failed = unexpected(handler.__name__)
            aborting = _abort(context, failed, domain)
            del context  # as in ``_abort``
            await aborting

        return unary  # type: ignore[return-value]

    return decorate
