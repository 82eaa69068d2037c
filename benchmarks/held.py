"""How long each call and each background work of the daemon holds its loop, with the worst input within the limits.

One process, no network, no garbage collection: what is measured is the processor time of the loop's thread between two
passes of the loop, so that the machine's other work does not show. A call's time includes reading its message and
writing its reply. Printed is the longest pass of each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import structlog

from benchmarks.cache import NoArena
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.access.identity import CALLER, Identity
from services.common.access.policy import Policy
from services.kvcache.api.roles import INCLUDES
from services.kvcache.api.servicer import KvCacheServicer
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.retention import Retention
from services.kvcache.pool.layout import PageLayout
from services.kvcache.scrub.scrubber import Scrubber
from services.kvcache.slices import Slices

OWNER = Identity("uid:0")
LAYOUT = PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, dtype="f16")
LAYOUT_PB = pb.PageLayout(page_size=1, layers=1, kv_heads=1, head_dim=1, data_type=pb.DATA_TYPE_F16)
#: Milliseconds: of a pass that is longer others would notice.
BAR_MS = 10.0
SEQUENCES = 65536


class Stand:
    """A daemon's state with its servicer, and a session on a pool of tiny pages."""

    def __init__(self, pages: int, **limits: Any) -> None:
        self.offset = 0.0
        self.cache = KvCache(
            Limits(budget_bytes=1 << 60, host_memory=1 << 40, default_ttl_s=600.0, verify_share=0.0, **limits),
            epoch=1,
            clock=lambda: time.monotonic() + self.offset,
            random_bytes=iter_bytes(),
            make_arena=lambda *_: NoArena(),
            observe=lambda process: None,
        )
        self.slices = Slices(self.cache.now)
        scrubber = Scrubber(self.cache, asyncio.Event())
        self.servicer = KvCacheServicer(self.cache, scrubber, Policy(OWNER, [], INCLUDES), slices=self.slices)
        self.pages = pages
        self.session = self.join()

    def join(self) -> Any:
        """One more session."""
        session = self.cache.open_session("held", "pool", LAYOUT, pool_pages=self.pages, caller=OWNER.text)
        return self.cache.attach_session(session.id, session.canary, OWNER.text)

    def sequences(self, count: int, pages: int = 1, retention: Retention | None = None) -> None:
        """Open so many, of so many pages each; with a retention they publish one."""
        for first in range(0, count, 4096):
            names = [f"sequence-{at}" for at in range(first, min(first + 4096, count))]
            openings = [Opening(name, Prompt(array("I", [at]), "", retention), pages) for at, name in enumerate(names)]
            self.cache.calls.allocate(self.session.id, openings, [], OWNER.text)

    def cached(self) -> None:
        """Fill the pool with cached pages of one chain."""
        self.long(self.pages - 1)
        self.cache.calls.remove(self.session.id, ["long"], OWNER.text)
        while self.cache.debts:
            self.cache.debts.pay(self.cache.now())

    def long(self, pages: int) -> None:
        """One sequence of so many pages, all published."""
        tokens = array("I", range(pages))
        self.cache.calls.allocate(self.session.id, [Opening("long", Prompt(tokens[:1]), pages)], [], OWNER.text)
        for first in range(0, pages, 1 << 18):
            some = tokens[first : first + (1 << 18)]
            self.cache.calls.append(self.session.id, Steps(["long"], [first], [len(some)], some, [], []), OWNER.text)

    async def call(self, name: str, **fields: Any) -> None:
        """One call, from bytes to bytes."""
        request = getattr(pb, f"{name}Request")
        message = request(**fields).SerializeToString()
        await asyncio.sleep(0)
        answer = getattr(self.servicer, name)(request.FromString(message), None)
        if isinstance(answer, AsyncIterator):
            async for one in answer:
                one.SerializeToString()
                if not one.HasField("reset") and not len(one.stored.links):
                    break
        else:
            (await answer).SerializeToString()


def iter_bytes() -> Callable[[int], bytes]:
    """Ids that differ."""
    numbers = itertools.count(1)
    return lambda size: next(numbers).to_bytes(size, "little")


async def longest(work: Callable[[], Awaitable[object]]) -> float:
    """The longest pass of the loop while work is under way, in milliseconds of its thread."""
    worst, done = 0.0, False

    async def watch() -> None:
        nonlocal worst
        before = time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now = time.thread_time()
            worst, before = max(worst, now - before), now

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    try:
        await work()
        await asyncio.sleep(0)
    finally:
        done = True
        await watching
    return worst * 1000


# --- the worst of each ------------------------------------------------------------------------------------------------


async def open_session() -> float:
    """A pool of a million pages, made by a thread"""
    stand = Stand(1 << 18)
    stand.cached()
    stand.cache.close_session(stand.session.id, OWNER.text)
    return await longest(lambda: stand.call("OpenSession", pool_id="new", layout=LAYOUT_PB, pool_pages=1 << 20))


async def allocate() -> float:
    """One sequence of a million pages."""
    stand = Stand(1 << 20)
    demand = pb.Demand(
        opening=pb.SequenceOpening(sequence_id="a", prompt=pb.Prompt(tokens=[1]), total_pages=(1 << 20) - 1)
    )
    return await longest(lambda: stand.call("AllocatePages", session_id=stand.session.id, demands=[demand]))


async def append() -> float:
    """A quarter of a million tokens, each of which completes a page."""
    stand = Stand(1 << 18)
    count = (1 << 18) - 1
    stand.cache.calls.allocate(stand.session.id, [Opening("a", Prompt(array("I", [0])), count)], [], OWNER.text)
    steps = pb.SequenceSteps(sequence_ids=["a"], starts=[0], token_counts=[count], tokens=range(count))
    return await longest(lambda: stand.call("AppendTokens", session_id=stand.session.id, steps=steps))


async def remove() -> float:
    """As many sequences as a call may name."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    names = [f"sequence-{at}" for at in range(4096)]
    return await longest(lambda: stand.call("RemoveSequences", session_id=stand.session.id, sequence_ids=names))


async def close() -> float:
    """A session of 65,536 sequences."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    return await longest(lambda: stand.call("CloseSession", session_id=stand.session.id))


async def get_sequence() -> float:
    """A million pages, with their tokens."""
    stand = Stand(1 << 20)
    stand.long((1 << 20) - 1)
    fields = {"session_id": stand.session.id, "sequence_id": "long", "include_tokens": True}
    return await longest(lambda: stand.call("GetSequence", **fields))


async def list_sequences() -> float:
    """The last thousand of 65,536."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    return await longest(lambda: stand.call("ListSequences", cursor="64000", limit=1000))


async def stats() -> float:
    """As many sessions as there may be."""
    stand = Stand(1 << 10, identity_sessions=256)
    for _ in range(255):
        stand.join()
    return await longest(lambda: stand.call("GetStats"))


async def fsck() -> float:
    """A million cached pages."""
    stand = Stand(1 << 20)
    stand.cached()
    return await longest(lambda: stand.call("Fsck"))


async def evict() -> float:
    """A million cached pages."""
    stand = Stand(1 << 20)
    stand.cached()
    return await longest(lambda: stand.call("EvictPages", pool_id="pool"))


async def drop() -> float:
    """A pool of a million cached pages."""
    stand = Stand(1 << 20)
    stand.cached()
    stand.cache.close_session(stand.session.id, OWNER.text)
    return await longest(lambda: stand.call("DropPool", pool_id="pool"))


async def expire() -> float:
    """65,536 sequences."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    await asyncio.sleep(0)
    return await longest(lambda: stand.call("ExpireSequences", older_than={}))


async def release() -> float:
    """A lost session with 65,536 unfinished pages."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    stand.offset += 601
    stand.cache.sweep()
    while stand.cache.debts:
        stand.cache.debts.pay(stand.cache.now())
    return await longest(lambda: stand.call("ReleaseQuarantine", session_handle=stand.session.handle))


async def sweep() -> float:
    """A session that is lost with 65,536 sequences."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    stand.offset += 601
    return await longest(lambda: stand.slices.run(stand.cache.sweeping()))


async def lost_again() -> float:
    """A session that is lost with 65,536 sequences that expired before."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    stand.cache.expire_sequences(0.0)
    stand.offset += 601
    return await longest(lambda: stand.slices.run(stand.cache.sweeping()))


async def retain() -> float:
    """65,536 sequences of two retained pages each, whose retention runs out."""
    stand = Stand(1 << 18)
    stand.sequences(SEQUENCES, 2, Retention(1, 5))
    for at in range(SEQUENCES):
        name = f"sequence-{at}"
        stand.cache.calls.append(
            stand.session.id, Steps([name], [0], [2], array("I", [at % 4096, at]), [], []), OWNER.text
        )
    for first in range(0, SEQUENCES, 4096):
        names = [f"sequence-{at}" for at in range(first, first + 4096)]
        stand.cache.calls.remove(stand.session.id, names, OWNER.text)
    stand.offset += 6
    return await longest(lambda: stand.slices.run(stand.cache.sweeping()))


async def debts() -> float:
    """What a closed session of 65,536 sequences owes."""
    stand = Stand(1 << 17)
    stand.sequences(SEQUENCES)
    stand.cache.close_session(stand.session.id, OWNER.text)
    return await longest(lambda: stand.slices.run(stand.cache.debts.paying()))


WORKS: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
    "OpenSession": open_session,
    "AllocatePages": allocate,
    "AppendTokens": append,
    "RemoveSequences": remove,
    "CloseSession": close,
    "GetSequence": get_sequence,
    "ListSequences": list_sequences,
    "GetStats": stats,
    "Fsck": fsck,
    "EvictPages": evict,
    "DropPool": drop,
    "ExpireSequences": expire,
    "ReleaseQuarantine": release,
    "sweep, a lost session": sweep,
    "sweep, with expired sequences": lost_again,
    "sweep, retention": retain,
    "debts": debts,
}


def main() -> int:
    """Print the table; 1 when a pass was longer than the bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held", description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; default: all")
    chosen = parser.parse_args().works or list(WORKS)
    if unknown := set(chosen) - set(WORKS):
        parser.error(f"no such work: {', '.join(sorted(unknown))}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    CALLER.set(OWNER)
    gc.disable()
    missed = False
    print("| call or work | worst input | longest pass ms |\n|---|---|---|")
    for name in chosen:
        took = asyncio.run(WORKS[name]())
        missed |= took > BAR_MS
        worst = (WORKS[name].__doc__ or "").strip().rstrip(".")
        print(f"| `{name}` | {worst} | {took:.1f}{' (**over**)' if took > BAR_MS else ''} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
