"""The JSON Lines of a batch: one object in and one object out per item, written in order of completion."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import FieldInvalid, ServiceError
from services.engine.cli.printing import logprobs, reason
from services.engine.cli.progress import Progress
from services.engine.cli.request_flags import Unfit, from_fields


@dataclass(slots=True)
class Sample:
    """The output of one sample so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: pb.Finish | None = None


@dataclass(slots=True)
class Item:
    """One line of input and its progress so far."""

    index: int
    name: str
    request: pb.GenerateRequest
    attempts: int = 0
    running: bool = False
    samples: dict[int, Sample] = field(default_factory=dict)

    def restart(self) -> None:
        """Discard the output of a failed attempt."""
        self.samples = {}

    def add(self, response: pb.GenerateResponse) -> bool:
        """Record a response. Returns whether it was the item's last."""
        sample = self.samples.setdefault(response.sample, Sample())
        sample.text.append(response.text)
        sample.token_ids.extend(response.token_ids)
        sample.logprobs.extend(logprobs(response.logprobs))
        sample.prompt_logprobs.extend(logprobs(response.prompt_logprobs))
        if response.HasField("finish"):
            sample.finish = response.finish
        ended = [one for one in self.samples.values() if one.finish is not None]
        return len(ended) == max(1, self.request.n)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(sample.token_ids) for sample in self.samples.values())


class OutputLines:
    """Writes JSON Lines, each atomically; safe to call from several threads."""

    def __init__(self, file: TextIO, progress: Progress, with_tokens: bool) -> None:
        self._file = file
        self.progress = progress
        self._with_tokens = with_tokens
        self._lock = threading.Lock()

    def finished(self, item: Item) -> None:
        """Write the line of a finished item; with n > 1, ``samples`` lists one object per sample."""
        outputs = [self._shown(item.samples[at]) for at in sorted(item.samples)]
        record = self._of(item) | ({"samples": outputs} if item.request.n > 1 else outputs[0])
        self._write(item, record, failed=False)

    def failed(self, item: Item, error: ServiceError) -> None:
        """Write the line of an item that failed for good, with its ``error`` and the output so far."""
        failure = {"code": error.code, "reason": error.reason, "message": error.message}
        if error.field:
            failure["field"] = error.field
        outputs = [self._shown(item.samples[at]) for at in sorted(item.samples)] or [self._shown(Sample())]
        record = self._of(item) | ({"samples": outputs} if item.request.n > 1 else outputs[0]) | {"error": failure}
        self._write(item, record, failed=True)

    def _of(self, item: Item) -> dict[str, Any]:
        record: dict[str, Any] = {"index": item.index}
        if item.name:
            record["id"] = item.name
        return record

    def _shown(self, sample: Sample) -> dict[str, Any]:
        record: dict[str, Any] = {"text": "".join(sample.text)}
        if self._with_tokens:
            record["token_ids"] = sample.token_ids
        for name, choices in (("logprobs", sample.logprobs), ("prompt_logprobs", sample.prompt_logprobs)):
            if choices:
                record[name] = choices
        if sample.finish is not None:
            usage = sample.finish.usage
            record["finish"], record["seed"] = reason(sample.finish), sample.finish.seed
            record["usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            }
        return record

    def _write(self, item: Item, record: dict[str, Any], *, failed: bool) -> None:
        line = json.dumps(record, ensure_ascii=False)
        with self._lock:
            self._file.write(f"{line}\n")
            self._file.flush()
            self.progress.add(failed=failed, running=item.running)


def count(source: BinaryIO) -> int | None:
    """The number of non-blank lines in ``source``; None if it is not seekable."""
    if not source.seekable():
        return None
    found = sum(bool(line.strip()) for line in source)
    source.seek(0)
    return found


def items(source: BinaryIO, done: set[int], defaults: Mapping[str, Any], output: OutputLines) -> Iterator[Item]:
    """Yields an item for each line that is not in ``done``. Invalid lines are written to ``output`` as failed."""
    for index, line in enumerate(source):
        if index in done or not line.strip():
            continue
        fields: Any = None
        try:
            fields = _parsed(line)
            if not isinstance(fields, dict):
                raise Unfit('a line must be a JSON object such as {"prompt": "..."} or {"messages": [...]}')
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
        raise Unfit("the line is not valid UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unfit(f"the line is not valid JSON: {error}") from error


def keep_what_is_done(path: Path) -> set[int]:
    """Returns the indices that an earlier run finished; removes lines that report failures or are incomplete.

    Raises Unfit if the file holds anything else.
    """
    kept: list[bytes] = []
    done: set[int] = set()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            index, over = record["index"], "error" not in record and ("finish" in record or "samples" in record)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise Unfit(f"{path}, line {number}: not a line of this command's output") from error
        if over and line.endswith(b"\n"):
            kept.append(line)
            done.add(index)
    if len(kept) < len(lines):
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_bytes(b"".join(kept))
        beside.replace(path)
    return done
