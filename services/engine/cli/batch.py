"""``python -m services.engine batch``: run a JSON Lines file of requests through the engine; write JSON Lines."""

from __future__ import annotations

import argparse
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import grpc

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common import rpc
from services.common.errors import ServiceError
from services.engine.cli import client
from services.engine.cli.batch_lines import Item, OutputLines, count, items, keep_what_is_done
from services.engine.cli.progress import Progress
from services.engine.cli.request_flags import Unfit, add_chat, add_flags, add_samples, from_fields, given

NAME = "batch"

MAX_CONCURRENCY = 1024
#: Maximum number of items per call. Their slots are refilled only when the slowest of them has finished.
ITEMS_A_CALL = 8
_LOST_RETRY_S = 1.0
#: Polling interval in seconds: an interrupt that arrives just before a thread blocks does not wake it.
_LOOK_S = 0.2


class Lost(Exception):
    """No engine answered the call, or the engine went away during it; ``items`` are the unfinished ones."""

    def __init__(self, message: str, items: list[Item]) -> None:
        super().__init__(message)
        self.items = items


class BatchRun:
    """Runs every item of ``items`` and writes its line of output.

    ``threads`` threads call ``run``; each keeps one call with several items in flight. An item whose error is retryable
    is retried up to ``retries`` times, after the delay that the engine suggests; so is a call that no engine answered.
    """

    def __init__(
        self, items: Iterator[Item], output: OutputLines, target: client.Target, concurrency: int, retries: int
    ) -> None:
        self._items = items
        self._output = output
        self._target = target
        self._items_a_call = max(1, min(ITEMS_A_CALL, concurrency // 4))
        self._retries = retries
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.threads = self._working = -(-concurrency // self._items_a_call)
        self.ended = threading.Event()  # no thread is working any more, or one failed
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """Make every thread stop soon; closing the channel ends their calls."""
        self._stopped.set()

    def run(self, stub: Any) -> None:
        """Process items until none is left."""
        again: list[Item] = []
        lost = 0
        try:
            while not self._stopped.is_set():
                items = [*again, *self._take(self._items_a_call - len(again))]
                if not items:
                    return
                try:
                    again, delay_s = self._call(stub, items)
                    lost = 0
                except Lost as error:
                    again, delay_s, lost = error.items, _LOST_RETRY_S, lost + 1
                    if lost > self._retries:
                        raise
                if again:
                    self._stopped.wait(delay_s)
        except BaseException as failure:
            if not self._stopped.is_set():
                self.failure = failure
            self.ended.set()
        finally:
            with self._lock:
                self._working -= 1
                if not self._working:
                    self.ended.set()

    def _take(self, count: int) -> list[Item]:
        with self._lock:
            items = [item for _, item in zip(range(count), self._items, strict=False)]
        for item in items:
            item.running = True
        if items:
            self._output.progress.begin(len(items))
        return items

    def _restart(self, item: Item) -> None:
        self._output.progress.more(-item.num_tokens)
        item.restart()

    def _call(self, stub: Any, items: list[Item]) -> tuple[list[Item], float]:
        """Send the items in one call. Returns those to retry, and the delay in seconds before the retry."""
        left, again, delays = dict(enumerate(items)), list[Item](), [0.0]

        def give_up_or_retry(index: int, error: ServiceError) -> None:
            item = left.pop(index)
            item.attempts += 1
            if error.retry_after_s is None or item.attempts > self._retries:
                error.field = error.field.removeprefix(f"requests[{index}].")
                self._output.failed(item, error)
                return
            self._restart(item)
            again.append(item)
            delays.append(error.retry_after_s)

        try:
            for one in stub.BatchGenerate(pb.BatchGenerateRequest(requests=[item.request for item in items])):
                if one.WhichOneof("result") == "error":
                    give_up_or_retry(one.index, rpc.error_from_status(one.error))
                    continue
                item = left[one.index]
                self._output.progress.more(len(one.response.token_ids))
                if item.add(one.response):
                    del left[one.index]
                    self._output.finished(item)
        except grpc.RpcError as failed:
            error = client.failure(failed, self._target)
            if self._stopped.is_set() or (error.code == "UNAVAILABLE" and error.retry_after_s is None):
                for item in left.values():
                    self._restart(item)
                raise Lost(client.describe(error), [*again, *left.values()]) from failed
            for index in list(left):
                give_up_or_retry(index, error)
        return again, max(delays)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; 1 if an item failed. Output written before an interrupt is kept."""
    flags = _parser().parse_args(arguments)
    try:
        if not 1 <= flags.concurrency <= MAX_CONCURRENCY:
            raise Unfit(f"--concurrency {flags.concurrency}: expected 1 to {MAX_CONCURRENCY}")
        if flags.retries < 0:
            raise Unfit(f"--retries {flags.retries}: expected 0 or more")
        if flags.resume and not flags.output:
            raise Unfit("--resume requires --output FILE")
        from_fields({"prompt": ""}, given(flags))
        return _run(flags)
    except Unfit as unfit:
        client.say(NAME, str(unfit))
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            client.drop_output()
            return 1
        client.say(NAME, f"{error.filename or flags.output}: {error.strerror}")
        return 2
    except Lost as lost:
        client.say(NAME, str(lost))
        return 1


def _run(flags: argparse.Namespace) -> int:
    with ExitStack() as files:
        source, total = sys.stdin.buffer, None
        if flags.input != "-":
            source = files.enter_context(Path(flags.input).open("rb"))
            total = count(source)
        done: set[int] = set()
        path = Path(flags.output) if flags.output else None
        if path is not None and flags.resume:
            done = keep_what_is_done(path)
        elif path is not None and path.exists():
            raise Unfit(f"{path} already exists; use --resume to continue it")
        try:
            if not client.await_serving(NAME, client.reached(flags), flags.wait):
                return 1
        except KeyboardInterrupt:
            return 130
        file: TextIO = sys.stdout
        if path is not None:
            file = files.enter_context(path.open("a", encoding="utf-8"))
        elif isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        progress = Progress(sys.stderr, None if total is None else max(0, total - len(done)))
        try:
            return _process(flags, source, done, OutputLines(file, progress, flags.token_ids))
        finally:
            progress.close()


def _process(flags: argparse.Namespace, source: Any, done: set[int], output: OutputLines) -> int:
    todo = items(source, done, given(flags), output)
    target = client.reached(flags)
    batch = BatchRun(todo, output, target, flags.concurrency, flags.retries)
    try:
        _work(batch, target, output.progress)
    except KeyboardInterrupt:
        return 130
    if batch.failure is not None:
        raise batch.failure
    return 1 if output.progress.failed else 0


def _work(batch: BatchRun, target: client.Target, progress: Progress) -> None:
    """Run the batch's threads until it is done, has failed, or is interrupted."""
    with client.connect(target) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        workers = [threading.Thread(target=batch.run, args=(stub,), daemon=True) for _ in range(batch.threads)]
        try:
            for worker in workers:
                worker.start()
            while not batch.ended.wait(_LOOK_S):
                progress.draw()
        finally:
            batch.stop()
            channel.close()
            for worker in workers:
                if worker.is_alive():  # an interrupt may come before all have started; a late one returns at once
                    worker.join()


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(
        NAME,
        "Generate a completion for each line of INPUT, a JSON object such as "
        '{"prompt": "...", "id": "...", "max_tokens": 8}, or with "messages": [{"role": "user", "content": "..."}] in '
        "place of the prompt. Each item's line of output is written as soon as it finishes, so the order may differ; "
        "it has the zero-based input line number as index, and the text or the error. Flags are defaults for fields "
        "that a line leaves out.",
    )
    parser.add_argument(
        "input", nargs="?", default="-", metavar="INPUT", help="JSON Lines file; - reads standard input"
    )
    parser.add_argument("--output", metavar="FILE", help="output file (default: standard output)")
    parser.add_argument(
        "--resume", action="store_true", help="continue FILE: skip items that finished there, retry those that failed"
    )
    parser.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="items in flight at a time (default %(default)s)"
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=10,
        metavar="N",
        help="retries per item when the engine is overloaded or unreachable (default %(default)s)",
    )
    parser.add_argument("--token-ids", action="store_true", help="include token ids in the output")
    add_chat(parser)
    add_flags(parser)
    add_samples(parser)
    return parser
