"""What the tiers below the pools have done, as messages."""

from __future__ import annotations

import asyncio
import contextlib
from array import array

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.kvcache.pool.pool import Pool
from services.kvcache.slices import Slices
from services.kvcache.tiers.counts import HOST, OUTER
from services.kvcache.tiers.tiers import Tiers

#: Seconds that an explanation waits for the outer tier.
LOOKUP_S = 2.0

TIERS = {HOST: pb.TIER_HOST, OUTER: pb.TIER_OUTER}


def tier_messages(tiers: Tiers, now: float) -> list[pb.TierStats]:
    """The lower tiers of GetStats, fastest first."""
    messages = []
    for name in (HOST, OUTER):
        state = tiers.state(name)
        if state is None:
            continue
        counts, rate, host = tiers.counts.tiers[name], tiers.fetcher.rates[name], tiers.host
        message = pb.TierStats(
            tier=TIERS[name],
            available=state.available,
            detail=state.detail,
            stored_pages=counts.stored_pages,
            stored_bytes=counts.stored_bytes,
            fetched_pages=counts.fetched_pages,
            fetched_bytes=counts.fetched_bytes,
            looked_up_pages=counts.looked_up_pages,
            found_pages=counts.found_pages,
            failed_pages=counts.failed_pages,
            latency_s=rate.latency(now),
            bytes_per_s=rate.bandwidth(now),
        )
        if name == HOST and host is not None:
            message.capacity_bytes, message.used_bytes = host.capacity, host.used_bytes
            message.pages, message.evicted_pages = len(host), host.evicted
        messages.append(message)
    return messages


def mover_message(tiers: Tiers) -> pb.MoverStats:
    """The mover of GetStats."""
    counts = tiers.counts
    return pb.MoverStats(
        running=tiers.mover.running,
        restarts=tiers.mover.restarts,
        queued_pages=tiers.spills.queued,
        moving_pages=tiers.spills.moving + tiers.fetcher.moving,
        dropped_pages=counts.dropped_pages,
        lost_pages=counts.lost_pages,
        fills=counts.fills,
        waited_openings=counts.waited_openings,
        regret_s=tiers.fetcher.regret.seconds,
    )


async def name_tiers(
    slices: Slices, tiers: Tiers, pool: Pool, prompt: array[int], salt: str, response: pb.ExplainPrefixResponse
) -> None:
    """Say of each page of an explanation which tier has it. What the outer tier has only it can say, if it does so in
    time.
    """
    found, behind, beyond = await slices.run(tiers.locate(pool, prompt, salt))
    for page in response.pages[:found]:
        page.tier = pb.TIER_POOL
    there = await _looked_up(tiers, [digest for _, digest in beyond])
    for at, _ in beyond[:there]:
        behind[at] = behind[at]._replace(tier=behind[at].tier or OUTER)
    for page, where in zip(response.pages[found:], behind, strict=False):
        page.tier, page.filling = TIERS.get(where.tier, pb.TIER_UNSPECIFIED), where.filling


async def _looked_up(tiers: Tiers, digests: list[bytes]) -> int:
    """How many of these pages, from the first, the outer tier has; 0 if it does not say so in time."""
    answer = asyncio.get_running_loop().create_future()

    def found(count: int, seconds: float | None) -> None:
        if not answer.done():
            answer.set_result(count)

    if not digests or not tiers.lookups.begin(digests, found):
        return 0
    with contextlib.suppress(TimeoutError):
        return int(await asyncio.wait_for(answer, LOOKUP_S))
    return 0
