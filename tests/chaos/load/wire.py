"""A proxy of bytes between two unix sockets, in which bytes are late, stand still, or go nowhere.

Bytes of an HTTP/2 connection cannot be lost or doubled one by one, since the kernel delivers them in order or not at
all. So that is done to whole calls (`tests.chaos.load.calls`), and here to whole connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

CHUNK = 1 << 16


class Wire:
    """Listens at ``path`` and forwards to ``target``."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        self._server: asyncio.AbstractServer | None = None
        self._open: dict[asyncio.StreamWriter, bool] = {}  # whether its bytes go nowhere for ever
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.refuses = False
        self.connections = 0

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        self.heal()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """No byte moves either way until ``heal``; the connections stay, as those of a peer that fell silent do."""
        self._flowing.clear()

    def swallow(self) -> None:
        """Whatever is sent on the current connections is lost; new ones work."""
        for writer in self._open:
            self._open[writer] = True

    def cut(self) -> None:
        """Reset all connections."""
        for writer in list(self._open):
            writer.transport.abort()

    def heal(self) -> None:
        """Undo ``hold``, the delay and the refusals."""
        self.delay_s, self.refuses = 0.0, False
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            if self.refuses:
                raise ConnectionRefusedError
            there, back = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer: False, back: False}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink, writer, back))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *ends: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await source.read(CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if not self._open.get(sink):
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        finally:
            for end in ends:
                self._open.pop(end, None)
                with contextlib.suppress(OSError, RuntimeError):
                    end.transport.abort()
