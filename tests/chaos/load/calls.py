"""A proxy of calls between an engine and the daemon, in which calls are lost on either way, or arrive twice.

It forwards messages as bytes: it knows neither service.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, NoReturn

import grpc

#: More than either service takes: whether a message is too large is theirs to say.
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.use_local_subchannel_pool", 1),
]


class Calls(grpc.GenericRpcHandler):
    """Listens at ``address`` and forwards unary calls to ``target``; ``share`` of them meet what ``doing`` says.

    ``doing`` is "", "lose-requests", "lose-replies", "repeat-calls" or "replay-calls-late".
    """

    def __init__(self, address: str, target: str, draw: random.Random) -> None:
        self._address, self._target = address, target
        self._draw = draw
        self._server: Any = None
        self._channel: Any = None
        self._late: set[asyncio.Task[None]] = set()
        self.doing = ""
        self.share = 1.0
        self.done: Counter[str] = Counter()

    async def start(self) -> None:
        """Begin to listen."""
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self._address)
        await self._server.start()

    async def close(self) -> None:
        """End what is under way."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._server.stop(0)
        await self._channel.close()

    @property
    def is_started(self) -> bool:
        """Whether there is something to close."""
        return self._server is not None

    def heal(self) -> None:
        """From now on forward each call once."""
        self.doing = ""

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """The handler of any method there is."""

        async def forward(request: bytes, context: Any) -> bytes:
            return await self._forward(details.method, request, context)

        return grpc.unary_unary_rpc_method_handler(forward)

    async def _forward(self, method: str, request: bytes, context: Any) -> bytes:
        doing = self.doing if self.doing and self._draw.random() < self.share else ""
        self.done[doing or "forwarded"] += 1
        if doing == "lose-requests":
            await self._silence(context)
        if doing == "replay-calls-late":
            task = asyncio.create_task(self._again(method, request, self._draw.uniform(0.05, 1.5)))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        if doing == "repeat-calls":
            first = asyncio.create_task(self._again(method, request, 0.0))
            self._late.add(first)
            first.add_done_callback(self._late.discard)
        try:
            reply: bytes = await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as failure:
            if doing == "lose-replies":
                await self._silence(context)
            await context.abort(failure.code(), failure.details() or "", tuple(failure.trailing_metadata() or ()))
        if doing == "lose-replies":
            await self._silence(context)
        return reply

    async def _again(self, method: str, request: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self._channel.unary_unary(method)(request, timeout=5.0)
        except grpc.aio.AioRpcError as failure:
            self.done[f"replay: {failure.code().name}"] += 1

    async def _silence(self, context: Any) -> NoReturn:
        """Never answer: the caller's deadline ends the call."""
        await asyncio.sleep(context.time_remaining() or 3600.0)
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "lost by the proxy")
        raise AssertionError("abort raises")
