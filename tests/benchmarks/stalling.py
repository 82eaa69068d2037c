"""An engine that stands still for a while, and answers each request at once from then on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc


class Stalling(engine_pb2_grpc.EngineServiceServicer):
    """Answers with as many tokens as were asked for less ``missing``, in one message, once ``going`` is set."""

    def __init__(self, missing: int) -> None:
        self.going = threading.Event()
        self._missing = missing

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        """Overrides."""
        self.going.wait(30)
        response = pb.GenerateResponse(token_ids=[1] * (request.stopping.max_tokens - self._missing))
        response.finish.usage.prompt_tokens = len(request.prompt.tokens.ids)
        yield response


@contextlib.contextmanager
def stalling_engine(folder: Path, stall_s: float, missing: int = 0) -> Iterator[tuple[str, Callable[[float], None]]]:
    """Its address, and what takes the start, on ``time.monotonic``, after which it stands still for ``stall_s``."""
    servicer, address = Stalling(missing), f"unix:{folder}/e.sock"
    # A thread for each request that may wait.
    server = grpc.server(futures.ThreadPoolExecutor(256))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()

    def begin(began: float) -> None:
        threading.Timer(began + stall_s - time.monotonic(), servicer.going.set).start()

    try:
        yield address, begin
    finally:
        server.stop(None).wait()
