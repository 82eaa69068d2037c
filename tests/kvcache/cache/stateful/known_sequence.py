"""What engines know of their sequences and pages, each of its own and all of them together."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.kvcache.conftest import LAYOUT_PB

PAGE = LAYOUT_PB.page_size
HALF = PAGE * LAYOUT_PB.head_dim * 4  # bytes of K in a page, and of V behind them
SLOT = LAYOUT_PB.head_dim * 4


class Ledger:
    """Which pages are in a block table of any client. A page is entered after its grant and crossed out before the call
    that lets it go, so whatever is in here is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: Counter[int] = Counter()

    def enter_new(self, page: int, who: str) -> None:
        with self._lock:
            assert not self._uses[page], f"page {page} was granted to {who} as new, and another sequence has it"
            self._uses[page] += 1

    def enter_shared(self, page: int) -> None:
        with self._lock:
            self._uses[page] += 1

    def cross_out(self, pages: Iterable[int]) -> None:
        with self._lock:
            for page in pages:
                self._uses[page] -= 1


class KnownSequence:
    """A sequence as its engine knows it: tokens reported, tokens run since, and the block table."""

    def __init__(self, name: str, salt: str, tokens: list[int], prompt: int) -> None:
        self.name = name
        self.salt = salt
        self.tokens = tokens  # all it will ever have
        self.prompt = pb.Prompt(tokens=tokens[:prompt], salt=salt)
        self.reported = 0
        self.run = 0
        self.pages: list[int] = []
        self.unsure = False  # a call for it may still arrive: it may have more than is known
        self._digests: list[bytes] = []

    def digest(self, at: int) -> bytes:
        """What stands for K of the token at a position: it depends on everything before."""
        for position in range(len(self._digests), at + 1):
            before = self._digests[-1] if self._digests else self.salt.encode()
            token = self.tokens[position].to_bytes(4, "little")
            self._digests.append(hashlib.blake2b(before + token, digest_size=SLOT).digest())
        return self._digests[at]

    def pages_for(self, more: int) -> int:
        return -(-min(self.run + more, len(self.tokens)) // PAGE)

    def opening(self, total_pages: int) -> pb.Demand:
        return pb.Demand(opening=pb.SequenceOpening(sequence_id=self.name, prompt=self.prompt, total_pages=total_pages))


def report_of(texts: Iterable[KnownSequence]) -> pb.SequenceSteps:
    """What was run and not reported yet."""
    steps = pb.SequenceSteps()
    for text in texts:
        tokens = text.tokens[text.reported : text.run]
        steps.sequence_ids.append(text.name)
        steps.starts.append(text.reported)
        steps.token_counts.append(len(tokens))
        steps.tokens.extend(tokens)
    return steps


def steps_of(texts: Iterable[KnownSequence], more: dict[str, int]) -> pb.SequenceSteps:
    """Report, and ask for room for so many tokens more."""
    known = [*texts]
    steps = report_of(known)
    steps.total_pages.extend(text.pages_for(more[text.name]) for text in known)
    steps.known_pages.extend(len(text.pages) for text in known)
    return steps
