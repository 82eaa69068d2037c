"""Directories that a service makes for its own user alone. `rocmforge.client.transport.paths` has what is trusted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rocmforge.client.transport.paths import check_directory, check_way
from services.common.errors import InvalidConfiguration


def make_directory(directory: Path, flag: str, *, parents: bool = False) -> None:
    """Create a directory for this user alone, with ``parents`` also those above it; check one that is there already.

    Another user who took a well-known name first is detected, since the owner of an existing one is checked. Raises
    InvalidConfiguration, which names ``flag``, and what is not trusted and why.
    """
    try:
        above = directory.parents if parents else ()
        missing = [path for path in (directory, *above) if not os.path.lexists(path)]
        if missing:
            check_way(missing[-1].parent, directory, flag)  # or a stranger's link would say where it is made
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        check_directory(directory, flag)
    except OSError as error:
        raise InvalidConfiguration(f"{flag} {directory}: {error.strerror or error}", field=flag) from error
