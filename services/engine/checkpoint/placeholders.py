"""What lies where a model's file is expected, when a download went wrong."""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import ModelInvalid

#: Bytes of a file's beginning that tell.
HEAD_BYTES = 512
_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype html", b"<html", b"<head")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def refuse_placeholder(file: Path, head: bytes) -> None:
    """Raise ``ModelInvalid`` for a ``file`` that begins as a git-lfs pointer or an HTML page does."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:HEAD_BYTES].lower()
    if start.startswith(_POINTER):
        raise ModelInvalid(
            f"{file} is a git-lfs pointer, not the file that it stands for: run `git lfs pull` in its folder, or "
            "download the file by itself"
        )
    if start.startswith(_PAGES):
        raise ModelInvalid(
            f"{file} is an HTML page: what was downloaded is a page about the file, or a login; download the file "
            "itself (`hf download`, or an address with /resolve/ in the place of /blob/)"
        )


def missing_model(path: Path) -> ModelInvalid:
    """The error about a model that is not there, with what to do about a name that looks like one of a hub's."""
    name = str(path)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not path.parent.exists():
        return ModelInvalid(
            f"--model {name}: there is no such folder or file, and nothing is downloaded here; if it is a model on the "
            f"Hugging Face hub, run `hf download {name} --local-dir {path.name}` and give --model {path.name}"
        )
    return ModelInvalid(f"--model {name}: there is no such folder or file")
