"""One child process of the daemon at the other end of a socket, from its start to the proof of its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from typing import cast

import structlog

from services import launch
from services.kvcache.mover.frames import Frames, InvalidFrame, replies
from services.kvcache.mover.orders import Reply

log = structlog.get_logger()

#: What a mover inherits: where programs and libraries are, and which GPUs are meant.
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("LC_", "HIP", "ROCR_", "ROCM_", "HSA_", "CUDA_", "CUPY_", "GPU_", "SSL_CERT_")

#: A process that was killed and is not gone after so long hangs in a driver, which is worth a line.
GONE_S = 10.0


class Child(asyncio.Protocol):
    """``greeting`` makes the frames that come before all others, ``on_replies`` gets what each frame of the child says;
    if it raises InvalidFrame, that ends the child, as a bad frame does.

    ``ended`` is set when the process is of no more use: it may be alive still. ``usable`` until then.
    """

    def __init__(self, greeting: Callable[[], bytes], on_replies: Callable[[list[Reply]], None]) -> None:
        self._greeting = greeting
        self._on_replies = on_replies
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self.ended = asyncio.Event()
        self.usable = False
        ours, theirs = socket.socketpair()
        try:
            # It dies with the thread that starts it: that of the loop, which lives as long as the daemon.
            self._process = subprocess.Popen(
                [*launch.python("services.kvcache.mover"), str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment(dict(os.environ)),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def status(self) -> int | None:
        """Its exit status, once it is reaped: then nothing of it touches any memory."""
        return self._process.returncode

    async def connect(self) -> None:
        """Afterwards it takes frames."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if not self.ended.is_set():
            self.usable = True
            self.write(self._greeting())

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self.usable:
            return  # what it says now is not waited for any more
        try:
            for body in self._frames.feed(data):
                self._on_replies(replies(body))
        except InvalidFrame as error:
            log.error("mover_said_nonsense", mover_pid=self.pid, detail=str(error))
            self._is_over()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._is_over()

    def write(self, frame: bytes) -> None:
        """Send a frame, as the socket takes it."""
        if self._transport is not None and self.usable:
            self._transport.write(frame)

    async def end(self, leave_s: float) -> None:
        """Let it leave for so long, then kill it. Returns when it is reaped; if cancelled, it may be called again."""
        self._is_over()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()
        if leave_s and not await self._is_gone(leave_s):
            log.warning("mover_does_not_leave", mover_pid=self.pid)
        if not self._gone.is_set():
            self._process.kill()
            while not await self._is_gone(GONE_S):
                log.error("mover_not_gone", mover_pid=self.pid)
        self._process.wait()  # it has ended: this only reaps it

    async def _is_gone(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), limit_s)
        return self._gone.is_set()

    def _exited(self) -> None:
        """All of its threads have ended, which they do after they let go of their memory."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._gone.set()
        if self._transport is None:
            self._is_over()

    def _is_over(self) -> None:
        self.usable = False
        self.ended.set()


def environment(own: dict[str, str]) -> dict[str, str]:
    """What of the daemon's environment a mover gets: no secrets that are none of its business."""
    return {name: value for name, value in own.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)}
