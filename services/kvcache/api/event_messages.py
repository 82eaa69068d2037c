"""What enters and leaves the prefix caches and the host tier, as the messages of WatchEvents."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.kvcache.api.requests import TOKEN_SLICE
from services.kvcache.cache.cache import KvCache
from services.kvcache.pool.index.events import MAX_LINKS, Event, EventKind
from services.kvcache.pool.index.frozen_links import FrozenLinks
from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.pool.pool import Pool

#: The tokens of the link with a hash; None if it has left.
Content = Callable[[int], bytes | None]

_EVENT_FIELDS = {
    EventKind.STORED: "stored",
    EventKind.EVICTED: "evicted",
    EventKind.EXPIRED: "expired",
    EventKind.DROPPED: "dropped",
}


def event_messages(cache: KvCache, event: Event, *, tokens: bool) -> Iterator[pb.WatchEventsResponse]:
    """One event of WatchEvents; with its ``tokens`` in as many messages as they take, all but the last with the number
    of the event before.
    """
    pool = next((pool for pool in cache.pools if pool.id == event.pool_id), None)
    columns = [link.hash for link in event.links], [link.parent for link in event.links]
    content = (tier_content(cache, event.pool_id) if event.tier else index_content(pool)) if tokens else None
    if event.kind is not EventKind.STORED:
        content = None
    for links, last in _links_messages(event.pool_id, pool, *columns, content=content, tier=bool(event.tier)):
        answer = pb.WatchEventsResponse(epoch=cache.epoch, sequence_number=event.number - (not last))
        getattr(answer, _EVENT_FIELDS[event.kind]).CopyFrom(links)
        yield answer


def index_content(pool: Pool | None) -> Content:
    """Tokens of what a pool has cached."""

    def content(key: int) -> bytes | None:
        found = None if pool is None else pool.index.content(key)
        return None if found is None else found[0]

    return content


def tier_content(cache: KvCache, pool_id: str) -> Content:
    """Tokens of what the host tier has of a pool."""

    def content(key: int) -> bytes | None:
        found = None if cache.tiers is None else cache.tiers.stored_link(pool_id, key)
        return None if found is None else found.tokens

    return content


def snapshot_messages(
    cache: KvCache, pool_id: str, *, tokens: bool = False, tiers: bool = False
) -> Iterator[pb.CacheLinks | None]:
    """Everything cached now in one pool, or in all when ``pool_id`` is empty, and with ``tiers`` what the host tier has
    of it; None now and then.

    It is copied at once, as whole arrays; the messages are made one by one, whatever has changed since.
    """
    pools = [pool for pool in cache.pools if not pool_id or pool.id == pool_id]
    taken = [(pool, pool.index.frozen()) for pool in pools]
    below = [(pool, cache.tiers.stored_links(pool.id)) for pool in pools] if tiers and cache.tiers is not None else []
    return chain(_column_messages(taken, tokens=tokens), _stored_messages(cache, below, tokens=tokens))


def _column_messages(taken: list[tuple[Pool, FrozenLinks]], *, tokens: bool) -> Iterator[pb.CacheLinks | None]:
    for pool, links in taken:
        content = index_content(pool) if tokens else None
        for columns in links.columns(MAX_LINKS):
            if columns is None:
                yield None
                continue
            yield from (message for message, _ in _links_messages(pool.id, pool, *columns, content=content))


def _stored_messages(
    cache: KvCache, below: list[tuple[Pool, list[StoredLink]]], *, tokens: bool
) -> Iterator[pb.CacheLinks | None]:
    for pool, stored in below:
        content = tier_content(cache, pool.id) if tokens else None
        for at in range(0, len(stored), MAX_LINKS):
            links = [one.link for one in stored[at : at + MAX_LINKS]]
            columns = [link.hash for link in links], [link.parent for link in links]
            yield from (message for message, _ in _links_messages(pool.id, pool, *columns, content=content, tier=True))
            yield None


def _links_messages(
    pool_id: str,
    pool: Pool | None,
    hashes: Sequence[int],
    parents: Sequence[int],
    *,
    content: Content | None,
    tier: bool = False,
) -> Iterator[tuple[pb.CacheLinks, bool]]:
    """Links of one pool, and whether it is the last message of them; with their tokens, if there is ``content``."""
    size = 0 if pool is None else pool.page_size
    most = max(1, TOKEN_SLICE // size) if content is not None and size else MAX_LINKS
    for at in range(0, len(hashes), most):
        message = pb.CacheLinks(
            pool_id=pool_id, hashes=hashes[at : at + most], parent_hashes=parents[at : at + most], page_size=size
        )
        if tier:
            message.tier = pb.TIER_HOST
        for position, link in enumerate(message.hashes if content is not None else ()):
            found = content(link) if content is not None else None
            if found is None:
                message.gone.append(position)
            else:
                message.tokens.extend(array("I", found))
        yield message, at + most >= len(hashes)
