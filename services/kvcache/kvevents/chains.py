"""Links of the prefix cache as events: with their tokens, a chain's consecutive links together, parents first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from services.kvcache.kvevents.format import BlockRemoved, BlockStored
from services.kvcache.pool.index.events import MAX_LINKS, Link
from services.kvcache.pool.index.frozen_links import FrozenLinks
from services.kvcache.pool.lower_tiers import StoredLink
from services.kvcache.pool.pool import Pool

#: Tokens of one event, and what is looked at in one go: a few milliseconds.
MOST_TOKENS = 4096


def medium(pool: Pool) -> str:
    """Where the pages of a pool are, as vLLM names it."""
    return "CPU" if pool.arena.device is None else "GPU"


def tier_medium(pool: Pool) -> str:
    """Where the pages are that the host tier has of a pool: not where those of the pool are."""
    return "HOST" if pool.arena.device is None else "CPU"


def stored(
    pool: Pool, links: Iterable[Link | None], below: Callable[[int], StoredLink | None] | None = None
) -> Iterator[BlockStored | None]:
    """The links that are cached now; None wherever it may pause.

    The tokens are looked up here, and not kept with the links: one that is not cached any more is left out, and with it
    all behind it, which left before. Its removal is an event of its own, later. With ``below``, which looks up a hash,
    they are those of the host tier.
    """
    where = medium(pool) if below is None else tier_medium(pool)
    most = max(1, MOST_TOKENS // pool.page_size)
    event: BlockStored | None = None
    for link in links:
        if link is None:
            yield None
            continue
        if below is None:
            content = pool.index.content(link.hash)
        else:
            there = below(link.hash)
            content = None if there is None else there[1:]
        if content is None:
            continue
        tokens, salt = content
        first = salt is not None
        if event is None or first or link.parent != event.block_hashes[-1] or len(event.block_hashes) >= most:
            if event is not None:
                yield event
            event = BlockStored([], None if first else link.parent, [], pool.page_size, None, where, None)
            if salt:
                event.extra_keys = []
        event.block_hashes.append(link.hash)
        event.token_ids += array("I", tokens)
        if event.extra_keys is not None:
            event.extra_keys.append([salt] if salt else None)
    if event is not None:
        yield event


def removed(links: Iterable[Link], where: str | None) -> BlockRemoved:
    """Links that are not cached any more."""
    return BlockRemoved([link.hash for link in links], where)


def parents_first(links: FrozenLinks) -> Iterator[Link | None]:
    """Every link after its parent, a chain's links in a row; None now and then."""
    followers: dict[int, list[int]] = {}
    for columns in links.columns(MAX_LINKS):
        for key, parent in zip(*columns, strict=True) if columns else ():
            followers.setdefault(parent, []).append(key)
        yield None
    ahead = [Link(key, parent) for parent, keys in followers.items() if not links.has(parent) for key in keys]
    at = 0
    while ahead:
        link = ahead.pop()
        yield link
        ahead.extend(Link(key, link.hash) for key in followers.get(link.hash, ()))
        at += 1
        if at % MAX_LINKS == 0:
            yield None
