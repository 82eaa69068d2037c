"""An engine that stands still until a number of requests wait, and answers each at once from then on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc

#: So long it waits for another request, however busy the machine is.
STILL_S = 60.0


class Stalling(engine_pb2_grpc.EngineServiceServicer):
    """Answers with as many tokens as were asked for less ``missing``, in one message, once ``until`` requests came.

    ``going_at`` is when, on ``time.monotonic``; None if they did not.
    """

    def __init__(self, until: int, missing: int) -> None:
        self.going_at: float | None = None
        self._going = threading.Event()
        self._lock = threading.Lock()
        self._lacking = until
        self._missing = missing

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        """Overrides."""
        with self._lock:
            self._lacking -= 1
            if self._lacking == 0 and not self._going.is_set():
                self.going_at = time.monotonic()
                self._going.set()
        if not self._going.wait(STILL_S):
            self._going.set()
        response = pb.GenerateResponse(token_ids=[1] * (request.stopping.max_tokens - self._missing))
        response.finish.usage.prompt_tokens = len(request.prompt.tokens.ids)
        yield response


@contextlib.contextmanager
def stalling_engine(folder: Path, until: int, missing: int = 0) -> Iterator[tuple[str, Stalling]]:
    """Its address, and itself."""
    servicer, address = Stalling(until, missing), f"unix:{folder}/e.sock"
    # A thread for each request that may wait.
    server = grpc.server(futures.ThreadPoolExecutor(256))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield address, servicer
    finally:
        server.stop(None).wait()
