"""A caller who means ill: garbage, messages too large, sessions of others, sessions without a mapping, floods.

Whatever it does, it is answered with a status that says whose fault it is, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from services.common import rpc
from services.common.serving import MAX_MESSAGE_BYTES
from tests.chaos.schedule import DAEMON
from tests.chaos.verdict import Verdict

#: Statuses that tell the caller that the service has a bug.
BUGS = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
CALL_S = 20.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 200),
]
_SERVICES = {
    DAEMON: kvcache_pb2.DESCRIPTOR.services_by_name["KvCacheService"],
    "": engine_pb2.DESCRIPTOR.services_by_name["EngineService"],
}
#: Streams that end when the service does, or the caller.
_ENDLESS = ("WatchEvents",)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_OF_SESSIONS = ("RenewSession", "AttachSession", "CloseSession", "AllocatePages", "AppendTokens", "RemoveSequences")


class Stranger:
    """Attacks one service, on connections of its own."""

    def __init__(self, name: str, socket: Path, verdict: Verdict, seed: int) -> None:
        self._name, self._socket, self._verdict = name, socket, verdict
        self._draw = random.Random(f"stranger {seed}")
        self._service = _SERVICES[DAEMON if name == DAEMON else ""]
        self._channel: Any = None

    async def attack(self, seconds: float) -> None:
        """Do one thing after the other for so long."""
        own = [self._garbage, self._oversized, self._half_greeting, self._flood]
        own += [self._foreign, self._unattached, self._evict, self._deaf] if self._name == DAEMON else [self._wrong]
        until = asyncio.get_running_loop().time() + seconds
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS) as self._channel:
            while asyncio.get_running_loop().time() < until:
                what = self._draw.choice(own)
                self._verdict.count(f"hostile: {what.__name__.strip('_')}")
                # The service may be gone, or paused, while this is done to it.
                with contextlib.suppress(asyncio.TimeoutError, OSError):
                    await asyncio.wait_for(what(), CALL_S)
                await asyncio.sleep(0.01)

    async def _call(self, method: str, request: bytes, *wanted: str) -> bytes | None:
        """The reply, or None. A status that is a bug, or none of ``wanted``, is a finding."""
        try:
            path = f"/{self._service.full_name}/{method}"
            if not self._service.methods_by_name[method].server_streaming:
                reply: bytes = await self._channel.unary_unary(path)(request, timeout=CALL_S)
                return reply
            call = self._channel.unary_stream(path)(request, timeout=CALL_S)
            async for _ in call:
                if method in _ENDLESS:
                    call.cancel()
                    return None
        except grpc.aio.AioRpcError as failure:
            code = failure.code().name
            if code in ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"):
                return None
            reason = rpc.error_from(failure).reason
            if code in BUGS or (wanted and reason not in wanted):
                shown = request[:200].hex()
                self._verdict.find(
                    "bad answer", f"{self._name} {method}: {code} {reason}: {failure.details()}; the message: {shown}"
                )
        return None

    async def _garbage(self) -> None:
        method = self._draw.choice(list(self._service.methods_by_name))
        await self._call(method, self._draw.randbytes(self._draw.choice((1, 7, 64, 4096))))

    async def _oversized(self) -> None:
        method = self._draw.choice(list(self._service.methods_by_name))
        await self._call(method, bytes(MAX_MESSAGE_BYTES + 1), "UNKNOWN", "FIELD_INVALID")

    async def _foreign(self) -> None:
        method = self._draw.choice(_OF_SESSIONS)
        message = getattr(kvcache_pb2, f"{method}Request")(session_id=self._draw.randbytes(16).hex())
        await self._call(method, message.SerializeToString(), "SESSION_EXPIRED", "FIELD_INVALID")

    async def _unattached(self) -> None:
        """Sessions on the engines' own pool that prove nothing; they end with their lease."""
        stats = await self._call("GetStats", b"")
        pools = kvcache_pb2.GetStatsResponse.FromString(stats or b"").pools
        if not pools:
            return
        opening = kvcache_pb2.OpenSessionRequest(client_name="stranger", pool_id=pools[0].pool_id)
        opening.layout.CopyFrom(pools[0].layout)
        opening.ttl.FromSeconds(1)
        reply = await self._call("OpenSession", opening.SerializeToString())
        if reply is None:
            return
        session = kvcache_pb2.OpenSessionResponse.FromString(reply).session_id
        attach = kvcache_pb2.AttachSessionRequest(session_id=session, seen=self._draw.randbytes(32))
        await self._call("AttachSession", attach.SerializeToString(), "ATTACH_MISMATCH", "SESSION_EXPIRED")
        demand = kvcache_pb2.Demand()
        demand.opening.sequence_id, demand.opening.total_pages = "stolen", 1000
        demand.opening.prompt.tokens.extend(range(8))
        allocate = kvcache_pb2.AllocatePagesRequest(session_id=session, demands=[demand])
        await self._call("AllocatePages", allocate.SerializeToString(), "SESSION_NOT_ATTACHED", "SESSION_EXPIRED")

    async def _evict(self) -> None:
        """What an operator may do at any time: no token changes by it."""
        stats = await self._call("GetStats", b"")
        for pool in kvcache_pb2.GetStatsResponse.FromString(stats or b"").pools:
            request = kvcache_pb2.EvictPagesRequest(pool_id=pool.pool_id, max_pages=20, include_retained=True)
            await self._call("EvictPages", request.SerializeToString(), "POOL_UNKNOWN")

    async def _deaf(self) -> None:
        """Watch everything and read nothing."""
        call = self._channel.unary_stream(f"/{self._service.full_name}/WatchEvents")(b"", timeout=CALL_S)
        await asyncio.sleep(0.3)
        call.cancel()

    async def _flood(self) -> None:
        await asyncio.gather(*(self._call("GetStats", b"") for _ in range(60)))

    async def _half_greeting(self) -> None:
        """Connections that begin to speak and stop."""
        writers = []
        for _ in range(12):
            _, writer = await asyncio.open_unix_connection(str(self._socket))
            writer.write(_PREFACE[: self._draw.randrange(len(_PREFACE))] or self._draw.randbytes(40))
            writers.append(writer)
        await asyncio.sleep(0.1)
        for writer in writers:
            writer.transport.abort()

    async def _wrong(self) -> None:
        """Requests of an engine that are refused."""
        generate = engine_pb2.GenerateRequest()
        if self._draw.random() < 0.5:
            generate.prompt.tokens.ids.extend([1 << 31])
        else:
            generate.prompt.text, generate.sampling.top_p = "x", 7.0
        await self._call("Generate", generate.SerializeToString(), "FIELD_INVALID", "NOT_READY", "DRAINING")
        unknown = engine_pb2.CancelGenerationRequest(request_id=self._draw.randbytes(4).hex())
        await self._call("CancelGeneration", unknown.SerializeToString(), "REQUEST_UNKNOWN", "NOT_READY")
