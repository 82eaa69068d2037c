"""Calls that come to grief: cancelled, out of time, or cut off with their connection."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc


@dataclass
class Tally:
    """What the clients did, all together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of calls that nothing was done to
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, what: str, more: int = 1) -> None:
        with self.lock:
            self.counts[what] += more

    def took(self, name: str, seconds: float) -> None:
        with self.lock:
            self.seconds.setdefault(name, []).append(seconds)

    def line(self, elapsed_s: float) -> str:
        """Milliseconds of the calls that were left alone."""
        told = []
        for name, seconds in [("all", [one for many in self.seconds.values() for one in many]), *self.seconds.items()]:
            ranked = sorted(seconds)
            p50, p99 = (1000 * ranked[len(ranked) * part // 100] for part in (50, 99))
            told.append(f"{name} {p50:.1f}/{p99:.1f}")
        calls, given_up = self.counts["calls"], self.counts["given_up"]
        rate = f"{calls} calls in {elapsed_s:.1f} s ({calls / elapsed_s:.0f}/s), {given_up} given up"
        return f"{rate}; p50/p99 in ms: {', '.join(told)}"


class GivenUp(Exception):
    """The call was cancelled, or ran out of time, or its connection was cut: it has run, runs later, or never does."""


class Line:
    """A connection of its own to the daemon, on which calls may come to grief."""

    def __init__(self, address: str, random_: random.Random, tally: Tally) -> None:
        self._address = address
        self._random = random_
        self._tally = tally
        self._connect()

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = kvcache_pb2_grpc.KvCacheServiceStub(self._channel)

    def call(self, name: str, request: Any, *, calmly: bool = False) -> Any:
        """The response. Raises ServiceError and, unless ``calmly``, GivenUp."""
        self._tally.count("calls")
        fate = 1.0 if calmly else self._random.random()
        try:
            if fate < 0.08:
                return getattr(self.stub, name)(request, timeout=self._random.uniform(0.0001, 0.005))
            if fate < 0.16:
                return self._cancelled(name, request)
            if fate < 0.17:
                return self._cut_off(name, request)
            began = time.perf_counter()
            response = getattr(self.stub, name)(request)
            self._tally.took(name, time.perf_counter() - began)
            return response
        except grpc.FutureCancelledError as error:
            self._tally.count("given_up")
            raise GivenUp from error
        except grpc.RpcError as failure:
            lost = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
            if fate < 0.17 and failure.code() in lost:
                self._tally.count("given_up")
                raise GivenUp from failure
            raise rpc.error_from(failure) from failure

    def _cancelled(self, name: str, request: Any) -> Any:
        call = getattr(self.stub, name).future(request)
        with contextlib.suppress(grpc.FutureTimeoutError):
            call.result(timeout=self._random.choice([0.0, self._random.uniform(0, 0.005)]))
        call.cancel()
        return call.result()

    def _cut_off(self, name: str, request: Any) -> Any:
        call = getattr(self.stub, name).future(request)
        self._channel.close()
        self._connect()
        return call.result()

    def close(self) -> None:
        self._channel.close()
