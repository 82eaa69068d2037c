"""Why a prompt's pages are, or are not, in the prefix cache. Walks the pool: for people who ask, not for every step."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from services.kvcache.pool.events import EventKind, EventRing
from services.kvcache.pool.pool import Pool
from services.kvcache.pool.prefix_cache import root_hash

#: Other salts that are tried; more would make one question as dear as that many lookups.
MAX_SALTS = 64


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


def explain(pool: Pool, events: EventRing, prompt: array[int], salt: str, *, others: bool) -> list[PageAnswer]:
    """An answer for each page that the prompt fills or begins. Changes nothing.

    Only with ``others`` does it say what is cached of other salts and of other prompts, which would tell one who asks
    often enough what they are: without, those pages were never seen.
    """
    size = pool.layout.page_size
    hits = pool.match(prompt, salt)
    answers = [PageAnswer(Outcome.HIT, pool.reference(page)) for page in hits]
    whole = [prompt[at * size : (at + 1) * size].tobytes() for at in range((len(prompt) - 1) // size)]
    hashes = list(pool.index.chain(salt, whole))
    fates = events.fates(pool.id, set(hashes[len(hits) :]))
    salts = _other_salts(pool, salt) if others else ()
    elsewhere = max((len(pool.match(prompt, other)) for other in salts), default=0)
    for at in range(len(hits), len(whole)):
        if hashes[at] in fates:
            answers.append(PageAnswer(_GONE[fates[hashes[at]]]))
        elif at < elsewhere:
            answers.append(PageAnswer(Outcome.OTHER_SALT))
        elif (
            others
            and at == len(hits)
            and (common := _common_tokens(pool, hashes[at - 1] if at else None, whole[at], salt))
        ):
            answers.append(PageAnswer(Outcome.DIVERGED, diverged_at=at * size + common))
        else:
            answers.append(PageAnswer(Outcome.NEVER_SEEN))
    answers.append(PageAnswer(Outcome.LAST_TOKEN))
    return answers


def _other_salts(pool: Pool, salt: str) -> Iterator[str]:
    others = sorted(pool.index.salts() - {salt})
    yield from others[:MAX_SALTS]


def _common_tokens(pool: Pool, parent: int | None, tokens: bytes, salt: str) -> int:
    """The most leading tokens that a page cached behind the same prefix has in common with these."""
    above = root_hash(salt) if parent is None else parent
    mine, most = array("I", tokens), 0
    for other in pool.index.continuations(above):
        theirs = array("I", other)
        same = next((at for at, token in enumerate(mine) if theirs[at] != token), len(mine))
        most = max(most, same)
    return most
