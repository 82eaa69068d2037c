"""Targets that answer calls: whatever messages arrive, in whatever order, each is served or refused with a declared
reason, and the state behind the servicer stays sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from services.common import rpc
from services.common.access.identity import CALLER, Identity
from services.kvcache.api.servicer import KvCacheServicer
from services.kvcache.scrub.scrubber import Scrubber
from tests.engine.running import RunningEngine
from tests.fuzz.seeds import SESSION, TIME, methods, records
from tests.kvcache.fakes import World
from tests.processes import ROOT

#: Reasons that blame the service.
BUGS = ("INTERNAL", "FORWARD_FAILED", "UNKNOWN")
PAGES = 8
MODEL = ROOT / "models" / "shakespeare"
#: Reasons that the last input was refused with: declared errors, which are no findings.
refused: list[str] = []
#: Of one input.
MOST_CALLS = 24
#: Of a stream; then the caller leaves.
MOST_RESPONSES = 8
#: So few that a step of the bundled model is all that most requests take.
MOST_TOKENS = 2
CALL_S = 30.0
_KVCACHE = methods(kvcache_pb2, "KvCacheService")
_ENGINE = methods(engine_pb2, "EngineService")


class Refused(Exception):
    """A call ended with an error; its reason is the text."""


class Context:
    """What a servicer sees of a call."""

    def time_remaining(self) -> float:
        """The call's deadline is far enough away."""
        return CALL_S

    async def abort_with_status(self, status: Any) -> NoReturn:
        """End the call. Raises AssertionError for a reason that blames the service."""
        details = status_pb2.Status.FromString(dict(status.trailing_metadata)[rpc_status.GRPC_DETAILS_METADATA_KEY])
        error = rpc.error_from_status(details)
        if error.reason in BUGS:
            raise AssertionError(f"{error.reason}: {error.message}")
        refused.append(f"{error.reason}: {error.message}")
        raise Refused(error.reason)


async def _answer(servicer: Any, name: str, request: Any) -> list[Any]:
    """The responses of a call, as many as a caller waits for; none when it is refused."""
    call = getattr(servicer, name)(request, Context())
    try:
        if not hasattr(call, "__anext__"):
            return [await asyncio.wait_for(call, CALL_S)]
        found = list[Any]()
        with contextlib.suppress(StopAsyncIteration):
            while len(found) < MOST_RESPONSES:
                # A stream of events may have nothing to say for ever.
                waits_s = 0.001 if name == "WatchEvents" else CALL_S
                found.append(await asyncio.wait_for(anext(call), waits_s))
        return found
    except TimeoutError:
        if name != "WatchEvents":
            raise AssertionError(f"{name} had no answer in {CALL_S:g} s") from None
        return []
    except Refused:
        return []
    finally:
        if hasattr(call, "aclose"):
            await call.aclose()


def _parsed(module: Any, name: str, payload: bytes) -> Any:
    """The request as the server hands it over."""
    try:
        return getattr(module, f"{name}Request").FromString(payload)
    except DecodeError as error:
        return rpc.Unreadable(str(error))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _attached(world: World, caller: str) -> str:
    """The id of a session of the caller's, attached."""
    session = world.cache.open_session("test", "pool", world.layout, caller=caller)
    world.arenas[0].answers[session.canary_slot] = bytes(byte ^ 0xFF for byte in session.canary)
    return world.cache.attach_session(session.id, session.canary, caller).id


def kvcache(data: bytes) -> None:
    """Calls to a daemon of a small budget, with one session attached. After each, its state is checked whole."""
    refused.clear()
    world = World(PAGES)
    caller = Identity.of_uid(os.geteuid())  # who has every role
    if _attached(world, caller.text) != SESSION:
        raise AssertionError("the session has another id than the corpus")
    scrubber = Scrubber(world.cache, asyncio.Event())
    servicer = KvCacheServicer(world.cache, scrubber)

    async def body() -> None:
        CALLER.set(caller)
        for number, payload in list(records(data))[:MOST_CALLS]:
            if number == TIME:
                world.now += payload[0] if payload else 0.0
                world.cache.sweep()
            else:
                name = _KVCACHE[number % len(_KVCACHE)]
                await _answer(servicer, name, _parsed(kvcache_pb2, name, payload))
            world.sound()

    try:
        _loop().run_until_complete(body())
    finally:
        scrubber.close()


@cache
def _engine() -> RunningEngine:
    folder = tempfile.TemporaryDirectory(prefix="rf-fuzz-")
    _kept.append(folder)
    path = Path(folder.name)
    model = path / "model"
    model.mkdir()
    for file in MODEL.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return RunningEngine(path, "--model", str(model), "--local-pages", "64", "--max-batch", "4").start()


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _shorter(message: engine_pb2.GenerateRequest) -> None:
    """Long texts are not generated: only the request is checked."""
    if message.stopping.max_tokens > MOST_TOKENS or not message.stopping.HasField("max_tokens"):
        message.stopping.max_tokens = MOST_TOKENS


def engine(data: bytes) -> None:
    """Calls to an engine that generates a few tokens. After them it knows no request and holds no page."""
    refused.clear()
    running = _engine()

    async def body() -> None:
        for number, payload in list(records(data))[:MOST_CALLS]:
            name = _ENGINE[number % len(_ENGINE)]
            request = _parsed(engine_pb2, name, payload)
            if isinstance(request, engine_pb2.GenerateRequest):
                _shorter(request)
            elif isinstance(request, engine_pb2.SubmitGenerationRequest):
                _shorter(request.request)
            elif isinstance(request, engine_pb2.BatchGenerateRequest):
                for item in request.requests:
                    _shorter(item)
            await _answer(running.engine.servicer, name, request)

    running.begin(body()).result(CALL_S * MOST_CALLS)
    running.idle()
