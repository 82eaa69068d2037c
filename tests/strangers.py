"""Another user of the machine, for tests of what this one refuses to trust."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Some uid that is neither root's nor, in all likelihood, that of a file on this machine.
UID = 54321


def stranger(command: str) -> None:
    """Run a command of the shell as another user. Needs the tool `other-users`."""
    subprocess.run(["/bin/sh", "-ec", command], user=UID, group=UID, extra_groups=[], check=True, timeout=60, cwd="/")


@contextmanager
def commons() -> Iterator[Path]:
    """A directory in which everybody may make files, as in /tmp."""
    path = Path(tempfile.mkdtemp(prefix="commons-"))
    try:
        path.chmod(0o1777)
        yield path
    finally:
        shutil.rmtree(path)


def give_away(path: Path) -> None:
    """Make a file the other user's."""
    os.chown(path, UID, UID, follow_symlinks=False)
