"""``python -m services.kvcache``: run the daemon until SIGTERM; ``... doctor``: check whether it can run."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

import structlog

from services.common.errors import ServiceError
from services.common.logs import configure_logging
from services.common.serving import run_until_signal
from services.kvcache import doctor
from services.kvcache.config import Config
from services.kvcache.server import Daemon

log = structlog.get_logger()

#: Allocations between garbage collections. The daemon's objects form no cycles and are created and freed by the
#: thousand: at Python's default threshold, collections take a third of a large step's time.
GC_THRESHOLD = 50_000


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain, 2 if the daemon could not start; for ``doctor``, the doctor's own."""
    words = sys.argv[1:] if arguments is None else arguments
    configure_logging()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    try:
        if words[:1] == ["doctor"]:
            return doctor.main(words[1:], os.environ)
        config = Config.read(words, os.environ)
        configure_logging(config.log_level)
        daemon = Daemon(config)
        run_until_signal(
            lambda stop: _serve(daemon, stop),
            hangup=lambda: daemon.reload(lambda: Config.read(words, os.environ)),
        )
    except ServiceError as error:
        print(f"rocmforge kvcache: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _serve(daemon: Daemon, stop: asyncio.Event) -> None:
    try:
        await daemon.start()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        log.info(
            "kvcache_serving",
            epoch=f"{daemon.epoch:016x}",
            listen=daemon.bound,
            metrics=daemon.metrics_bound,
            **daemon.config.echo,
        )
        await stop.wait()
    finally:
        await daemon.stop(daemon.config.grace_s)
    log.info("kvcache_stopped", epoch=f"{daemon.epoch:016x}")


if __name__ == "__main__":
    sys.exit(main())
