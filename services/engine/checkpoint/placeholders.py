"""Recognizes the placeholder files that a failed download leaves instead of a model."""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import ModelInvalid

#: Bytes at the start of a file that are examined.
HEAD_BYTES = 512
_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype html", b"<html", b"<head")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def refuse_placeholder(file: Path, head: bytes) -> None:
    """Raise ``ModelInvalid`` if ``head``, the start of ``file``, is that of a git-lfs pointer or an HTML page."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:HEAD_BYTES].lower()
    if start.startswith(_POINTER):
        raise ModelInvalid(
            f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder, or download the file "
            "separately"
        )
    if start.startswith(_PAGES):
        raise ModelInvalid(
            f"{file} is an HTML page: a page about the file, or a login page, was downloaded; download the file itself "
            "(`hf download`, or a URL with /resolve/ instead of /blob/)"
        )


def missing_model(path: Path) -> ModelInvalid:
    """Returns the error for a missing model, with advice when the name looks like a Hugging Face model id."""
    name = str(path)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not path.parent.exists():
        return ModelInvalid(
            f"--model {name}: there is no such folder or file, and models are not downloaded automatically; for a "
            f"model on the Hugging Face Hub, run `hf download {name} --local-dir {path.name}` and give --model "
            f"{path.name}"
        )
    return ModelInvalid(f"--model {name}: there is no such folder or file")
