"""The step call in flight: made beside the engine's step on the device, and sent again if it is not answered."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from rocmforge.client.demands import Demand, Grant
from rocmforge.client.errors import KvCacheDown, ServiceError, SessionExpired
from rocmforge.client.lease import Lease
from rocmforge.client.statuses import error_from
from rocmforge.kvcache.v1 import kvcache_pb2 as pb

#: How often a step call is sent before it counts as unanswered.
ATTEMPTS = 2

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

Reply = TypeVar("Reply", covariant=True)

#: A call of a step, and the demands that it makes.
Part = tuple[pb.AllocatePagesRequest, Items[Demand]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to all parts of a step."""

    epoch: int
    grants: list[Grant]


class Answering(Protocol[Reply]):
    """A call whose reply can be waited for."""

    def result(self) -> Reply:
        """The reply. Raises what the call raises."""


class Attempt(Generic[Reply]):
    """A call on its way to another thread, which makes it while this one has a step to run.

    An idle engine asks for the reply at once, before the other thread has begun: then this one makes the call, and
    neither waits for the other to wake up.
    """

    def __init__(self, caller: Executor, call: Callable[[], Reply]) -> None:
        self._call = call
        self._future = caller.submit(call)

    def result(self) -> Reply:
        """The reply. Raises what the call raises."""
        return self._call() if self._future.cancel() else self._future.result()


class Sending(Protocol):
    """What sends a step's parts: one attempt at a time."""

    @property
    def target(self) -> str:
        """The daemon's address, for errors."""

    def now(self) -> float:
        """The clock that leases are measured with."""

    def send(self, parts: list[Part], lease: Lease, traceparent: str) -> Answering[Answer]:
        """Start one attempt at all parts."""


class Step:
    """A step call in flight. Sent again unchanged if it is not answered: a replay changes nothing more."""

    def __init__(self, sending: Sending, lease: Lease, parts: list[Part], traceparent: str = "") -> None:
        self._sending, self._lease, self._parts, self._traceparent = sending, lease, parts, traceparent
        self._send()

    def _send(self) -> None:
        self._sent_at = self._sending.now()
        self._attempt = self._sending.send(self._parts, self._lease, self._traceparent)

    def result(self) -> list[Grant]:
        """Wait for the grants, one per demand, in order. What one sequence is refused is the ``error`` of its grant.

        Raises SessionExpired when the session is over, KvCacheDown when there was no answer and the same step may be
        tried again, and whatever the whole call is refused with.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                self._send()
            try:
                answer = self._attempt.result()
                break
            except grpc.RpcError as failure:
                error = error_of(failure, self._sending.target)
                if isinstance(error, SessionExpired):
                    self._lease.expired = True  # by the daemon's word, whatever this clock says
                if not isinstance(error, KvCacheDown) or attempt + 1 == ATTEMPTS:
                    raise error from failure
        self._lease.renewed(self._sent_at, answer.epoch)
        if self._lease.expired:
            raise SessionExpired("the session of this step has ended, and its pages are of others")
        return answer.grants


def error_of(failure: grpc.RpcError, target: str) -> ServiceError:
    """The error of a failed call; KvCacheDown if nobody answered."""
    error = error_from(failure)
    if failure.code() in _SILENT:
        return KvCacheDown(f"no answer from the KV-cache daemon at {target}: {error.message}")
    return error
