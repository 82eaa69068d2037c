"""``python -m services.kvcache.mover DESCRIPTOR PID``: run by the daemon with an end of a socket, and its own pid."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

import structlog

from services.common.logs import configure_logging
from services.kvcache.mover.frames import InvalidFrame
from services.kvcache.mover.worker import Worker

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Returns the exit status: 0 when the daemon has closed the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    # The daemon's end is the mover's, also while it is stopped. It may have come before this line.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    # What is sent to the whole group is for the daemon, which drains and still needs its mover.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _keep_stderr()
    configure_logging()
    faulthandler.enable(sys.stderr)
    try:
        Worker(socket.socket(fileno=descriptor)).run()
    except InvalidFrame as error:
        log.error("invalid_order", detail=str(error))
        status = 1
    except OSError:
        status = 0  # the daemon is gone, which it says in no better way
    else:
        status = 0
    # Threads of the outer tier may be waiting for it, and nobody for them.
    os._exit(status)


def _keep_stderr() -> None:
    """Log to what stderr is; libraries in C write lines of their own to descriptor 2, which go nowhere."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
