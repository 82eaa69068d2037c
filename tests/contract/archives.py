"""Archives of ours, unpacked by any Python that the project runs on."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar file. Python 3.11.2, Debian 12's, has no filter of members yet, and those after 3.13 want one."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(folder)
