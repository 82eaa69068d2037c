"""``python -m services.engine [serve]``: run the engine until SIGTERM.

``... generate`` and others are client commands; ``... token`` makes a token for a client; ``... doctor`` checks whether
this machine can run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import structlog

from services.common.errors import ServiceError
from services.common.logs import configure_logging
from services.common.serving import run_until_signal
from services.engine import cli
from services.engine.cli import token

if TYPE_CHECKING:
    from services.engine.server import Engine

log = structlog.get_logger()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain, 2 when the engine could not start; client commands have their own."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in cli.COMMANDS:
        return cli.run(words[0], words[1:])
    if words[:1] == ["token"]:
        return token.main(words[1:])
    if words and not words[0].startswith("-") and words[0] not in ("serve", "doctor", "token"):
        known = ", ".join(("serve", "doctor", "token", *cli.COMMANDS))
        print(f"rocmforge engine: {words[0]}: no such command; expected one of {known}", file=sys.stderr)
        return 2
    # These import NumPy, which takes longer than most client commands run.
    from services.engine import doctor
    from services.engine.config import Config

    configure_logging()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    try:
        if words[:1] == ["doctor"]:
            return doctor.main(words[1:], os.environ)
        clients = f"\nClient commands, each with its own --help: {', '.join(cli.COMMANDS)}."
        flags = words[1:] if words[:1] == ["serve"] else words
        config = Config.read(flags, os.environ, clients)
        configure_logging(config.log_level)
        from services.engine.server import Engine

        engine = Engine(config)
        run_until_signal(
            lambda stop: _serve(engine, stop),
            hangup=lambda: engine.reload(lambda: Config.read(flags, os.environ, clients)),
        )
    except ServiceError as error:
        print(f"rocmforge engine: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _serve(engine: Engine, stop: asyncio.Event) -> None:
    try:
        starting = asyncio.ensure_future(engine.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        else:
            starting.result()
            # All of this lives as long as the process. A full collection would walk it each time, and hold the
            # engine's thread meanwhile.
            gc.collect()
            gc.freeze()
            log.info(
                "engine_serving",
                listen=engine.bound,
                metrics=engine.metrics_bound,
                pool_id=engine.pool_id,
                **engine.config.echo,
            )
            await stopping
    finally:
        await engine.stop(engine.config.grace_s)
    log.info("engine_stopped")


if __name__ == "__main__":
    sys.exit(main())
