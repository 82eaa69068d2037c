"""Settings that are read again while a service runs: what can change does, what cannot is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TypeVar

import structlog

from services.common.errors import ServiceError
from services.common.settings import declared

log = structlog.get_logger()

Config = TypeVar("Config")


def _any(new: object) -> None:
    """Finds nothing wrong."""


def reread(
    current: Config, read: Callable[[], Config], live: Collection[str], prepare: Callable[[Config], None] = _any
) -> Config:
    """The settings as they are now: those of ``read`` in the fields ``live``, the ``current`` ones in all others.

    ``prepare`` does with them what may fail. If it does, or if they cannot be read or are invalid: the current ones,
    all of them. Logs what changed, and which changes wait for a restart.
    """
    try:
        new = read()
        changed = [one for one in declared(type(current)) if getattr(new, one.field) != getattr(current, one.field)]
        taken = {one.field: getattr(new, one.field) for one in changed if one.field in live}
        found: Config = dataclasses.replace(current, **taken)  # type: ignore[type-var]
        prepare(found)
    except ServiceError as error:
        log.error("settings_kept", reason=error.reason, detail=error.message)
        return current
    log.info(
        "settings_read",
        changed=[one.name for one in changed if one.field in taken],
        need_restart=[one.name for one in changed if one.field not in taken],
    )
    return found
