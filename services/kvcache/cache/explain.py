"""Why a prompt's pages are, or are not, in the prefix cache. Walks the pool: for people who ask, not for every step.

In slices, between which the loop serves others: what is said of a page was true at a moment of the call, and of two
pages perhaps at two. Between slices it keeps hashes and tokens, never a page that may be given up meanwhile.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from heapq import nsmallest

from services.kvcache.pool.index.chain_hash import root_hash
from services.kvcache.pool.index.events import EventKind, EventRing
from services.kvcache.pool.pool import Pool

#: Other salts that are tried; more would make one question as dear as that many lookups.
MAX_SALTS = 64

#: Pages between two pauses: a few milliseconds.
SLICE = 1024


class Outcome(enum.Enum):
    """What is the matter with one page of a prompt."""

    HIT = enum.auto()
    LAST_TOKEN = enum.auto()  # it holds the prompt's last token, or is not full: never matched
    EVICTED = enum.auto()
    EXPIRED = enum.auto()
    DROPPED = enum.auto()  # with an earlier pool of this id
    OTHER_SALT = enum.auto()  # the same tokens are cached under another salt
    DIVERGED = enum.auto()  # another prompt is cached that is the same up to a token of this page
    NEVER_SEEN = enum.auto()  # or longer ago than events are kept


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """``page`` is set for a hit; ``diverged_at``, a position in the prompt, for a divergence."""

    outcome: Outcome
    page: tuple[int, int] | None = None
    diverged_at: int | None = None


_GONE = {
    EventKind.EVICTED: Outcome.EVICTED,
    EventKind.EXPIRED: Outcome.EXPIRED,
    EventKind.DROPPED: Outcome.DROPPED,
}


def explain(
    pool: Pool, events: EventRing, prompt: array[int], salt: str, *, others: bool
) -> Generator[None, None, list[PageAnswer]]:
    """An answer for each page that the prompt fills or begins, in slices. Changes nothing.

    Only with ``others`` does it say what is cached of other salts and of other prompts, which would tell one who asks
    often enough what they are: without, those pages were never seen.
    """
    size = pool.layout.page_size
    whole = (len(prompt) - 1) // size
    hashes: list[int] = []
    for hash_ in pool.index.chain(salt, _chunks(prompt, size)):
        hashes.append(hash_)
        if len(hashes) % SLICE == 0:
            yield
    answers: list[PageAnswer] = []
    for page in pool.index.match_each(salt, _chunks(prompt, size)):
        answers.append(PageAnswer(Outcome.HIT, pool.reference(page)))
        if len(answers) % SLICE == 0:
            yield
    hits = len(answers)
    fates = yield from _fates(events, pool.id, set(hashes[hits:]))
    elsewhere = (yield from _hits_elsewhere(pool, prompt, salt)) if others else 0
    common = 0
    if others and hits < whole:
        tokens = prompt[hits * size : (hits + 1) * size]
        common = yield from _common_tokens(pool, hashes[hits - 1] if hits else root_hash(salt), tokens)
    for at in range(hits, whole):
        if hashes[at] in fates:
            answers.append(PageAnswer(_GONE[fates[hashes[at]]]))
        elif at < elsewhere:
            answers.append(PageAnswer(Outcome.OTHER_SALT))
        elif at == hits and common:
            answers.append(PageAnswer(Outcome.DIVERGED, diverged_at=at * size + common))
        else:
            answers.append(PageAnswer(Outcome.NEVER_SEEN))
        if at % SLICE == 0:
            yield
    answers.append(PageAnswer(Outcome.LAST_TOKEN))
    return answers


def _chunks(prompt: array[int], size: int) -> Iterator[bytes]:
    """The whole pages of a prompt without its last token."""
    return (prompt[at * size : (at + 1) * size].tobytes() for at in range((len(prompt) - 1) // size))


def _fates(events: EventRing, pool_id: str, hashes: set[int]) -> Generator[None, None, dict[int, EventKind]]:
    """The last event of each link, if it is gone."""
    found: dict[int, EventKind] = {}
    for event in events.kept():
        if event.pool_id == pool_id and not event.tier:
            for link in event.links:
                if link.hash in hashes:
                    found[link.hash] = event.kind
            yield
    return {hash_: kind for hash_, kind in found.items() if kind is not EventKind.STORED}


def _hits_elsewhere(pool: Pool, prompt: array[int], salt: str) -> Generator[None, None, int]:
    """The pages of the longest prefix that is cached under another salt."""
    others = pool.index.salts() - {salt}
    yield
    most = 0
    for other in nsmallest(MAX_SALTS, others):
        yield
        count = 0
        for _ in pool.index.match_each(other, _chunks(prompt, pool.layout.page_size)):
            count += 1
            if count % SLICE == 0:
                yield
        most = max(most, count)
    return most


def _common_tokens(pool: Pool, above: int, mine: array[int]) -> Generator[None, None, int]:
    """The most leading tokens that a page cached after the same prefix has in common with these."""
    most = 0
    for other in pool.index.continuations(above):
        if other is None:
            yield
            continue
        theirs = array("I", other)
        same = next((at for at, token in enumerate(mine) if theirs[at] != token), len(mine))
        most = max(most, same)
    return most
