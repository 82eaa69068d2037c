"""The lines of a batch: objects of JSON in, and one out for each, in whatever order they are done."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rocmforge.engine.v1 import engine_pb2 as pb
from services.engine.cli.answer import reason
from services.engine.cli.progress import Progress
from services.engine.cli.request import Unfit, from_fields
from services.errors import FieldInvalid, ServiceError


@dataclass(slots=True)
class Item:
    """A line of the input and what became of it so far."""

    index: int
    name: str
    request: pb.GenerateRequest
    attempts: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def restart(self) -> None:
        """Forget what an attempt said that came to nothing."""
        self.text, self.token_ids = [], []


class Output:
    """Lines of JSON, each in one piece, from several threads."""

    def __init__(self, file: TextIO, progress: Progress, with_tokens: bool) -> None:
        self._file = file
        self.progress = progress
        self._with_tokens = with_tokens
        self._lock = threading.Lock()

    def finished(self, item: Item, finish: pb.Finish) -> None:
        """An item is done."""
        usage = finish.usage
        record = self._of(item) | {
            "finish": reason(finish),
            "seed": finish.seed,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
        }
        self._write(record, failed=False, tokens=len(item.token_ids))

    def failed(self, item: Item, error: ServiceError) -> None:
        """An item is given up."""
        told = {"code": error.code, "reason": error.reason, "message": error.message}
        if error.field:
            told["field"] = error.field
        self._write(self._of(item) | {"error": told}, failed=True, tokens=len(item.token_ids))

    def _of(self, item: Item) -> dict[str, Any]:
        record: dict[str, Any] = {"index": item.index}
        if item.name:
            record["id"] = item.name
        record["text"] = "".join(item.text)
        if self._with_tokens:
            record["token_ids"] = item.token_ids
        return record

    def _write(self, record: dict[str, Any], *, failed: bool, tokens: int) -> None:
        line = json.dumps(record, ensure_ascii=False)
        with self._lock:
            self._file.write(f"{line}\n")
            self._file.flush()
            self.progress.add(failed=failed, tokens=tokens)


def count(source: BinaryIO) -> int | None:
    """Lines that hold something, of a file that can be read twice."""
    if not source.seekable():
        return None
    found = sum(bool(line.strip()) for line in source)
    source.seek(0)
    return found


def items(source: BinaryIO, done: set[int], defaults: Mapping[str, Any], output: Output) -> Iterator[Item]:
    """Items of the lines that are not done. One that makes no request goes to the output at once."""
    for index, line in enumerate(source):
        if index in done or not line.strip():
            continue
        fields: Any = None
        try:
            fields = _parsed(line)
            if not isinstance(fields, dict):
                raise Unfit('a line is an object such as {"prompt": "..."} or {"messages": [...]}')
            request = from_fields(fields, defaults)
        except Unfit as unfit:
            name = fields.get("id", "") if isinstance(fields, dict) else ""
            shown = name.encode(errors="replace").decode() if isinstance(name, str) else ""
            output.failed(Item(index, shown, pb.GenerateRequest()), FieldInvalid(str(unfit)))
        else:
            yield Item(index, request.request_id, request)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeError as error:
        raise Unfit("the line is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unfit(f"the line is not JSON: {error}") from error


def keep_what_is_done(path: Path) -> set[int]:
    """The indices that an earlier run brought to an end; lines that tell of failures, or are torn, are removed.

    Raises Unfit for a file that holds something else.
    """
    kept: list[bytes] = []
    done: set[int] = set()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            index, over = record["index"], "finish" in record
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise Unfit(f"{path}, line {number}, is no line of this command's output") from error
        if over and line.endswith(b"\n"):
            kept.append(line)
            done.add(index)
    if len(kept) < len(lines):
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_bytes(b"".join(kept))
        beside.replace(path)
    return done
