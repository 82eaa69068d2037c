"""A proxy before the daemon, which loses, delays and repeats what passes, and plays a daemon that was restarted."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rocmforge.client.errors import PagesFilling
from rocmforge.kvcache.v1 import kvcache_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"]
DELAY_S = 0.5
#: Larger than any time that a client waits for an answer.
FOREVER_S = 60.0


class Fault(Enum):
    """What happens to one call."""

    LOSE_REQUEST = auto()
    LOSE_REPLY = auto()
    DELAY_REPLY = auto()
    REPEAT = auto()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that passed: when it came, by the monotonic clock, and whether its reply was sent."""

    method: str
    request: Any
    at: float
    answered: bool


class Proxy:
    """Listens at ``address``, a unix socket, and calls the daemon through ``channel``, which it closes.

    ``edit`` may change an OpenSession reply. ``filling`` has the delays, in seconds, after which the next openings that
    offer a wait are to be sent again: each is refused once as one whose pages are being filled. Sessions that were
    opened before `restart` are unknown after it.
    """

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address = address
        self.edit: Callable[[Any], None] | None = None
        self.filling: list[float] = []
        self._channel = channel
        self._faults: dict[str, collections.deque[Fault]] = collections.defaultdict(collections.deque)
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._heard.set()
        self._epoch_mask = 0
        self._gone: set[str] = set()
        self._sessions: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers([_Handlers(self)])
        self._server.add_insecure_port(address)
        self._server.start()

    def inject(self, method: str, *faults: Fault) -> None:
        """Let these happen to the next calls of a method, one each."""
        self._faults[method].extend(faults)

    def silence(self, on: bool) -> None:
        """Whether nothing is answered, nor reaches the daemon."""
        if on:
            self._heard.clear()
        else:
            self._heard.set()

    def restart(self, *, sessions_end: bool = True) -> None:
        """Be another run of the daemon: another epoch, and with ``sessions_end`` no session of the one before."""
        self._epoch_mask ^= 0x5EED_0000_5EED
        if sessions_end:
            self._gone |= self._sessions

    def calls(self, *methods: str) -> list[Call]:
        """The calls of these methods so far, or all."""
        with self._lock:
            return [call for call in self._calls if not methods or call.method in methods]

    def close(self) -> None:
        """Stop, and end the sessions that its client opened, which has ended itself: nothing writes their pages."""
        self._heard.set()
        self._server.stop(0).wait()
        for session in self._sessions:
            with contextlib.suppress(grpc.RpcError):
                self._forward("CloseSession", pb.CloseSessionRequest(session_id=session).SerializeToString())
        self._channel.close()

    def serve(self, method: str, request: bytes, context: Any) -> bytes:
        """Pass one call, or not."""
        at, kind = time.monotonic(), SERVICE.methods_by_name[method]
        message = _class(kind.input_type).FromString(request)
        if not self._heard.is_set():
            self._note(method, message, at, answered=False)
            self._heard.wait(min(FOREVER_S, context.time_remaining() or FOREVER_S))
            context.abort(grpc.StatusCode.UNAVAILABLE, "nothing is heard")
        fault = self._faults[method].popleft() if self._faults[method] else None
        if fault is Fault.LOSE_REQUEST:
            self._note(method, message, at, answered=False)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the request was lost")
        session = getattr(message, "session_id", "")
        if session in self._gone and method != "CloseSession":
            self._note(method, message, at, answered=True)
            _expired(context)
        refused: list[pb.SequenceGrant] = []
        if method == "AllocatePages" and self.filling:
            request, refused = self._refused(request)
        try:
            reply = self._forward(method, request)
            if fault is Fault.REPEAT:
                reply = self._forward(method, request)
        except grpc.RpcError as failure:
            self._note(method, message, at, answered=True)
            context.set_trailing_metadata(failure.trailing_metadata() or ())
            context.abort(failure.code(), failure.details())
        self._note(method, message, at, answered=fault is not Fault.LOSE_REPLY)
        if fault is Fault.LOSE_REPLY:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        if fault is Fault.DELAY_REPLY:
            time.sleep(DELAY_S)
        if refused:
            answer = pb.AllocatePagesResponse.FromString(reply)
            answer.grants.extend(refused)
            reply = answer.SerializeToString()
        return self._edited(method, reply, session)

    def _refused(self, request: bytes) -> tuple[bytes, list[pb.SequenceGrant]]:
        """Returns a call without the openings at its end that offer a wait, and their refusals, in order."""
        message, refused = pb.AllocatePagesRequest.FromString(request), list[pb.SequenceGrant]()
        while self.filling and message.demands and message.demands[-1].opening.HasField("fill_wait"):
            name = message.demands.pop().opening.sequence_id
            refused.insert(0, pb.SequenceGrant(sequence_id=name, error=_filling(self.filling.pop(0))))
        return message.SerializeToString(), refused

    def _forward(self, method: str, request: bytes) -> bytes:
        reply: bytes = self._channel.unary_unary(f"/{SERVICE.full_name}/{method}")(request, timeout=FOREVER_S)
        return reply

    def _edited(self, method: str, reply: bytes, session: str) -> bytes:
        message = _class(SERVICE.methods_by_name[method].output_type).FromString(reply)
        message.epoch ^= self._epoch_mask
        if method == "OpenSession":
            self._sessions.add(message.session_id)
            if self.edit is not None:
                self.edit(message)
        if method == "CloseSession" and session in self._gone:
            message.closed = False
        edited: bytes = message.SerializeToString()
        return edited

    def _note(self, method: str, request: Any, at: float, *, answered: bool) -> None:
        with self._lock:
            self._calls.append(Call(method, request, at, answered))


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def service(self, details: Any) -> Any:
        service, _, method = details.method.lstrip("/").partition("/")
        if service != SERVICE.full_name or method not in SERVICE.methods_by_name:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._proxy.serve(method, request, context))


def _class(descriptor: Any) -> Any:
    return getattr(pb, descriptor.name)


def _filling(retry_s: float) -> status_pb2.Status:
    """The refusal of an opening whose pages are being copied from a lower tier."""
    info, retry = any_pb2.Any(), any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=PagesFilling.reason, domain="rocmforge.kvcache"))
    delay = error_details_pb2.RetryInfo()
    delay.retry_delay.FromNanoseconds(round(retry_s * 1e9))
    retry.Pack(delay)
    code = grpc.StatusCode[PagesFilling.code].value[0]
    return status_pb2.Status(code=code, message="its pages are being filled", details=[info, retry])


def _expired(context: Any) -> None:
    """Refuse as a daemon does that does not know the session."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason="SESSION_EXPIRED", domain="rocmforge.kvcache"))
    code, words = grpc.StatusCode.FAILED_PRECONDITION, "the session has ended: open a new one"
    status = status_pb2.Status(code=code.value[0], message=words, details=[info])
    context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
    context.abort(code, words)
