"""A proxy between a client and a server that forgets connections without a word, as a firewall or a dead host does."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class _Link:
    """One connection. Once ``silent``, what arrives from either side is read and dropped."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.silent = proxy.swallows
        self._ends = (client, server)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(proxy, source, target), daemon=True).start()

    def _pump(self, proxy: Proxy, source: socket.socket, target: socket.socket) -> None:
        client = source is self._ends[0]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if client:
                    proxy.note()
                if not self.silent:
                    target.sendall(data)
        if not self.silent:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        elif client:
            proxy.left.set()
        else:
            proxy.dropped.set()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on a unix socket at ``path`` and connects to the one at ``target``.

    ``left`` says that the client of a silent connection has closed it, ``dropped`` that its server has.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.address = f"unix:{path}"
        self.left, self.dropped = threading.Event(), threading.Event()
        self.swallows = False
        self.connections = 0
        self._target = target
        self._links: list[_Link] = []
        self._sent = 0
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
                with self._changed:
                    self.connections += 1
                    self._links.append(_Link(self, client, server))
                    self._changed.notify_all()

    def note(self) -> None:
        """Count that a client sent something."""
        with self._changed:
            self._sent += 1
            self._changed.notify_all()

    def until_sent(self, times: int, timeout_s: float = 60) -> bool:
        """Wait until clients have sent something so many more times; returns whether they did."""
        with self._changed:
            goal = self._sent + times
            return self._changed.wait_for(lambda: self._sent >= goal, timeout_s)

    def until_connected(self, connections: int, timeout_s: float = 60) -> bool:
        """Wait until there have been so many connections; returns whether there were."""
        with self._changed:
            return self._changed.wait_for(lambda: self.connections >= connections, timeout_s)

    def forget(self) -> None:
        """From now on nothing passes the connections that there are; neither side hears of it. New ones work."""
        with self._changed:
            for link in self._links:
                link.silent = True

    def swallow(self, on: bool) -> None:
        """Whether new connections are silent from the beginning."""
        self.swallows = on

    def close(self) -> None:
        """Close everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for link in self._links:
            link.close()
