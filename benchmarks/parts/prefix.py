"""Time to first token with a cold prefix cache, and when the prompt's K and V are in the daemon's pages.

Runs real processes: a daemon, an engine that computes the prompt, the same engine again, another engine, and the first
engine after ``kill -9`` and a restart. Measures a call of Generate, from its start to the first token.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.experimental

from benchmarks.parts.rows import Row
from benchmarks.parts.stand import daemon, process
from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.serving import MAX_MESSAGE_BYTES
from services.kvcache.arena.host import default_directory

BAR = 0.1
WARM_UP_TOKENS = 40
#: Most tokens of a cached prompt that are still computed: its last page, and the tokens after it.
MOST_LEFT = 64


class Client:
    """Calls one engine."""

    def __init__(self, address: str) -> None:
        # Responses are read on the waiting thread: waking another one for each would add the client's own delay.
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        """Seconds until the first token, the token, and the number of cached prompt tokens."""
        request = pb.GenerateRequest(
            prompt=pb.Prompt(tokens=pb.TokenIds(ids=prompt)),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=1, ignore_eos=True),
        )
        began = time.perf_counter()
        took, token, cached = 0.0, -1, 0
        for response in self._stub.Generate(request, timeout=120):
            if response.token_ids and token < 0:
                took, token = time.perf_counter() - began, response.token_ids[0]
            if response.HasField("finish"):
                cached = response.finish.usage.cached_tokens
        return took, token, cached

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class Asking:
    """Prompts of several lengths, and their times to first token by engine."""

    def __init__(self, vocab_size: int, lengths: Sequence[int], prompts: int, exact: bool) -> None:
        self._draw = random.Random(0)
        self._vocab_size = vocab_size
        self._lengths = lengths
        self._texts = [self._text(length) for length in lengths for _ in range(prompts)]
        self._exact = exact
        self._expected: list[int] = []
        self.times: dict[tuple[str, int], list[float]] = {}
        self.others: Counter[tuple[str, int]] = Counter()

    def _text(self, length: int) -> list[int]:
        return [self._draw.randrange(1, self._vocab_size) for _ in range(length)]

    def warm_up(self, client: Client) -> None:
        """Send an engine's first requests, which load what later ones use; they share no page with others."""
        for length in (WARM_UP_TOKENS, *self._lengths):
            text = self._text(length)
            client.first_token(text)
            client.first_token(text)

    def ask(self, where: str, client: Client) -> None:
        """Time every prompt. The first time, none may be cached; later, all must be, and yield the same tokens.

        Raises RuntimeError otherwise; without ``exact``, different tokens are only counted.
        """
        cold = not self._expected
        found = []
        for text in self._texts:
            took, token, hit = client.first_token(text)
            self.times.setdefault((where, len(text)), []).append(took)
            found.append(token)
            if hit if cold else hit < len(text) - MOST_LEFT:
                raise RuntimeError(f"{where}: {hit} of {len(text)} tokens were cached")
        if cold:
            self._expected = found
            return
        for text, token, expected in zip(self._texts, found, self._expected, strict=True):
            self.others[where, len(text)] += token != expected
        if self._exact and found != self._expected:
            raise RuntimeError(f"{where}: tokens {found} instead of {self._expected}")


def measure(
    model: Path,
    vocab_size: int,
    lengths: Sequence[int],
    engine_flags: Sequence[str],
    daemon_flags: Sequence[str],
    prompts: int = 5,
    exact: bool = True,
) -> Iterator[Row]:
    """Rows for ``prompts`` different prompts of each of ``lengths``.

    Raises RuntimeError if a token differs and the backend is ``exact``. With other backends, a near tie may resolve
    differently when a prompt's last tokens are computed alone.
    """
    asking = Asking(vocab_size, lengths, prompts, exact)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent))
        cache = stack.enter_context(daemon(*daemon_flags))

        @contextlib.contextmanager
        def engine(name: str) -> Iterator[tuple[Any, Client]]:
            address = f"unix:{folder}/{name}.sock"
            words = ["--listen", address, "--model", str(model), "--kvcache", cache, *engine_flags]
            with process("services.engine", address, *words) as started:
                client = Client(address)
                try:
                    asking.warm_up(client)
                    yield started, client
                finally:
                    client.close()

        with engine("first") as (first, client):
            asking.ask("cold", client)
            asking.ask("warm, the same engine", client)
            with engine("second") as (_, other):
                asking.ask("warm, another engine", other)
            first.kill()
            first.wait(30)
        with engine("again") as (_, client):
            asking.ask("warm, after kill -9 of the engine", client)
    for (where, length), found in asking.times.items():
        took, cold = statistics.median(found), statistics.median(asking.times["cold", length])
        bar = None if where == "cold" else BAR
        detail = f"to cold; median of {prompts} prompts, {min(found) * 1e3:.1f} to {max(found) * 1e3:.1f} ms"
        if not exact and where != "cold":
            detail += f"; {asking.others[where, length]} other tokens"
        yield Row("prefix", f"{where}, {length} tokens", took * 1e3, "ms", took / cold, bar, True, detail)
