"""Files of a checkpoint."""

from __future__ import annotations

import stat
from pathlib import Path

from services.common.errors import ModelInvalid


def file_size(file: Path) -> int:
    """Bytes of a file. Raises ``ModelInvalid`` when it is missing, or not a regular one."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelInvalid(f"{file} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelInvalid(f"{file} is not a regular file")
    return status.st_size
