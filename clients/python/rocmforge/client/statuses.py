"""gRPC statuses with google.rpc details, as the errors that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rocmforge.client.errors import BY_REASON, ServiceError

#: Metadata in which gRPC sends a google.rpc.Status.
_DETAILS = "grpc-status-details-bin"

_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


def error_from_status(status: status_pb2.Status, known: Mapping[str, type[ServiceError]] = BY_REASON) -> ServiceError:
    """The error that a status stands for, of the classes ``known`` by reason; for another reason, a plain ServiceError
    with the status's code and reason.
    """
    info, field, retry = error_details_pb2.ErrorInfo(), "", None
    for detail in status.details:
        bad, delay = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
    kind = known.get(info.reason)
    if kind is None:
        code = _NAMES.get(status.code, "UNKNOWN")
        kind = type("RemoteError", (ServiceError,), {"code": code, "reason": info.reason or "UNKNOWN"})
    error = kind(status.message, field=field, retry_after_s=retry)
    error.metadata = dict(info.metadata)
    return error


def error_from(failure: grpc.RpcError, known: Mapping[str, type[ServiceError]] = BY_REASON) -> ServiceError:
    """The error of a failed call. Without readable details, it keeps the status code and its reason is UNKNOWN."""
    status = status_pb2.Status(code=failure.code().value[0], message=failure.details() or failure.code().name)
    for key, value in failure.trailing_metadata() or ():
        if key == _DETAILS:
            try:
                sent = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if sent.code == status.code:  # details of another status say nothing about this one
                status = sent
    return error_from_status(status, known)
